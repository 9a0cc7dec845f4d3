"""One CFG pair through a full-size Wan transformer, ours against diffusers', on one GPU: random weights, bf16, eager.

    python benchmarks/forward_vs_diffusers.py [--preset wan2.1-t2v-1.3b] [--output FILE.json]

480p, 81 frames, text lengths 126 and 1 of 512. Arms are interleaved in one run; times are medians by device events.
The same weights are in all models, so the results' difference is recorded too. "diffusers, use(…)" is diffusers' own
model with our attention under it (`visual_gen.integrations.diffusers`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from measure import interleaved, relative

from visual_gen.integrations.diffusers import use
from visual_gen.models.wan import WAN_PRESETS, WanTransformer
from visual_gen.runtime.versions import installed_versions

LATENT = (21, 60, 104)  # 81 frames of 832×480
TEXT_LENS = (126, 1)
PACKAGES = ("torch", "diffusers", "flash-attn-4", "nvidia-cutlass-dsl")
ARMS = {  # name → attention settings
    "auto, padded": {},
    "auto, packed_pad_exact": {"cross_kv": "packed_pad_exact"},
    "auto, packed": {"cross_kv": "packed"},
    "sdpa, padded": {"self": "sdpa", "cross_text": "sdpa"},
}
USED_ARMS = {"diffusers, use(padded)": {}, "diffusers, use(packed_pad_exact)": {"cross_kv": "packed_pad_exact"}}


def random_reference(preset: str):
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = WanTransformer3DModel(**asdict(WAN_PRESETS[preset])).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))
    return model


@torch.inference_mode()
def main() -> None:
    from diffusers import WanPipeline

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="wan2.1-t2v-1.3b", choices=sorted(WAN_PRESETS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    reference = random_reference(options.preset)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        models = {
            arm: WanTransformer.from_pretrained(folder, dtype=torch.bfloat16, device="cuda", attention=attention)
            for arm, attention in ARMS.items()
        }
        theirs = {
            arm: type(reference).from_pretrained(folder, torch_dtype=torch.bfloat16).to("cuda")
            for arm in ("diffusers", *USED_ARMS)
        }
    nothing_else = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    used = {arm: use(WanPipeline(transformer=theirs[arm], **nothing_else), how) for arm, how in USED_ARMS.items()}
    config = models["auto, padded"].config
    x = torch.randn(2, config.in_channels, *LATENT, device="cuda", dtype=torch.bfloat16)
    text = torch.randn(2, 512, config.text_dim, device="cuda", dtype=torch.bfloat16)
    for row, n in enumerate(TEXT_LENS):
        text[row, n:] = 0
    timestep = torch.tensor(700.0, device="cuda").expand(2)
    calls = {arm: lambda model=model: model(x, timestep, text, return_dict=False)[0] for arm, model in theirs.items()}
    for arm, model in models.items():
        kv = model.project_text(text, TEXT_LENS)
        calls[arm] = lambda model=model, kv=kv: model(x, timestep, text_kv=kv)

    choices = {arm: model.attention_choices for arm, model in models.items()}
    choices |= {"diffusers": {}} | {arm: in_use.choices for arm, in_use in used.items()}
    expected = calls["diffusers"]()
    differences = {arm: relative(call(), expected) for arm, call in calls.items()}
    times = interleaved(calls, options.runs)
    result = {
        "command": f"python benchmarks/forward_vs_diffusers.py --preset {options.preset} --runs {options.runs}",
        "shape": {"hidden_states": list(x.shape), "text_lens": list(TEXT_LENS), "padded_text_len": 512},
        "versions": {"gpu": torch.cuda.get_device_name(), **installed_versions(PACKAGES)},
        "arms": {
            arm: {
                "median_ms": round(median, 1),
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
