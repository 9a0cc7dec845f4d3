"""Where a session's frames lie, and how many blocks that takes: host arithmetic without tensors.

A session's storage is a ring of tokens. Frame f of the sink lies at f · frame_tokens; the others go round behind the
sink, so that a frame that leaves the window is overwritten by the one that enters. Keys carry their absolute position
in themselves and attention inside the window is not causal, so their order does not matter, and what is visible is
always a prefix of the storage without gaps, exact to the token whatever the block size.
"""

from __future__ import annotations

from dataclasses import dataclass

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.rows import Segment

# Kernels load keys by tiles (FlashAttention-4: 128 rows; FlashAttention-3: 176 at head_dim 128, 192 up to 64), and zero
# times NaN is NaN: behind each extent lie this many rows that are finite because nobody writes them.
GUARD_ROWS = 192


def check_count(name: str, value: int, least: int = 1) -> None:
    """KVCacheError unless value is an int of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise KVCacheError(f"{name} is {value!r}; it must be an integer of at least {least}")


@dataclass(frozen=True, kw_only=True)
class SessionGeometry:
    """A session's window and what is kept for it, in latent frames of frame_tokens tokens.

    Visible are the first sink_frames frames and the last recent_frames, the chunk being computed counted in. With
    recent_frames None everything is visible, up to capacity_frames. max_chunk_frames None: a chunk may fill
    recent_frames or capacity_frames. KVCacheError on contradictions.
    """

    frame_tokens: int
    sink_frames: int = 0
    recent_frames: int | None
    capacity_frames: int | None = None
    branches: int = 1  # of classifier-free guidance, each with K/V of its own
    max_chunk_frames: int | None = None
    rollback_chunks: int = 0  # committed chunks that can be taken back
    action_capacity: int = 0  # tokens behind the frames that only one forward sees
    ring_turn: int = 0  # by how many frames the ring is turned back, after its window was computed anew in order

    def __post_init__(self) -> None:
        for name in ("frame_tokens", "branches"):
            check_count(name, getattr(self, name))
        if self.max_chunk_frames is not None:
            check_count("max_chunk_frames", self.max_chunk_frames)
        for name in ("sink_frames", "rollback_chunks", "action_capacity", "ring_turn"):
            check_count(name, getattr(self, name), 0)
        if self.recent_frames is None:
            if self.capacity_frames is None:
                raise KVCacheError(
                    "recent_frames is None, so all frames stay: give capacity_frames, how many there may be"
                )
            check_count("capacity_frames", self.capacity_frames)
            if self.sink_frames:
                raise KVCacheError(
                    f"sink_frames is {self.sink_frames} but with recent_frames None all frames stay; give 0"
                )
        else:
            if (
                not isinstance(self.recent_frames, int)
                or isinstance(self.recent_frames, bool)
                or self.recent_frames < 1
            ):
                raise KVCacheError(
                    f"recent_frames is {self.recent_frames!r}; it must be an integer of at least 1, as a window is "
                    f"larger than its {self.sink_frames} sink frames"
                )
            if self.capacity_frames is not None:
                raise KVCacheError(
                    f"capacity_frames is {self.capacity_frames} but a window of {self.window_frames} frames has no "
                    "end; give it only with recent_frames=None"
                )
        most = self.capacity_frames if self.recent_frames is None else self.recent_frames
        if self.max_chunk_frames is None:
            object.__setattr__(self, "max_chunk_frames", most)
        if self.max_chunk_frames > most:
            name = "capacity_frames" if self.recent_frames is None else "recent_frames"
            raise KVCacheError(
                f"{name} is {most}, smaller than a chunk of {self.max_chunk_frames} frames, which is counted in it; "
                f"raise {name} or make chunks shorter"
            )

    @property
    def window_frames(self) -> int:
        return self.capacity_frames if self.recent_frames is None else self.sink_frames + self.recent_frames

    @property
    def capacity_tokens(self) -> int:
        """Of one branch: the window and the forward-only tokens behind it."""
        return self.window_frames * self.frame_tokens + self.action_capacity

    @property
    def journal_slot_tokens(self) -> int:
        """Of one branch: what one chunk can overwrite."""
        return 0 if self.recent_frames is None else self.max_chunk_frames * self.frame_tokens

    @property
    def journal_slots(self) -> int:
        return 1 + self.rollback_chunks

    def branch_blocks(self, block_size: int, *, run: bool) -> int:
        """Blocks of a branch's tokens; in one run, the guard rows behind them included."""
        return -(-(self.capacity_tokens + (GUARD_ROWS if run else 0)) // block_size)

    def journal_blocks(self, block_size: int) -> int:
        return -(-self.journal_slots * self.journal_slot_tokens // block_size)

    def visible_tokens(self, frames: int) -> int:
        """Once `frames` frames are there."""
        return min(frames, self.window_frames) * self.frame_tokens

    def segments(self, first: int, count: int) -> list[Segment]:
        """Token positions of frames first to first + count - 1; positions that follow one another are one segment."""
        out: list[Segment] = []
        end = first + count
        while first < end:
            if self.recent_frames is None or first < self.sink_frames:
                position = first
                room = (self.capacity_frames if self.recent_frames is None else self.sink_frames) - first
            else:
                turn = (first - self.sink_frames - self.ring_turn) % self.recent_frames
                position, room = self.sink_frames + turn, self.recent_frames - turn
            part = min(room, end - first)
            start, length = position * self.frame_tokens, part * self.frame_tokens
            if out and sum(out[-1]) == start:
                start, length = out[-1][0], out.pop()[1] + length
            out.append((start, length))
            first += part
        return out

    def held(self, frames: int) -> list[Segment]:
        """(first, count) of the runs of frames that are in the window once `frames` frames are there, in order."""
        if frames <= self.window_frames:
            return [(0, frames)] if frames else []
        runs = [(0, self.sink_frames), (frames - self.recent_frames, self.recent_frames)]
        return [run for run in runs if run[1]]

    def settled_tokens(self, oldest: int) -> int:
        """Tokens at the front that are never written again, if no frame from `oldest` on can be taken back."""
        return (oldest if self.recent_frames is None else min(oldest, self.sink_frames)) * self.frame_tokens

    def overwriting(self, first: int, count: int) -> Segment:
        """(first, count) of those of the frames that take the place of frames still in the window."""
        if self.recent_frames is None:
            return first + count, 0
        start = min(max(first, self.window_frames), first + count)
        return start, first + count - start
