"""The transformers of a checkpoint: one, or two of which each serves its own noise levels (Wan 2.2 A14B)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

HOST = torch.device("cpu")


class Experts:
    """One transformer, or two: the first for timesteps from `boundary_timestep` up, the second for those below.

    one_on_device: only the one in use lies on the device, the other rests in host memory, and they change places when
    the other is asked for. One must be on the device already, the other in host memory.
    """

    def __init__(
        self,
        transformers: Sequence[torch.nn.Module],
        boundary_timestep: float | None = None,
        *,
        one_on_device: bool = False,
    ) -> None:
        self.transformers = tuple(transformers)
        self.boundary_timestep = boundary_timestep
        self.one_on_device = one_on_device
        self.exchanges = 0
        self._on_device: int | None = 0
        self._device = self.transformers[0].device
        # Of the weights' places: calls may overlap, and those of a callback come from the same thread.
        self._places = threading.RLock()

    @classmethod
    def load(
        cls,
        load: Callable[[str], torch.nn.Module],
        names: Sequence[str],
        boundary_timestep: float | None,
        *,
        one_on_device: bool,
    ) -> Experts:
        """`load(name)` gives a transformer on the device. The last comes first, so that with one_on_device it has left
        before the next arrives, and the first is there when denoising begins."""
        loaded = []
        for name in reversed(names):
            transformer = load(name)
            if one_on_device and name != names[0]:
                for parameter in transformer.parameters():
                    # Not Module.to, which would choose backends for the host.
                    parameter.data = parameter.data.to(HOST)
            loaded.append(transformer)
        return cls(loaded[::-1], boundary_timestep, one_on_device=one_on_device)

    def index(self, timestep: float) -> int:
        """Which transformer serves `timestep`."""
        return 0 if self.boundary_timestep is None or timestep >= self.boundary_timestep else 1

    @contextmanager
    def use(self, index: int) -> Iterator[torch.nn.Module]:
        """The transformer, on the device until the context ends. With one_on_device a call that needs the other waits
        until then."""
        if not self.one_on_device:
            yield self.transformers[index]
            return
        with self._places:
            if self._on_device != index:
                self._exchange(index)
            yield self.transformers[index]

    def _exchange(self, index: int) -> None:
        """Tensor by tensor, so that device and host hold one transformer and one tensor more at most. Every tensor is
        whole in one place at any time: an exchange that was interrupted is finished by the next."""
        self._on_device = None
        coming, going = self.transformers[index], self.transformers[1 - index]
        with torch.inference_mode(False), torch.no_grad():  # steps run in inference mode, which would mark the weights
            for new, old in zip(coming.parameters(), going.parameters(), strict=True):
                room = new.data
                if room.device == HOST:
                    new.data = room.to(self._device)
                if old.data.device != HOST:
                    # The host memory that the other has left, so that none is taken and touched anew.
                    old.data = room.copy_(old.data) if room.device == HOST else old.data.to(HOST)
        self._on_device = index
        self.exchanges += 1
