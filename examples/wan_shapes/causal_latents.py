"""Stage "causal_latents": draw clips without end, some of which change on the way, and keep their latents."""

import random

import torch
from torch import Tensor

from .causal_settings import CausalSettings
from .combinations import held_out_combinations
from .endless import EndlessKind, captions, chunk_frames, draw_endless, plain_endless_clip, random_endless_clip
from .latents_stage import cache_chunks, scaled_latents, tokenise
from .run_folder import RunFolder

NAME = "causal_latents"


@torch.no_grad()
def encode_causal_chunk(
    settings: CausalSettings, index: int, vae, tokenizer, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Chunk `index` of the cache, the same in every run.

    Scaled latents [clips, C, F, h, w]; ids [clips, captions, 2, slots] of what is shown first and then; and the latent
    chunk [clips] that begins what is shown then, 0 where nothing changes.
    """
    rng = random.Random(f"{settings.seed} {NAME} {index}")
    held_out = held_out_combinations()
    kind = EndlessKind(settings.spinning, settings.two_shapes, settings.switched)
    starts = [chunk_frames(chunk, settings.frames_per_chunk).start for chunk in range(settings.chunks)]
    size = (settings.num_frames, settings.height, settings.width)
    num_plain = round(settings.plain * settings.clips_per_chunk)
    clips = [random_endless_clip(rng, kind, *size, starts[1:], held_out)
             for _ in range(settings.clips_per_chunk - num_plain)]
    texts = [text for clip in clips for _ in range(settings.captions_per_clip) for text in captions(rng, clip)]
    clips += [plain_endless_clip(rng, *size, held_out) for _ in range(num_plain)]
    texts += [""] * (num_plain * settings.captions_per_clip * 2)
    ids = tokenise(tokenizer, texts, settings.text_slots).view(len(clips), settings.captions_per_clip, 2, -1)
    switch = torch.tensor([0 if clip.then is None else starts.index(clip.switch_frame) for clip in clips])
    return scaled_latents(vae, draw_endless(clips, device)), ids.to(device), switch.to(device)


def cache_causal_latents(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """True when all latents are there."""
    settings = run.settings

    def encode(index: int, vae, tokenizer) -> tuple[Tensor, ...]:
        return encode_causal_chunk(settings, index, vae, tokenizer, device)

    return cache_chunks(run, NAME, settings.cached_clips, settings.clips_per_chunk, encode, device, limit_s)
