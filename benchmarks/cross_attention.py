"""Text cross-attention of one CFG pair whose prompts differ in length, on one GPU: what packing and exact pads cost.

    python benchmarks/cross_attention.py [--rounds 9] [--output FILE.json]

Q [2, S, H, 128] bf16 over K/V of 512 text rows, for Wan 14B at 720p and 1.3B at 480p. Arms are interleaved in one run;
times are medians by device events over a few calls in a row, with the device kept busy before them, as in a model.
`_kernel` arms have everything prepared. `_total` arms are what every step of a request pays: they look their metadata
up in the state, where they hit. Keys and values are projected from the real rows and put together once for a request,
for all of its steps: that is not in a step's time, and stands in `once_for_a_request_ms`, for each layer. One arm
packs padded keys and values in every call, as a model does that keeps no keys and values (`gathered`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from measure import interleaved, relative, save

from attention_backend import AttentionMetadataState, AttentionSpec, merge_pad_rows, select_backend
from attention_backend.merge import merge_pad_rows_
from visual_gen.modules.attention import Attention
from visual_gen.runtime.versions import installed_versions

SHAPES = {"14B 720p": (40, 75600), "1.3B 480p": (12, 32760)}  # name → heads, queries
SKEWS = ((512, 512), (512, 126), (300, 126), (120, 1))
HEAD_DIM, TEXT_ROWS, BATCH = 128, 512, 2
# Several calls for one time, so that the gap that the host leaves between calls counts as in a model.
CALLS = 3
IN_A_ROW = {"calls": CALLS, "keep_busy": True}
FORMULATIONS = ("merge", "repeated_key")
MODES = ("padded", "packed", "packed_pad_exact")


class Pair:
    """Inputs of one shape and skew, and every arm as a call that returns the output."""

    def __init__(self, backend, num_queries: int, lens: tuple[int, int]) -> None:
        spec = backend.spec
        self.backend, self.lens, self.scale = backend, lens, spec.softmax_scale
        self.state = AttentionMetadataState()
        gen = torch.Generator(spec.device).manual_seed(0)

        def rand(*shape):
            tail = (spec.num_heads, spec.head_dim)
            return torch.randn(*shape, *tail, generator=gen, device=spec.device, dtype=spec.dtype)

        self.q = rand(BATCH, num_queries)
        self.rows = rand(2, sum(lens) + 1).unbind()  # K and V: the real rows of both prompts, then the pad row
        self.padded = self.arrange("padded").k, self.arrange("padded").v

    def site(self, mode: str) -> Attention:
        spec = self.backend.spec
        with torch.device("meta"):  # only its arrangement of K/V is used, so its projections need no memory
            return Attention(
                8, spec.num_heads, spec.head_dim, role="cross_text", backend=self.backend, cross_kv=mode, qk_norm=None,
                attention_metadata_state=self.state,
            )  # fmt: skip

    def arrange(self, mode: str):
        return self.site(mode).arrange_kv(*split(self.rows, self.lens))

    def arms(self) -> dict[str, Callable[[], torch.Tensor]]:
        q, lens, state, forward = self.q, self.lens, self.state, self.backend.forward
        device, total = q.device, sum(lens)
        (k_rows, v_rows), (k_padded, v_padded) = self.rows, self.padded
        k_real, v_real, k_pad, v_pad = k_rows[:total], v_rows[:total], k_rows[total], v_rows[total]
        exact = self.site("packed_pad_exact")

        def pads_of(formulation: str):
            return state.packed_pad_kv("cross_text", lens, TEXT_ROWS, device, formulation=formulation)

        def with_pad_row(rows):
            *real, pad = rows.split([*lens, 1])
            return torch.cat([x for part, n in zip(real, lens, strict=True) for x in (part, pad[: n < TEXT_ROWS])])

        def attend_exact():
            kv = chosen
            if kv.metadata is not None:
                kv = replace(kv, metadata=pads_of(kv.formulation))
            return exact.attend(q, kv)

        def merged(k, v, pads):
            out, lse = forward(q, k, v, pads.packed, return_lse=True)
            return merge_pad_rows(q, out, lse, k_pad, v_pad, pads, self.scale)

        def gathered():
            packed = exact.pack_ragged_kv(k_padded, v_padded, lens, state)
            return forward(q, *packed)

        seqused = state.padded_kv("cross_text", lens, TEXT_ROWS, device)
        packed = state.packed_kv("cross_text", lens, device, max_seqlen_kv=TEXT_ROWS)
        merge, repeated = (pads_of(name) for name in FORMULATIONS)
        k_repeated, v_repeated = with_pad_row(k_rows), with_pad_row(v_rows)
        chosen = exact.arrange_kv(*split(self.rows, lens))
        return {
            "padded_kernel": lambda: forward(q, k_padded, v_padded),
            "padded_total": lambda: forward(q, k_padded, v_padded),
            "seqused_k_kernel": lambda: forward(q, k_padded, v_padded, seqused),
            "seqused_k_total": lambda: forward(
                q, k_padded, v_padded, state.padded_kv("cross_text", lens, TEXT_ROWS, device)
            ),
            "cu_seqlens_kernel": lambda: forward(q, k_real, v_real, packed),
            "cu_seqlens_total": lambda: forward(
                q, k_real, v_real, state.packed_kv("cross_text", lens, device, max_seqlen_kv=TEXT_ROWS)
            ),
            "cu_seqlens_gathered_total": gathered,  # packs padded K/V in every call
            "pad_exact_merge_kernel": lambda: merged(k_real, v_real, merge),
            "pad_exact_merge_total": lambda: merged(k_real, v_real, pads_of("merge")),
            "pad_exact_repeated_key_kernel": lambda: forward(q, k_repeated, v_repeated, repeated.packed),
            "pad_exact_repeated_key_total": lambda: forward(q, k_repeated, v_repeated, pads_of("repeated_key").packed),
            "pad_exact_kernel": lambda: exact.attend(q, chosen),
            "pad_exact_total": attend_exact,
        }

    def arranging_ms(self, rounds: int) -> dict[str, float]:
        """Putting K/V of one layer together from projected rows, by the host's clock, the device's work included."""
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(rounds + 1):
            for mode in MODES:
                torch.cuda.synchronize()
                start = time.perf_counter()
                self.arrange(mode)
                torch.cuda.synchronize()
                times[mode].append(1e3 * (time.perf_counter() - start))
        return {mode: round(statistics.median(values[1:]), 4) for mode, values in times.items()}

    def kv_bytes(self) -> dict[str, int]:
        """Device memory that K/V hold in each mode once the projection's own output is gone, as asked for."""
        held = {}
        for mode in MODES:
            before, source = requested(), self.rows
            self.rows = tuple(x.clone() for x in source)
            kv = self.arrange(mode)
            self.rows = source
            held[mode] = requested() - before
            del kv
        return held


def split(rows: tuple[torch.Tensor, torch.Tensor], lens: tuple[int, int]) -> tuple:
    """arrange_kv's arguments: the real rows of each prompt, and the pad row behind them all."""
    (*keys, k_pad), (*values, v_pad) = (x.split([*lens, 1]) for x in rows)
    # Copies, as the model's own: a view would keep all rows.
    return keys, values, TEXT_ROWS, (k_pad[0].clone(), v_pad[0].clone())


def requested() -> int:
    """Bytes of all tensors on the device; the allocator's own rounding is left out."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def temporary_bytes(call: Callable[[], torch.Tensor]) -> int:
    """Peak memory of a call over what was there before, its output included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def measure(backend, num_queries: int, lens: tuple[int, int], rounds: int) -> dict:
    pair = Pair(backend, num_queries, lens)
    arms = pair.arms()
    expected = arms["padded_kernel"]()
    result = {
        "formulation": pair.arrange("packed_pad_exact").formulation,
        "rms_difference_from_padded": {name: relative(call(), expected) for name, call in arms.items()},
        "peak_bytes_of_a_call": {name: temporary_bytes(call) for name, call in arms.items()},
    }
    del expected
    result["median_ms"] = interleaved(arms, rounds, **IN_A_ROW)
    result["once_for_a_request_ms"] = pair.arranging_ms(rounds)
    held = pair.kv_bytes()
    result["kv_bytes"] = held
    result["kv_saved_percent"] = {mode: round(100 * (1 - n / held["padded"]), 1) for mode, n in held.items()}
    if lens[1] < TEXT_ROWS:
        result["merge_pass"] = merge_pass(pair, arms, rounds)
    return result


def merge_pass(pair: Pair, arms, rounds: int) -> dict[str, float]:
    """The merge alone, for the bytes that bind it: Q and the output read, the output written, of one sequence."""
    q, out = pair.q[1:], arms["padded_kernel"]()[1:]
    lse = torch.zeros(1, q.shape[2], q.shape[1], device=q.device)
    log_pads, (k, v) = lse.new_zeros(1), (x[-1] for x in pair.rows)

    def call():
        merge_pad_rows_(q, out, lse, k, v, log_pads, pair.scale)

    ms = interleaved({"merge": call}, rounds, **IN_A_ROW)["merge"]
    moved = 3 * q.nbytes + lse.nbytes
    return {"median_ms": ms, "bytes": moved, "tb_per_s": round(moved / ms / 1e9, 3)}


def self_attention(backend, num_queries: int, rounds: int) -> dict:
    """Dense self-attention through the backend and by the kernel package's own function."""
    from flash_attn.cute import flash_attn_func

    spec = backend.spec
    shape = (1, num_queries, spec.num_heads, spec.head_dim)
    q, k, v = (torch.randn(shape, device=spec.device, dtype=spec.dtype) for _ in "qkv")
    arms = {"backend": lambda: backend.forward(q, k, v), "kernel": lambda: flash_attn_func(q, k, v)[0]}
    found = interleaved(arms, rounds, **IN_A_ROW)
    ratio = found["backend"] / found["kernel"]
    return found | {"ratio": round(ratio, 4), "at_most": 1.01, "reached": ratio <= 1.01}


def goals(name: str, results: dict[str, dict]) -> list[dict]:
    """What is to be reached, as ratios of medians, and what was measured."""
    packed_limit = 1.03 if name == "14B 720p" else 1.06
    found = []
    for skew, result in results.items():
        wanted = [
            ("cu_seqlens_total", "seqused_k_total", packed_limit),
            ("pad_exact_total", "padded_total", 1.02),
        ]
        if skew == "120/1":
            wanted.append(("pad_exact_total", "padded_total", 1 / 1.4))
        for arm, reference, limit in wanted:
            ratio = result["median_ms"][arm] / result["median_ms"][reference]
            line = {"skew": skew, "ratio_of": [arm, reference], "ratio": round(ratio, 4), "at_most": round(limit, 4)}
            found.append(line | {"reached": ratio <= limit})
        lens = [int(n) for n in skew.split("/")]
        pad_rows = sum(n < TEXT_ROWS for n in lens)
        for mode, rows in (("packed", sum(lens)), ("packed_pad_exact", sum(lens) + pad_rows)):
            saved, wanted_percent = result["kv_saved_percent"][mode], 100 * (1 - rows / (BATCH * TEXT_ROWS))
            line = {"skew": skew, "kv_saved_percent_of": mode, "percent": saved, "at_least": round(wanted_percent, 1)}
            found.append(line | {"reached": saved >= line["at_least"]})
    return found


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    began = time.perf_counter()
    result = {
        "command": " ".join(["python", "benchmarks/cross_attention.py", *sys.argv[1:]]),
        "versions": {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        | installed_versions(("flash-attn-4", "nvidia-cutlass-dsl", "triton")),
        "conditions": f"bf16, B {BATCH}, head_dim {HEAD_DIM}, {TEXT_ROWS} text rows; medians of {options.rounds} times "
        f"of {CALLS} calls each",
        "shapes": {},
    }
    for name, (heads, num_queries) in SHAPES.items():
        backend = select_backend("flash_attn4", AttentionSpec("cross_text", heads, HEAD_DIM, torch.bfloat16, "cuda"))
        shape = result["shapes"][name] = {"heads": heads, "queries": num_queries, "skews": {}}
        for lens in SKEWS:
            skew = "/".join(map(str, lens))
            found = shape["skews"][skew] = measure(backend, num_queries, lens, options.rounds)
            print(f"{name} {skew}: {found['median_ms']}", file=sys.stderr, flush=True)
            save(result, options.output)
        shape["goals"] = goals(name, shape["skews"])
    heads, num_queries = SHAPES["1.3B 480p"]
    dense = select_backend("flash_attn4", AttentionSpec("self", heads, HEAD_DIM, torch.bfloat16, "cuda"))
    result["self_attention_1.3B_480p_ms"] = self_attention(dense, num_queries, options.rounds)
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result, indent=2))
    save(result, options.output)


if __name__ == "__main__":
    main()
