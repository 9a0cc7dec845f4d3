"""Muon: orthogonalised momentum for matrices (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/)."""

from collections.abc import Sequence

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Matrices [n, rows, columns] with their singular values brought near 1."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Steps weights of one shape together; a convolution's weight is the matrix [out, in × kernel].

    `learning_rate` is read at every step: a 0-dim tensor or a float. It is the root mean square of a step divided by
    `step_size`; at 0.2, steps are about as large as AdamW's, so that both can take one learning rate. All of it is
    tensor work without waiting, so that a CUDA graph can hold a step.
    """

    def __init__(
        self, parameters: Sequence[Tensor], learning_rate: Tensor | float, momentum: float = 0.95,
        weight_decay: float = 0.0, step_size: float = 0.2,
    ) -> None:
        self.learning_rate, self.momentum, self.weight_decay = learning_rate, momentum, weight_decay
        self.step_size = step_size
        self.groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            if parameter.ndim < 2:
                raise ValueError(f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}")
            self.groups.setdefault((parameter.shape[0], parameter[0].numel()), []).append(parameter)
        self.buffers = {shape: torch.zeros(len(group), *shape, device=group[0].device)
                        for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self) -> None:
        for shape, group in self.groups.items():
            gradients = torch.stack([parameter.grad.reshape(shape) for parameter in group]).float()
            buffer = self.buffers[shape].lerp_(gradients, 1 - self.momentum)
            update = orthogonalise(gradients.lerp(buffer, self.momentum)) * (self.step_size * max(shape) ** 0.5)
            if self.weight_decay:
                torch._foreach_mul_(group, 1 - self.weight_decay * self.learning_rate)
            steps = zip((update * self.learning_rate).unbind(0), group, strict=True)
            torch._foreach_sub_(group, [step.view(parameter.shape) for step, parameter in steps])

    def state_dict(self) -> dict[str, dict]:
        return {"buffers": self.buffers}

    def load_state_dict(self, state: dict) -> None:
        for shape, buffer in self.buffers.items():
            buffer.copy_(state["buffers"][shape])
