"""How a stream engine is set up: counts, memory, and what forwards are filled up to."""

from __future__ import annotations

from dataclasses import dataclass

from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.stream_forward import even_frames
from visual_gen.pipelines.stream_state import check_guidance
from visual_gen.runtime.streams import UNREAD_CHUNKS

POLICIES = ("refuse", "evict_lru")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """guidance_scale: where a stream does not say; above 1, memory is for two branches of each stream.

    max_streams: how many may be open; computing a window anew takes the room of one more meanwhile. memory_bytes: of
    the KV cache; None: what max_streams of the default window take. batch_rows: the most rows of a forward, a row being
    a branch of a stream; None: all. policy: what happens when there is no room: "refuse", or "evict_lru", which closes
    the stream that was not stepped for longest. rollback_chunks: how many chunks a stream can take back.
    waiting_chunks: a stream with so many chunks not taken is not stepped. text_len: tokens of a text; text_slots: how
    many texts there is room for (None: three for each stream).

    action_capacity: the most forward-only tokens of a stream (Stream.set_extra).

    deterministic: every forward has as many frames, filled up by pads where it must, and the same read, so that a
    stream's bits do not depend on who is there; it has no action_capacity. graphs: forwards run as CUDA graphs, filled
    up to a few sizes, but those with forward-only tokens.
    ValueError on what cannot be.
    """

    guidance_scale: float = 1.0
    max_streams: int = 4
    batch_rows: int | None = None
    memory_bytes: int | None = None
    policy: str = "refuse"
    rollback_chunks: int = 0
    waiting_chunks: int = 4
    text_len: int = 512
    text_slots: int | None = None
    action_capacity: int = 0
    deterministic: bool = False
    graphs: bool = False

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        check_guidance(self.guidance_scale)
        for name, least in (
            ("max_streams", 1), ("text_len", 1), ("waiting_chunks", 1), ("rollback_chunks", 0), ("batch_rows", 1),
            ("action_capacity", 0),
            ("text_slots", 1), ("memory_bytes", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            optional = name in ("batch_rows", "text_slots", "memory_bytes") and value is None
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")

        if self.deterministic and self.action_capacity:
            raise ValueError(
                f"action_capacity is {self.action_capacity} in a deterministic engine, whose forwards all have as many "
                "tokens: leave one of them out"
            )

    @property
    def branches(self) -> int:
        """That memory is for, of each stream."""
        return 2 if self.guidance_scale > 1 else 1

    @property
    def rows(self) -> int:
        return self.batch_rows or self.max_streams * self.branches

    @property
    def kept_chunks(self) -> int:
        """Of a stream, that can be taken back."""
        return self.rollback_chunks + UNREAD_CHUNKS

    def buckets(self, transformer: CausalWanTransformer, frame_tokens: int, chunk_frames: int) -> list[int]:
        """Numbers of frames that forwards are filled up to; none if they are not."""
        if self.graphs and transformer.device.type != "cuda":
            raise ValueError(f"graphs are CUDA graphs and the model is on {transformer.device}: leave graphs out")
        if self.deterministic:
            even = even_frames(transformer, frame_tokens)
            return [-(-self.rows * chunk_frames // even) * even]
        if not self.graphs:
            return []
        below = [1 << i for i in range(self.rows.bit_length()) if 1 << i < self.rows]
        return [rows * chunk_frames for rows in (*below, self.rows)]
