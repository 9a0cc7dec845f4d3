"""Stages "latents", "refine_latents": draw captioned clips of all sizes and keep their latents, one set a round.

Training then never waits for them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .captions import caption, make_tokenizer
from .clips import draw, plain_clip, random_clip
from .combinations import held_out_combinations
from .run_folder import Deadline, RunFolder
from .settings import Settings
from .vae_stage import load_vae


@dataclass(frozen=True)
class LatentsPlan:
    """A set of latents: the name of its state, how many clips, and how often a shape spins in them."""

    name: str
    clips: int
    spinning: float = 0.0


def first_latents(settings: Settings) -> LatentsPlan:
    return LatentsPlan("latents", settings.cached_clips)


def refining_latents(settings: Settings) -> LatentsPlan:
    return LatentsPlan("refine_latents", settings.refine_clips, settings.refine_spinning)


def _size_of_chunk(settings: Settings, rng: random.Random) -> tuple[int, int, int]:
    frames = rng.choices(settings.frame_counts, settings.frame_shares)[0]
    height, width = rng.choices(settings.sizes, settings.size_shares)[0]
    return frames, height, width


def tokenise(tokenizer, texts: list[str], slots: int) -> Tensor:
    """Ids [texts, slots], 0 where there is no word; ValueError for a text that does not fit."""
    ids = tokenizer(texts, padding="max_length", max_length=slots, return_tensors=None).input_ids
    longest = max(len(row) for row in ids)
    if longest > slots:
        raise ValueError(f"a caption has {longest} tokens, more than the {slots} text slots")
    return torch.tensor(ids, dtype=torch.int16)


@torch.no_grad()
def encode_chunk(
    settings: Settings, plan: LatentsPlan, index: int, vae, tokenizer, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Chunk `index`, the same in every run: scaled latents [clips, C, F, h, w] and ids [clips, captions, slots]."""
    rng = random.Random(f"{settings.seed} {plan.name} {index}")
    size = _size_of_chunk(settings, rng)
    held_out = held_out_combinations()
    num_plain = round(settings.plain * settings.clips_per_chunk)
    clips = [random_clip(rng, *size, held_out, spinning=plan.spinning)
             for _ in range(settings.clips_per_chunk - num_plain)]
    texts = [caption(rng, clip) for clip in clips for _ in range(settings.captions_per_clip)]
    clips += [plain_clip(rng, *size, held_out) for _ in range(num_plain)]
    texts += [""] * (num_plain * settings.captions_per_clip)
    ids = tokenise(tokenizer, texts, settings.text_slots).view(len(clips), settings.captions_per_clip, -1)
    return scaled_latents(vae, draw(clips, device)), ids.to(device)


def scaled_latents(vae, frames: Tensor) -> Tensor:
    """Latents bf16 [clips, C, F, h, w] of frames, scaled as the transformer takes them."""
    device = frames.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        if device.type == "cuda":
            frames = frames.contiguous(memory_format=torch.channels_last_3d)
        latents = vae.quant_conv(vae.encoder(frames)).float().chunk(2, dim=1)[0]
    mean, std = (torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
                 for values in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean) / std).to(torch.bfloat16)


def cache_latents(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The first round's latents; True when all are there."""
    return _cache_plan(run, first_latents(run.settings), device, limit_s)


def cache_refining_latents(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The second round's latents; True when all are there."""
    return _cache_plan(run, refining_latents(run.settings), device, limit_s)


def _cache_plan(run: RunFolder, plan: LatentsPlan, device: torch.device, limit_s: float) -> bool:
    def encode(index: int, vae, tokenizer) -> tuple[Tensor, ...]:
        return encode_chunk(run.settings, plan, index, vae, tokenizer, device)

    return cache_chunks(run, plan.name, plan.clips, run.settings.clips_per_chunk, encode, device, limit_s)


def cache_chunks(
    run: RunFolder, name: str, clips: int, clips_per_chunk: int, encode: Callable[..., tuple[Tensor, ...]],
    device: torch.device, limit_s: float,
) -> bool:
    """Makes the chunks that are not there yet by encode(index, vae, tokenizer); True when there are `clips` clips."""
    deadline = Deadline(limit_s)
    state = run.load(name) or {"chunks": [], "done": False}
    if state["done"]:
        return True
    vae, tokenizer = load_vae(run, device), make_tokenizer()
    chunks = state["chunks"]
    wanted = -(-clips // clips_per_chunk)
    while len(chunks) < wanted and not deadline.over():
        chunks.append(encode(len(chunks), vae, tokenizer))  # left on the device: a copy here would wait for it
        if len(chunks) % 16 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # chunks are queued ahead of the device; the deadline is for the device
        if len(chunks) % 64 == 0:
            run.log(f"{name}: {len(chunks) * clips_per_chunk} clips")
    done = len(chunks) >= wanted
    run.save(name, {"chunks": [tuple(part.cpu() for part in chunk) for chunk in chunks], "done": done})
    run.log(f"{name}: {'finished' if done else 'stopped'} at {len(chunks) * clips_per_chunk} clips")
    return done


def load_latents(run: RunFolder, name: str, device: torch.device) -> list[tuple[Tensor, ...]]:
    """Per clip size, all latents [clips, C, F, h, w] and what belongs to them, first caption ids, on the device."""
    by_size: dict[tuple[int, ...], list[tuple[Tensor, ...]]] = {}
    for chunk in run.finished(name)["chunks"]:
        by_size.setdefault(tuple(chunk[0].shape[2:]), []).append(chunk)
    return [
        tuple(torch.cat(parts).to(device) for parts in zip(*chunks, strict=True))
        for _, chunks in sorted(by_size.items())
    ]
