"""What a forward of the causal model needs beside latents and timesteps, and one captured forward that serves many.

Shape letters: R rows, C channels, F latent frames of a row's chunk, N frames of all rows, S tokens of a frame,
D head_dim, H, W latent height and width.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention_backend.graph_buffers import GraphBuffers
from attention_backend.kv_cache import KVBatch, PagedBatch
from visual_gen.models.wan.extra_tokens import ExtraTokens
from visual_gen.modules.attention import CrossKV


@dataclass(frozen=True, eq=False)
class CausalInputs:
    """Places, positions and texts of a batch of chunks; the same for all forwards of these chunks. Made by
    CausalWanTransformer.prepare."""

    kv: KVBatch
    rotary: torch.Tensor  # complex64 [N, S, 1, D / 2], of absolute frames; with extra, of all tokens [1, T, 1, D / 2]
    text: tuple[CrossKV, ...]  # one for each layer, over the same pool rows; their metadata is one object
    extra: ExtraTokens | None = None
    text_buffers: GraphBuffers | None = None  # that these metadata lie in, where they are a graph's

    def signature(self) -> tuple:
        """What a graph is keyed on: shapes, bounds and the read path, never lengths, places or positions."""
        return (self.kv.signature(), tuple(self.rotary.shape), self.text[0].metadata.signature())

    def static(self) -> CausalInputs:
        """A copy with tensors of its own at fixed addresses, for a graph; copy_into refreshes them."""
        if not isinstance(self.kv, PagedBatch):
            raise ValueError("the batch is not a paged cache's, which alone gives a graph tensors of its own")
        if self.extra is not None:
            raise ValueError("a graph has no places for extra tokens: run these chunks without one")
        buffers = GraphBuffers(self.text[0].metadata)
        text = tuple(dataclasses.replace(layer, metadata=buffers.entry) for layer in self.text)
        return CausalInputs(self.kv.static(), self.rotary.clone(), text, text_buffers=buffers)

    def copy_into(self, static: CausalInputs) -> None:
        """Puts these rows' places, positions and texts into a graph's inputs, before every replay.

        Raises ValueError if the graph is for other shapes, bounds, read, cache or text pool.
        """
        if static.signature() != self.signature():
            raise ValueError(
                f"the graph is for {static.signature()}, these rows have {self.signature()}: capture another"
            )
        if static.text[0].k is not self.text[0].k:
            raise ValueError("the graph reads another text pool: write the prompt into that one, or capture another")
        self.kv.copy_into(static.kv)
        static.rotary.copy_(self.rotary)
        static.text_buffers.copy_from(self.text[0].metadata)


class CausalGraph:
    """One forward of a causal model as a CUDA graph, for all chunks whose inputs have its signature.

    run: CausalWanTransformer.run. The rest are the inputs that it is captured with, of an open chunk, which it writes
    as any forward does. Calls take inputs of the same shapes; the result, and the memory that it is in, is valid until
    the next call.
    """

    def __init__(
        self, run: Callable, hidden_states: torch.Tensor, timestep: torch.Tensor, inputs: CausalInputs
    ) -> None:
        self.inputs = inputs.static()
        self._latents, self._timestep = hidden_states.clone(), timestep.clone()
        call = (self._latents, self._timestep, self.inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is made on first use must not be made in the capture
            for _ in range(2):
                run(*call)
        torch.cuda.current_stream().wait_stream(stream)
        # A dropped engine is a cycle and keeps its graphs until the collector comes. If it came during a capture,
        # freeing them would break it, and with it the device's random numbers for the rest of the process.
        gc.collect()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = run(*call)

    def __call__(self, hidden_states: torch.Tensor, timestep: torch.Tensor, inputs: CausalInputs) -> torch.Tensor:
        """The flow [R, C, F, H, W], as CausalWanTransformer.run gives it."""
        for name, mine, given in (
            ("hidden_states", self._latents, hidden_states), ("timestep", self._timestep, timestep)
        ):  # fmt: skip
            if mine.shape != given.shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}; the graph is for {tuple(mine.shape)}")
        inputs.copy_into(self.inputs)
        self._latents.copy_(hidden_states)
        self._timestep.copy_(timestep)
        self._graph.replay()
        return self._out
