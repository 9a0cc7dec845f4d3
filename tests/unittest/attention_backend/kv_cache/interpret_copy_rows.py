"""Runs the Triton kernels that copy rows on the CPU in Triton's interpreter, against plain indexing.

usage: interpret_copy_rows.py, with TRITON_INTERPRET=1 set before triton is imported. Prints one line of JSON for each
case: {"case", "same", "changed"}: whether all bits are as expected, and how many rows of K the copy changed.
"""

import json

import torch

from attention_backend.kv_cache.copy_rows_triton import copy_rows_of_layers, write_rows

CASES = [
    # name, dtype, batch, heads, head_dim, rows copied, by addresses: within the same tensors, and from others
    ("bf16, rows of 1 536", torch.bfloat16, 1, 12, 128, 37, False),
    ("bf16, rows of 1 536, set aside", torch.bfloat16, 1, 12, 128, 37, True),
    ("fp16, rows of 5 120", torch.float16, 1, 40, 128, 5, True),
    ("fp32, rows of 16", torch.float32, 1, 2, 8, 300, True),
    ("bf16, rows of 216", torch.bfloat16, 1, 3, 72, 50, False),
    ("bf16, rows of 1 032", torch.bfloat16, 1, 129, 8, 7, True),
    ("a batch", torch.bfloat16, 3, 2, 64, 33, False),
    ("one row", torch.bfloat16, 1, 12, 128, 1, True),
    ("bf16, rows of 10 bytes", torch.bfloat16, 1, 1, 5, 40, True),
    ("no rows", torch.bfloat16, 1, 12, 128, 0, False),
]


def run(name, dtype, batch, heads, head_dim, count, within):
    gen, total = torch.Generator().manual_seed(0), 2 * count + 9

    def rand(*shape):
        return torch.randn(*shape, heads, head_dim, generator=gen).to(dtype)

    k, v = rand(batch, total), rand(batch, total)
    k[:, 0], v[:, -1] = torch.nan, torch.inf
    order = torch.randperm(total, generator=gen)
    index, source_index = order[:count], order[count : 2 * count]
    # Within the same tensors, as what is overwritten is set aside; or of a wider projection, and one apart.
    sources = (
        (k[:, source_index], v[:, source_index]) if within else (rand(batch, count, 3)[:, :, 1], rand(batch, count))
    )
    expected, before = [x.clone() for x in (k, v)], k.clone()
    for x, source in zip(expected, sources, strict=True):
        x[:, index] = source
    found = [k, v]
    if within:
        others = [rand(batch, total) for _ in "kv"]  # another pool, whose rows come from this one
        for other, x in zip(others, (k, v), strict=True):
            wanted = other.clone()
            wanted[:, index] = x[:, source_index]
            expected.append(wanted)
        found += others
        here, there = (torch.tensor([x.data_ptr() for x in some]) for some in ((k, v), others))
        row_bytes = k[0, 0].nbytes
        copy_rows_of_layers(there, here, index, source_index, row_bytes)
        copy_rows_of_layers(here, here.clone(), index, source_index, row_bytes)
    else:
        write_rows(k, v, index, *sources)
    same = all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, expected, strict=True))
    changed = (k != before).flatten(2).any(2) & ~(k.isnan() & before.isnan()).flatten(2).any(2)
    return {"case": name, "same": same, "changed": int(changed.sum()), "copied": batch * count}


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(run(*case)), flush=True)
