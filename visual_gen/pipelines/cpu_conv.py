"""Fast fp32 3D convolutions on the CPU, for the VAE.

torch sends a small 3D convolution to a slow kernel (`slow_conv3d`: it looks at batch, channels, frames and height, and
not at width) and to oneDNN only above a size that a small VAE does not reach. With oneDNN throughout and the channels
innermost, decoding wan-shapes takes about a fifth of the time; the result is the same to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OneDnnConv3d(TorchFunctionMode):
    """Inside this context, conv3d of fp32 CPU tensors runs in oneDNN, if this torch has it; all else is as before.

    torch.mkldnn_convolution is in no documentation of torch; one without it keeps its own kernel, slower and right.
    """

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.conv3d and not kwargs and len(args) == 7 and _served(*args):
            x, weight, bias, stride, padding, dilation, groups = args
            return torch.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
        return func(*args, **(kwargs or {}))


def _served(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: Any, padding: Any, *rest: Any
) -> bool:
    return (
        hasattr(torch, "mkldnn_convolution")
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and isinstance(padding, tuple)
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def channels_innermost(model: torch.nn.Module) -> None:
    """Lay the convolution weights of `model` out so that its activations follow, channels innermost. In place."""
    formats = {torch.nn.Conv2d: torch.channels_last, torch.nn.Conv3d: torch.channels_last_3d}
    for module in model.modules():
        for kind, memory_format in formats.items():
            if isinstance(module, kind):
                module.weight.data = module.weight.data.contiguous(memory_format=memory_format)
