"""How the pad rows that Wan attends to are accounted for when they are not kept: a host rule by layout.

Three ways give one result. "merge": attention over the real rows, then one pass over Q and the output that adds the pad
rows' share; it costs bytes, for the sequences that have pads. "repeated_key": one pad row is kept, and the kernel
counts it as often as there were pads; it costs work on every score of the call. "padded": all pad rows are kept; it
costs their scores and their memory, and is the cheapest where few keys could be left out.
"""

from __future__ import annotations

from collections.abc import Sequence

KEY_TILE = 128  # keys that FlashAttention-4 works on together; a part of a tile costs as much as all of it

# Milliseconds at Wan 14B, 720p (75 600 queries, 40 heads of 128), fitted to FA4's times on an H200 in
# benchmarks/results/cross_attention.json. All three scale alike with queries and heads, so only their ratios matter.
TILE_MS = 0.263
REPEATED_TILE_MS = TILE_MS + 0.03
MERGE_MS = 0.47


def pad_formulation(kv_lens: Sequence[int], padded_len: int, *, repeated_key: bool) -> str:
    """ "merge", "repeated_key" or "padded" for sequences of kv_lens real rows that are padded to padded_len.

    repeated_key: whether the backend can count a last key several times; if not, the answer is "merge", as the costs
    of other kernels are not known, and it saves memory in any case. Never slower than "padded" by these costs.
    """
    if not repeated_key:
        return "merge"
    short = [n for n in kv_lens if n < padded_len]
    costs = {
        "padded": TILE_MS * len(kv_lens) * _tiles(padded_len),
        "merge": TILE_MS * sum(map(_tiles, kv_lens)) + MERGE_MS * len(short),
        "repeated_key": REPEATED_TILE_MS * sum(_tiles(n + (n < padded_len)) for n in kv_lens),
    }
    # Of equal costs the one that keeps fewer rows.
    return min(("repeated_key", "merge", "padded"), key=costs.__getitem__)


def _tiles(num_keys: int) -> int:
    return -(-num_keys // KEY_TILE)
