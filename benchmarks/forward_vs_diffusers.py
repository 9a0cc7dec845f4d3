"""One CFG pair through a full-size Wan transformer, ours against diffusers', on one GPU: random weights, bf16.

    python benchmarks/forward_vs_diffusers.py [--preset wan2.1-t2v-1.3b] [--output FILE.json]

480p, 81 frames, text lengths 126 and 1 of 512. Arms are interleaved in one run; times are medians by device events.
The same weights are in all models, so the results' difference is recorded too. "diffusers, use(…)" is diffusers' own
model with our attention under it (`visual_gen.integrations.diffusers`). In arms that end in "compiled" each model's
blocks are compiled whole, the others are eager; what compiling took, at an arm's first call, is no part of its times.
--smoke runs all of it at toy size on a CPU, where "compiled" is traced and not compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from measure import interleaved, relative

from visual_gen.compilation import compile_seconds, watch_compilation
from visual_gen.integrations.diffusers import use
from visual_gen.models.wan import WAN_PRESETS, WanConfig, WanTransformer
from visual_gen.runtime.versions import installed_versions

TEXT_LENS = (126, 1)
PACKAGES = ("torch", "diffusers", "flash-attn-4", "nvidia-cutlass-dsl")
ARMS = {  # name → attention settings
    "auto, padded": {},
    "auto, packed_pad_exact": {"cross_kv": "packed_pad_exact"},
    "auto, packed": {"cross_kv": "packed"},
    "auto, padded, compiled": {},
    "sdpa, padded": {"self": "sdpa", "cross_text": "sdpa"},
}
USED_ARMS = {"diffusers, use(padded)": {}, "diffusers, use(packed_pad_exact)": {"cross_kv": "packed_pad_exact"}}
THEIR_ARMS = ("diffusers", "diffusers, compiled", *USED_ARMS)


@dataclasses.dataclass(frozen=True)
class Size:
    """latent: frames, height and width. compile_with: what torch.compile is given beside fullgraph."""

    config: WanConfig
    latent: tuple[int, int, int] = (21, 60, 104)  # 81 frames of 832×480
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    compile_with: dict[str, str] = dataclasses.field(default_factory=dict)


TOY = Size(
    WanConfig(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=40, num_layers=3,
    ),
    (2, 4, 6), torch.float32, "cpu", {"backend": "eager"},
)  # fmt: skip


def random_reference(size: Size):
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device(size.device):
        model = WanTransformer3DModel(**dataclasses.asdict(size.config)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(size.dtype))
    return model


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    from diffusers import WanPipeline

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=sorted(WAN_PRESETS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--smoke", action="store_true", help="toy size on a CPU, no compiler")
    options = parser.parse_args(arguments)

    size = TOY if options.smoke else Size(WAN_PRESETS[options.preset])
    reference = random_reference(size)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        models = {
            arm: WanTransformer.from_pretrained(folder, dtype=size.dtype, device=size.device, attention=attention)
            for arm, attention in ARMS.items()
        }
        theirs = {
            arm: type(reference).from_pretrained(folder, torch_dtype=size.dtype).to(size.device) for arm in THEIR_ARMS
        }
    watch_compilation()
    models["auto, padded, compiled"].compile_blocks(**size.compile_with)
    theirs["diffusers, compiled"].compile_repeated_blocks(fullgraph=True, **size.compile_with)
    nothing_else = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    used = {arm: use(WanPipeline(transformer=theirs[arm], **nothing_else), how) for arm, how in USED_ARMS.items()}
    config = models["auto, padded"].config
    x = torch.randn(2, config.in_channels, *size.latent, device=size.device, dtype=size.dtype)
    text = torch.randn(2, 512, config.text_dim, device=size.device, dtype=size.dtype)
    for row, n in enumerate(TEXT_LENS):
        text[row, n:] = 0
    timestep = torch.tensor(700.0, device=size.device).expand(2)
    calls = {arm: lambda model=model: model(x, timestep, text, return_dict=False)[0] for arm, model in theirs.items()}
    for arm, model in models.items():
        kv = model.project_text(text, TEXT_LENS)
        calls[arm] = lambda model=model, kv=kv: model(x, timestep, text_kv=kv)

    choices = {arm: model.attention_choices for arm, model in models.items()}
    choices |= dict.fromkeys(THEIR_ARMS, {}) | {arm: in_use.choices for arm, in_use in used.items()}
    expected = calls["diffusers"]()
    differences, compiling = {}, {}
    for arm, call in calls.items():
        before = compile_seconds()
        differences[arm] = relative(call(), expected)
        if arm.endswith("compiled"):
            compiling[arm] = {"compile_seconds": round(compile_seconds() - before, 1)}
    before = compile_seconds()
    times = interleaved(calls, options.runs, device=size.device)
    compiled_while_timed = compile_seconds() - before
    result = {
        "command": f"python benchmarks/forward_vs_diffusers.py --preset {options.preset} --runs {options.runs}",
        "shape": {"hidden_states": list(x.shape), "text_lens": list(TEXT_LENS), "padded_text_len": 512},
        "versions": {
            "gpu": torch.cuda.get_device_name() if size.device == "cuda" else None,
            **installed_versions(PACKAGES),
        },
        "compile_seconds_while_timed": round(compiled_while_timed, 1),
        "arms": {
            arm: {
                "median_ms": round(median, 1),
                **compiling.get(arm, {}),
                "rms_difference_from_diffusers": differences[arm],
                "backends": {role: choice.name for role, choice in choices[arm].items()},
            }
            for arm, median in times.items()
        },
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
