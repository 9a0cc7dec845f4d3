"""Scores a wan-shapes-causal checkpoint: does a video go on showing what its prompt says, chunk after chunk?

    python -m examples.wan_shapes.evaluate_causal FOLDER                     # everything, on a CPU
    python -m examples.wan_shapes.evaluate_causal FOLDER --quick             # 6 prompts, 4 chunks
    python -m examples.wan_shapes.evaluate_causal FOLDER --only switches     # some of the parts

FOLDER is what `train_causal` exports: transformer, text encoder, and how they are run in stream.json. Videos are made
through `visual_gen.pipelines.rollout`, over a KV cache, and read back by `scores.py`. Prints each score beside what it
must reach, writes all of them, and contact sheets, to `--out`, and exits with 1 if one falls short.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from visual_gen.checkpoint import resolve_folder
from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.components import load_text_encoder, load_tokenizer, load_vae
from visual_gen.pipelines.cpu_conv import OneDnnConv3d
from visual_gen.pipelines.rollout import rollout_latents
from visual_gen.pipelines.text import TextRows, encode, tokenize_all

from .captions import NO_CAPTION
from .causal_measure import MEASURES
from .combinations import Prompt, load_prompts
from .measure import shown
from .scorecard import Scorecard, run_measures
from .train_causal import STREAM_FILE, even_steps

SIZE, TEXT_LENGTH = 96, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True)
class CausalEvaluation(Scorecard):
    """A causal model with what it needs to make frames, and what has been found out about it."""

    transformer: CausalWanTransformer
    text_encoder: torch.nn.Module
    tokenizer: Any
    vae: torch.nn.Module
    stream: CausalConfig
    guidance_scale: float
    max_prompts: int | None = None
    decoded_together: int = 8

    @classmethod
    def load(
        cls, folder: Path, base: Path, dtype: torch.dtype, device: torch.device, *, steps: int | None = None,
        guidance_scale: float | None = None, max_prompts: int | None = None,
    ) -> "CausalEvaluation":
        """Transformer and text encoder of `folder`, VAE and tokenizer of `base`. steps, guidance_scale: other than
        those in stream.json."""
        path = folder / STREAM_FILE
        if not path.exists():
            raise ValueError(f"{path} is missing, which says how the model is run: give a folder of train_causal's")
        stream = json.loads(path.read_text())
        if steps is not None:
            stream["causal"]["steps"] = even_steps(steps)
        text_encoder = load_text_encoder(folder / "text_encoder", dtype=dtype, device=device)
        return cls(
            transformer=CausalWanTransformer.from_pretrained(folder, dtype=dtype, device=device),
            text_encoder=text_encoder,
            tokenizer=load_tokenizer(base / "tokenizer", text_encoder.config.vocab_size),
            vae=load_vae(base / "vae", dtype=torch.float32, device=device),
            stream=CausalConfig(**stream["causal"]),
            guidance_scale=stream["guidance_scale"] if guidance_scale is None else guidance_scale,
            max_prompts=max_prompts,
        )

    def prompts(self, name: str) -> list[Prompt]:
        """A committed list, or its first `max_prompts`."""
        return load_prompts(name)[: self.max_prompts]

    def text(self, prompt: str) -> TextRows:
        tokens = tokenize_all(self.tokenizer, [prompt], TEXT_LENGTH)
        return encode(self.text_encoder, tokens, TEXT_LENGTH, self.transformer.dtype)

    @torch.no_grad()
    def latents(self, prompt: Prompt, num_chunks: int, switches: dict[int, Prompt]) -> Tensor:
        """Latents [1, C, F, h, w] of one stream, whose noise comes from the prompt's seed."""
        return rollout_latents(
            self.transformer, self.text(prompt.prompt), (SIZE // 8, SIZE // 8), num_chunks=num_chunks,
            settings=self.stream, negative=self.text(NO_CAPTION) if self.guidance_scale > 1 else None,
            guidance_scale=self.guidance_scale, generator=torch.Generator().manual_seed(prompt.seed),
            switches={chunk: self.text(later.prompt) for chunk, later in switches.items()},
        )

    def generate(
        self, prompts: Sequence[Prompt], num_chunks: int, *, switched: Sequence[Prompt] | None = None,
        switch_at: int = 0, label: str = "",
    ) -> list[Tensor]:
        """One clip [frames, height, width, 3] in 0..1 of so many chunks per prompt, from chunk `switch_at` on under the
        prompt in `switched`."""
        clips = []
        for start in track(range(0, len(prompts), self.decoded_together), description=label, transient=True):
            rows = range(start, min(start + self.decoded_together, len(prompts)))
            latents = [
                self.latents(prompts[row], num_chunks, {} if switched is None else {switch_at: switched[row]})
                for row in rows
            ]
            clips += self.decode(torch.cat(latents))
        return clips

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> list[Tensor]:
        mean, std = (torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
                     for values in (self.vae.config.latents_mean, self.vae.config.latents_std))
        with OneDnnConv3d():
            frames = self.vae.decode(latents * std + mean).sample.clamp(-1, 1).cpu()
        return [shown(clip[None]) for clip in frames]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what train_causal exported")
    parser.add_argument("--base", default="wan-shapes", help="checkpoint with the VAE and tokenizer that training had")
    parser.add_argument("--quick", action="store_true", help="6 prompts, 4 chunks")
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="run only these parts")
    parser.add_argument("--out", type=Path, help="folder for scores.json and contact sheets")
    parser.add_argument("--steps", type=int, help="steps a chunk, other than those in stream.json")
    parser.add_argument("--guidance-scale", type=float, help="other than that in stream.json")
    parser.add_argument("--max-prompts", type=int, help="only the first so many of each list")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    evaluation = CausalEvaluation.load(
        options.folder, resolve_folder(options.base), DTYPES[options.dtype], torch.device(options.device),
        steps=options.steps, guidance_scale=options.guidance_scale, max_prompts=options.max_prompts,
    )
    every = [name for name in MEASURES if name != "quick"]
    how = {"stream": evaluation.stream.model_dump(), "guidance_scale": evaluation.guidance_scale}
    names = options.only or (["quick"] if options.quick else every)
    return run_measures(evaluation, MEASURES, names, how, options.out, columns=12)


if __name__ == "__main__":
    sys.exit(main())
