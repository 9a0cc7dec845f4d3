"""One CFG pair through a Wan 14B-shaped transformer in each form of its text, on one GPU: time and peak memory.

    python benchmarks/forward_14b.py [--layers 4] [--runs 3] [--full] [--output FILE.json]
    python benchmarks/forward_14b.py --smoke        # a toy on any machine, to see that it works

720p, 81 frames (75 600 tokens), text of 512 rows, bf16, eager, random weights. Text is projected before the steps, as
for a request. A few of the 40 layers run, with arms interleaved; times are medians by device events, and scaled to all
layers. --full also runs all layers once for some arms, which shows whether that scaling holds. Peak memory is that of
one forward with no other arm's text there, weights included.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measure import interleaved, milliseconds, relative, save

from visual_gen.models.wan import WAN_PRESETS, WanConfig, WanTransformer
from visual_gen.models.wan.text_kv import TextKV
from visual_gen.runtime.versions import installed_versions

PACKAGES = ("torch", "flash-attn-4", "nvidia-cutlass-dsl", "triton")
ARMS = {  # name → cross_kv; seqused_k has all rows of the padded form and attends to the real ones
    "padded": "padded",
    "seqused_k": "padded",
    "packed": "packed",
    "packed_pad_exact": "packed_pad_exact",
}
FULL_ARMS = ("padded", "packed_pad_exact")
MIB = 2**20


@dataclass(frozen=True)
class Setup:
    config: WanConfig
    latent: tuple[int, int, int]  # frames, height, width
    text_rows: int
    text_lens: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    device: str


FULL_SIZE = Setup(WAN_PRESETS["wan2.1-t2v-14b"], (21, 90, 160), 512, ((300, 126), (120, 1)), torch.bfloat16, "cuda")
TOY = Setup(
    WanConfig(num_attention_heads=2, attention_head_dim=16, text_dim=24, freq_dim=16, ffn_dim=64, num_layers=3),
    (2, 4, 6), 16, ((5, 1), (16, 3)), torch.float32, "cpu",
)  # fmt: skip


class Models:
    """One set of random weights, and a model on it for each cross mode."""

    def __init__(self, setup: Setup, num_layers: int) -> None:
        self.setup = setup
        config = replace(setup.config, num_layers=num_layers)
        torch.manual_seed(0)
        weights = WanTransformer(config, dtype=setup.dtype, device=setup.device).requires_grad_(False).state_dict()
        self.by_mode = {}
        for mode in dict.fromkeys(ARMS.values()):
            model = WanTransformer(
                config, attention={"cross_kv": mode}, dtype=setup.dtype, device=setup.device, init_weights=False
            )
            model.load_state_dict(weights, assign=True)
            self.by_mode[mode] = model.requires_grad_(False)

    def text_kv(self, arm: str, text: torch.Tensor, lens: Sequence[int]) -> TextKV:
        model = self.by_mode[ARMS[arm]]
        text_kv = model.project_text(text, lens)
        if arm == "seqused_k":
            state = model.attention_metadata_state
            metadata = state.padded_kv("cross_text", lens, text.shape[1], text.device)
            text_kv = replace(text_kv, text=tuple(replace(kv, metadata=metadata) for kv in text_kv.text))
        return text_kv


class Inputs:
    def __init__(self, setup: Setup) -> None:
        config, self.on = setup.config, {"device": setup.device, "dtype": setup.dtype}
        gen = torch.Generator(setup.device).manual_seed(1)
        self.latents = torch.randn(2, config.in_channels, *setup.latent, generator=gen, **self.on)
        self.timestep = torch.tensor(700.0, device=setup.device).expand(2)
        self.text = torch.randn(2, setup.text_rows, config.text_dim, generator=gen, **self.on)

    def forward(self, model: WanTransformer, text_kv: TextKV) -> torch.Tensor:
        return model(self.latents, self.timestep, text_kv=text_kv)


def measure_lens(models: Models, inputs: Inputs, lens: tuple[int, int], arms: Sequence[str], runs: int) -> dict:
    """Every arm: one forward for its memory and its difference (and to compile kernels), then the times of `runs`.

    With runs 0 the time is that of the one forward, whose kernels must have been compiled before.
    """
    found, expected, outs, on = {}, None, [], {"device": models.setup.device}
    for arm in arms:
        model, text_kv = models.by_mode[ARMS[arm]], models.text_kv(arm, inputs.text, lens)
        reset_peak(models.setup.device)
        ms = milliseconds(lambda model=model, text_kv=text_kv: outs.append(inputs.forward(model, text_kv)), **on)
        out = outs.pop()
        expected = out if expected is None else expected
        found[arm] = {
            "ms": round(ms, 4),
            "peak_mib": peak_mib(models.setup.device),
            "text_kv_mib": round(text_kv.num_bytes / MIB, 3),
            "formulation": "masked" if arm == "seqused_k" else text_kv.formulation,
            "rms_difference_from_padded": relative(out, expected),
            "finite": bool(out.isfinite().all()),
        }
        del out, text_kv
    del expected
    if runs:
        calls = {}
        for arm in arms:
            model, text_kv = models.by_mode[ARMS[arm]], models.text_kv(arm, inputs.text, lens)
            calls[arm] = lambda model=model, text_kv=text_kv: inputs.forward(model, text_kv)
        for arm, ms in interleaved(calls, runs, **on).items():
            found[arm]["ms"] = ms
    for result in found.values():
        result["ratio_to_padded"] = round(result["ms"] / found["padded"]["ms"], 4)
    return found


def measure(setup: Setup, num_layers: int, arms: Sequence[str], runs: int, lens: Sequence[tuple[int, int]]) -> dict:
    models, inputs = Models(setup, num_layers), Inputs(setup)
    results = {}
    for pair in lens:
        name = "/".join(map(str, pair))
        results[name] = measure_lens(models, inputs, pair, arms, runs)
        for found in results[name].values():
            found["ms_scaled_to_all_layers"] = round(found["ms"] * setup.config.num_layers / num_layers, 1)
        print(f"{num_layers} layers, {name}: { {a: f['ms'] for a, f in results[name].items()} }", file=sys.stderr)
    choices = models.by_mode["packed_pad_exact"].attention_choices
    return {"layers": num_layers, "backends": {r: c.name for r, c in choices.items()}, "text_lens": results}


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_mib(device: str) -> float | None:
    """None where torch does not count: on a CPU."""
    return round(torch.cuda.max_memory_allocated() / MIB, 1) if device == "cuda" else None


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also all layers, once, for the shortest text")
    parser.add_argument("--smoke", action="store_true", help="a toy model on the CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)

    setup = TOY if options.smoke else FULL_SIZE
    layers = min(options.layers, setup.config.num_layers - 1)
    result = {
        "command": "python benchmarks/forward_14b.py " + " ".join(sys.argv[1:] if arguments is None else arguments),
        "conditions": f"latents {setup.latent}, B 2, {setup.text_rows} text rows, {setup.dtype}, eager, random weights",
        "versions": {"gpu": torch.cuda.get_device_name() if setup.device == "cuda" else None}
        | installed_versions(PACKAGES),
        "some_layers": measure(setup, layers, tuple(ARMS), options.runs, setup.text_lens),
    }
    save(result, options.output)
    if options.full or options.smoke:
        shortest = setup.text_lens[-1]
        whole = measure(setup, setup.config.num_layers, FULL_ARMS, 0, [shortest])
        name = "/".join(map(str, shortest))
        for arm, found in whole["text_lens"][name].items():
            scaled = result["some_layers"]["text_lens"][name][arm]["ms_scaled_to_all_layers"]
            found["scaled_from_some_layers_over_measured"] = round(scaled / found["ms"], 4)
        result["all_layers"] = whole
    print(json.dumps(result, indent=2))
    save(result, options.output)


if __name__ == "__main__":
    main()
