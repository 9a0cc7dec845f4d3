"""Runs the Triton kernel of qk_norm_rope on the CPU in Triton's interpreter, against fp64.

usage: interpret_qk_norm_rope.py, with TRITON_INTERPRET=1 set before triton is imported. Prints one line of JSON for
each case: {"case", "worst", "v_same", "written"}: the largest difference of q and k in units of what rounding may cost,
whether V's bits are where they belong, and whether exactly the rows of the slots changed.
"""

import json

import torch

from attention_backend.qk_norm_rope_triton import norm_rope
from tests.unittest.attention_backend.qk_norm_rope_oracle import inputs, oracle, units

CASES = [
    # name, dtype, tokens, heads, head_dim, norm, rows of the rotary table, batch of the cache (0: none)
    ("bf16, 1.3B", torch.bfloat16, 6, 12, 128, True, 6, 1),
    ("bf16, 14B, no cache", torch.bfloat16, 4, 40, 128, True, 2, 0),
    ("fp32, odd heads, no positions", torch.float32, 5, 3, 72, True, 0, 1),
    ("fp16, no norm, a batch", torch.float16, 6, 2, 8, False, 3, 3),
    ("fp32, neither, no cache", torch.float32, 5, 1, 2, False, 0, 0),
    ("one token", torch.bfloat16, 1, 12, 128, True, 1, 1),
    ("none", torch.bfloat16, 0, 12, 128, True, 1, 1),
]


def run(name, dtype, tokens, heads, head_dim, norm, rotary_rows, batch):
    qkv, weight, rotary = inputs(dtype, tokens, heads, head_dim, norm, rotary_rows)
    cache, written = None, True
    if batch:
        rows = tokens // batch
        slots = torch.randperm(rows + 7)[:rows]
        k, v = (torch.full((batch, rows + 7, heads, head_dim), 99.0, dtype=dtype) for _ in "kv")
        cache = (k, v, slots)
    wide = torch.cat([qkv, qkv[:, :2]], dim=1)[:, :3]  # rows with others between them
    strided = None if weight is None else weight.t().contiguous().t()
    q, k_out = norm_rope(wide, strided, rotary, 1e-6, cache)
    v_same = True
    if batch:
        k_out, v_out = (x[:, slots].flatten(0, 1) for x in (k, v))
        v_same = torch.equal(v_out, qkv[:, 2])
        left = torch.ones(rows + 7, dtype=torch.bool)
        left[slots] = False
        written = all(bool((x[:, left] == 99).all()) for x in (k, v))
    expected = oracle(qkv, weight, rotary, 1e-6)
    worst = max(units(x, y) for x, y in zip((q, k_out), expected, strict=True))
    return {"case": name, "worst": worst, "v_same": v_same, "written": written}


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(run(*case)), flush=True)
