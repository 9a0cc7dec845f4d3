"""Runs the Triton kernel of merge_pad_rows on the CPU in Triton's interpreter, against fp64 attention over all rows.

usage: interpret_merge_pad_rows.py, with TRITON_INTERPRET=1 set before triton is imported. Prints one line of JSON for
each case: {"case", "error", "plain_error", "untouched"}.
"""

import json

import torch

from attention_backend.merge_pad_rows_triton import launch

PADDED_LEN = 20
CASES = [
    # name, dtype, heads, kv_heads, head_dim, query rows, kv_lens, lse with zero keys
    ("fp32", torch.float32, 2, 2, 16, 70, (5, 20, 1)),
    ("bf16", torch.bfloat16, 2, 2, 128, 9, (5, 1)),
    ("fp16", torch.float16, 2, 2, 64, 9, (19, 3)),
    ("head_dim 8", torch.float32, 1, 1, 8, 5, (5,)),
    ("head_dim 72", torch.bfloat16, 1, 1, 72, 5, (5,)),
    ("head_dim 256", torch.float32, 1, 1, 256, 5, (5,)),
    ("grouped heads", torch.float32, 6, 2, 16, 65, (20, 7)),
    ("no real rows", torch.float32, 2, 2, 16, 5, (0, 4)),
    ("exactly one block", torch.float32, 1, 1, 16, 64, (4,)),
]


def attention(q, k, v, scale):
    """q [S, H, D], k and v [L, H, D] → out [S, H, D], lse [H, S]."""
    scores = torch.einsum("shd,lhd->hsl", q, k) * scale
    out = torch.einsum("hsl,lhd->shd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, scores.logsumexp(-1)


def run(name, dtype, heads, kv_heads, head_dim, num_rows, kv_lens):
    gen, batch, scale = torch.Generator().manual_seed(0), len(kv_lens), 0.3
    # Strides as the model has them and as it does not: q a slice of a wider projection, k_pad and v_pad rows of more.
    wide = torch.randn(batch, num_rows, 2, heads, head_dim, generator=gen).to(dtype)
    q = wide[:, :, 1]
    k, v = (torch.randn(batch, PADDED_LEN, kv_heads, head_dim, generator=gen).to(dtype) for _ in "kv")
    k_pad, v_pad = (torch.randn(3, kv_heads, head_dim, generator=gen).to(dtype)[2] for _ in "kv")
    outs, lses, expected = [], [], []
    for b, n in enumerate(kv_lens):
        k[b, n:], v[b, n:] = k_pad, v_pad
        keys, values = (x[b].double().repeat_interleave(heads // kv_heads, dim=1) for x in (k, v))
        expected.append(attention(q[b].double(), keys, values, scale)[0])
        out, lse = attention(q[b].double(), keys[:n], values[:n], scale)
        outs.append(out)
        lses.append(lse)
    out, lse = torch.stack(outs).to(dtype), torch.stack(lses).float()
    before, expected = out.clone(), torch.stack(expected)
    pads = torch.tensor([PADDED_LEN - n for n in kv_lens]).double().log()
    launch(q, out, lse, k_pad, v_pad, pads, scale)
    full = [b for b, n in enumerate(kv_lens) if n == PADDED_LEN]
    return {
        "case": name,
        "error": (out.double() - expected).abs().max().item(),
        # What rounding the kernel's input and output to the dtype costs by itself.
        "plain_error": torch.finfo(dtype).eps * expected.abs().max().item(),
        "untouched": all(torch.equal(out[b], before[b]) for b in full),
    }


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(run(*case)), flush=True)
