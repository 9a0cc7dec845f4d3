"""Stage "causal": the bidirectional model learns to make chunks, each from what it sees of those before it.

Teacher forcing on [clean ; noisy]: every chunk of a clip is learned at once, each at a noise level of its own, and sees
the clean chunks that a rollout would find in its cache. Those are not always clean: some are lightly noised, and in
some steps they are what the model itself makes of noisy chunks, so that its mistakes do not add up in a rollout.

B clips, G = 2 · chunks (clean, then noisy), F latent frames of a clip.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_gen.modules.block_causal import ChunkWindow, teacher_forcing_mask

from .causal_latents import NAME as LATENTS
from .causal_settings import CausalSettings
from .run_folder import RunFolder
from .training_forward import TrainingForward, encode_text, padding_bias
from .transformer_stage import Round, TransformerTrainer, draw_noise_levels, train_round


def causal_round(settings: CausalSettings) -> Round:
    return Round("causal", "transformer", LATENTS, settings.steps, settings.learning_rate, settings.warmup_steps,
                 settings.decay_share, settings.ema_decay, settings.dropped_captions)


@dataclass(frozen=True)
class ChunkText:
    """Two texts of every clip, and which of them each chunk is under.

    ids [B, 2, slots]; second [B, G], True where it is the second one; padded_lens [B], how long the texts count as
    being padded to.
    """

    ids: Tensor
    second: Tensor
    padded_lens: Tensor


class CausalTrainer(TransformerTrainer):
    """`TransformerTrainer` on chunks under a block-causal mask."""

    settings: CausalSettings

    def __init__(self, settings: CausalSettings, plan: Round, device: torch.device) -> None:
        super().__init__(settings, plan, device)
        self.frame_tokens = settings.height * settings.width // 16**2
        window = ChunkWindow(settings.frames_per_chunk, recent_frames=settings.recent_frames)
        self.mask = teacher_forcing_mask(window, settings.latent_frames, self.frame_tokens, device)
        self.own_after = settings.own_after

    def compile(self) -> None:
        self.forward.compile(one_size=True)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def noise_like(self, latents: Tensor) -> Tensor:
        return torch.randn(latents.shape, generator=self.generator, device=self.device)

    def batch(self, cache: list[tuple[Tensor, ...]]) -> tuple[Tensor, ChunkText]:
        """Latents [B, C, F, h, w] and their texts, drawn for the step at hand."""
        settings = self.settings
        self.generator.manual_seed(settings.seed * 1_000_003 + self.steps)
        ((latents, ids, switch),) = cache
        rows = torch.randint(len(latents), (settings.batch,), generator=self.generator, device=self.device)
        which = torch.randint(ids.shape[1], (settings.batch,), generator=self.generator, device=self.device)
        return latents[rows].float(), self.place_texts(ids[rows, which], switch[rows])

    def place_texts(self, ids: Tensor, switch: Tensor) -> ChunkText:
        """Which chunk is under which text; ids [B, 2, slots], switch [B] as the latents' stage leaves them.

        A clip that changes goes over to its second text with the change; now and then the chunks before are read under
        the second text already, as after a switch that recomputes the window. Some clips, whatever they show, go on
        without a caption, as guidance asks for in a rollout, and their first chunk alone keeps its own.
        """
        settings, batch = self.settings, len(ids)
        chunk, switch = torch.arange(settings.chunks, device=self.device), switch.view(-1, 1)
        changes = switch > 0
        dropped = self.random(batch, 1) < self.plan.dropped_captions
        recached = changes & (self.random(batch, 1) < settings.recached)
        noisy = torch.where(dropped, chunk >= 1, changes & (chunk >= switch))
        clean = noisy | recached | dropped
        ids = torch.stack([ids[:, 0], torch.where(dropped, self.no_caption_ids, ids[:, 1])], 1)
        pick = torch.randint(len(self.text_lengths), (batch,), generator=self.generator, device=self.device)
        return ChunkText(ids.long(), torch.cat([clean, noisy], 1), self.text_lengths[pick])

    def encoded(self, text: ChunkText, text_encoder) -> tuple[Tensor, Tensor]:
        """Embeddings [B, 2 · slots, C] of both texts and the bias [B, 1, tokens, 2 · slots] that shows each chunk its
        own."""
        batch, slots = len(text.ids), self.settings.text_slots
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            embeddings, lens = encode_text(text_encoder, text.ids.flatten(0, 1))
        bias = padding_bias(lens, text.padded_lens.repeat_interleave(2), slots, self.dtype).view(batch, 1, 2, slots)
        shown = torch.stack([~text.second, text.second], -1).unsqueeze(-1)
        bias = torch.where(shown, bias, float("-inf")).flatten(2)  # [B, G, 2 · slots]
        tokens = self.settings.frames_per_chunk * self.frame_tokens
        return embeddings.view(batch, 2 * slots, -1), bias.repeat_interleave(tokens, 1).unsqueeze(1)

    def velocity(
        self, forward: TrainingForward, context: Tensor, noisy: Tensor, level: Tensor, encoded: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Of noisy chunks at `level` [B, chunks], which see `context`, both [B, C, F, h, w]. Contexts count as clean,
        as they do in a rollout."""
        timestep = torch.cat([torch.zeros_like(level), level * 1000], 1)
        flow = forward(torch.cat([context, noisy], 2), timestep, *encoded, self_mask=self.mask, copies=2)
        return flow[:, :, context.shape[2] :]

    def over_frames(self, per_chunk: Tensor) -> Tensor:
        """[B, chunks] to [B, 1, F, 1, 1]."""
        return per_chunk.repeat_interleave(self.settings.frames_per_chunk, 1)[:, None, :, None, None]

    @torch.no_grad()
    def contexts(self, latents: Tensor, encoded: tuple[Tensor, Tensor]) -> Tensor:
        """What the noisy chunks see of those before them: like `latents`, but not quite."""
        settings, shape = self.settings, (len(latents), self.settings.chunks)
        noised = self.random(*shape) < settings.noised_contexts
        level = self.over_frames(self.random(*shape) * settings.context_noise * noised)
        context = torch.lerp(latents, self.noise_like(latents), level)
        if self.steps < self.own_after or float(torch.rand((), generator=self.host_generator())) >= settings.own_steps:
            return context
        least, most = settings.own_noise
        level = least + (most - least) * self.random(*shape)
        share = self.over_frames(level)
        noisy = torch.lerp(latents, self.noise_like(latents), share)
        own = noisy - share * self.velocity(self.forward, context, noisy, level, encoded)
        return torch.where(self.over_frames(self.random(*shape) < settings.own_contexts), own, context)

    def host_generator(self) -> torch.Generator:
        """For what the host must know at this step without waiting for the device."""
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.steps)

    def learn(self, latents: Tensor, text: ChunkText) -> tuple[Tensor, Tensor]:
        """One step; returns the loss of every chunk of every clip [B · chunks] and its noise level, likewise."""
        encoded = self.encoded(text, self.text_encoder)
        context = self.contexts(latents, tuple(part.detach() for part in encoded))
        level = draw_noise_levels(len(latents) * self.settings.chunks, self.generator).view(len(latents), -1)
        noise = self.noise_like(latents)
        noisy = torch.lerp(latents, noise, self.over_frames(level))
        return self.regress(context, noisy, level, encoded, noise - latents)

    def regress(
        self, context: Tensor, noisy: Tensor, level: Tensor, encoded: tuple[Tensor, Tensor], target: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One step towards the velocity `target`."""
        error = (self.velocity(self.forward, context, noisy, level, encoded) - target).square()
        losses = error.unflatten(2, (self.settings.chunks, -1)).mean((1, 3, 4, 5))
        self.descend(losses.mean())
        return losses.detach().flatten(), level.flatten()


def train_causal(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """True when the round is finished."""
    return train_round(run, CausalTrainer, causal_round(run.settings), device, limit_s)
