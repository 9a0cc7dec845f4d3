"""Compiles every FlashAttention-4 call shape that the project makes, for one architecture, on a machine with no GPU.

usage: compile_calls.py RESULTS.jsonl, with FLASH_ATTENTION_ARCH, CUTE_DSL_ARCH and FLASH_ATTENTION_NUM_SMS set. Each
call goes through FlashAttention4Backend with tensors that have shapes and no values. Appends one line when a call
starts and one when it is over, so that a crash says where it was: {"call", "compiled", "error", "seconds"}.
"""

import json
import os
import sys
import time
from dataclasses import dataclass

import torch

Q_ROWS, TEXT_ROWS, BATCH = 32760, 512, 2


@dataclass(frozen=True)
class Call:
    form: str  # "dense", "padded", "packed", "packed_q", "paged", "paged_q", "extent", "extent_q"
    head_dim: int = 128
    heads: int = 12
    kv_heads: int = 12
    causal: bool = False
    return_lse: bool = False
    repeated_key: bool = False  # the last key of each packed sequence counts several times
    block_size: int = 0  # of the paged forms: 128 is read by TMA, any other by cp.async

    def __str__(self):
        parts = [self.form + (f"{self.block_size}" if self.block_size else ""), f"d{self.head_dim}"]
        parts += [f"h{self.heads}/{self.kv_heads}"] if self.heads != self.kv_heads else []
        parts += ["repeated"] * self.repeated_key
        return "-".join(parts + ["causal"] * self.causal + ["lse"] * self.return_lse)


CALLS = [Call(form, return_lse=lse) for form in ("dense", "padded", "packed", "packed_q") for lse in (False, True)]
CALLS += [Call("paged", block_size=128, return_lse=lse) for lse in (False, True)]
CALLS += [Call("paged", block_size=104), Call("paged_q", block_size=104, return_lse=True)]
CALLS += [Call("paged_q", block_size=128)]  # a KV cache's block tables
# An extent with padded Q is the call that "packed" is.
CALLS += [Call("extent_q"), Call("extent_q", return_lse=True)]
# Each of the rest over a few of the forms that read Q and K differently, to keep all of this under two minutes.
CALLS += [Call("dense", heads=6, kv_heads=2, causal=True)]
CALLS += [Call("padded", causal=True, return_lse=True), Call("packed_q", causal=True, return_lse=True)]
CALLS += [Call("paged", block_size=104, causal=True, return_lse=True)]
CALLS += [Call("packed", heads=8, kv_heads=2), Call("paged", block_size=128, heads=8, kv_heads=2)]
CALLS += [Call("dense", head_dim=64), Call("packed", head_dim=64, return_lse=True)]
CALLS += [Call("packed", repeated_key=True)]
CALLS += [Call("packed", head_dim=64, heads=8, kv_heads=2, repeated_key=True, return_lse=True)]
# What must be refused, so that a green result means something.
REFUSED = [Call("dense", head_dim=264), Call("paged", block_size=104, head_dim=264)]


def main(results_path: str) -> None:
    if os.environ["FLASH_ATTENTION_ARCH"] == "sm_100":  # its tile scheduler asks the driver for the device's size
        import cutlass.utils

        cutlass.utils.HardwareInfo = StandInDevice
    import cutlass.cute

    from attention_backend import AttentionSpec, ExtentKV, PackedKV, PaddedKV, PagedKV
    from attention_backend import flash_attn4_ops as ops
    from attention_backend.flash_attn4 import FlashAttention4Backend

    class WithoutDevice(FlashAttention4Backend):
        unavailable_reason = classmethod(lambda cls: None)
        unsupported_reasons = classmethod(lambda cls, spec: [])

    # Fake tensors would go to the operators' fakes; the functions behind them reach the kernel package.
    for name in ("dense", "padded", "packed", "paged"):
        setattr(ops, name, getattr(ops, f"run_{name}"))

    compile_kernel, compiled = cutlass.cute.compile, []

    def counting_compile(*args, **kwargs):
        compiled.append(args[0])
        return compile_kernel(*args, **kwargs)

    cutlass.cute.compile = counting_compile

    def run(call: Call) -> None:
        spec = AttentionSpec("self", call.heads, call.head_dim, torch.bfloat16, "cuda", num_kv_heads=call.kv_heads)

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device="cuda")

        def int32(*shape):
            return empty(*shape, dtype=torch.int32)

        # Q as a view of a fused projection, as the model makes it.
        inner = call.heads * call.head_dim
        shape, stride = (BATCH, Q_ROWS, call.heads, call.head_dim), (Q_ROWS * 3 * inner, 3 * inner, call.head_dim, 1)
        q_side = {}
        if call.form.endswith("_q"):
            shape, stride = shape[1:], stride[1:]
            q_side = {"cu_seqlens_q": int32(BATCH + 1), "max_seqlen_q": Q_ROWS}
        q = torch.empty_strided(shape, stride, dtype=torch.bfloat16, device="cuda")
        rows, metadata = (BATCH, TEXT_ROWS), None
        if call.form == "padded":
            metadata = PaddedKV(int32(BATCH), TEXT_ROWS)
        elif call.form.startswith("packed"):
            repeats_to = TEXT_ROWS if call.repeated_key else None
            # As AttentionMetadataState gives them, and, with packed Q, as a KV cache's operator does.
            q_side["seqused_kv"] = None if call.repeated_key or call.form == "packed_q" else int32(BATCH)
            metadata = PackedKV(int32(BATCH + 1), TEXT_ROWS, None, **q_side, last_key_repeats_to=repeats_to)
            rows = (BATCH * TEXT_ROWS,)
        elif call.form.startswith("extent"):
            metadata = ExtentKV(int32(BATCH + 1), int32(BATCH), TEXT_ROWS, **q_side)
            rows = (3 * BATCH * TEXT_ROWS,)
        elif call.form.startswith("paged"):
            width = 316
            rows = (2 * BATCH * width, call.block_size)
            metadata = PagedKV(int32(BATCH, width), int32(BATCH), call.block_size, Q_ROWS, **q_side)
        k, v = (empty(*rows, call.kv_heads, call.head_dim) for _ in "kv")
        backend = WithoutDevice(spec)
        result = backend.forward(q, k, v, metadata, causal=call.causal, return_lse=call.return_lse)
        out, lse = result if call.return_lse else (result, None)
        assert out.dtype == q.dtype and out.is_contiguous(), f"out is {out.dtype} with strides {out.stride()}"
        if lse is not None:
            shape = (call.heads, q.shape[0]) if q.ndim == 3 else (BATCH, call.heads, Q_ROWS)
            assert (lse.dtype, tuple(lse.shape)) == (torch.float32, shape), f"lse is {lse.dtype} {tuple(lse.shape)}"

    with open(results_path, "a", buffering=1) as results:
        for call in CALLS + REFUSED:
            print(json.dumps({"call": str(call), "started": True}), file=results)
            compiled.clear()
            error, start = None, time.perf_counter()
            try:
                with torch.no_grad(), torch._subclasses.fake_tensor.FakeTensorMode():
                    run(call)
            except Exception as failure:  # whatever the compiler raises is what the test shows
                error = f"{type(failure).__name__}: {failure}"[:4000]
            line = {"call": str(call), "compiled": len(compiled), "error": error}
            print(json.dumps(line | {"seconds": time.perf_counter() - start}), file=results)


class StandInDevice:
    """What cutlass.utils.HardwareInfo would say of a B200."""

    num_sms = 148

    def get_device_multiprocessor_count(self):
        return self.num_sms

    def get_max_active_clusters(self, cluster_size, *_):
        return self.num_sms // cluster_size


if __name__ == "__main__":
    main(*sys.argv[1:])
