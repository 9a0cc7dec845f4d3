"""Stage "distil": guidance and many small steps, distilled into a few forwards of one branch.

Consistency distillation with the guidance in it (Luo et al., 2023, https://arxiv.org/abs/2310.04378): the teacher,
which is the model that stage "causal" left, goes one guided step from a noise level to the next lower one; there and
here the student must predict the same clean chunk. On the lowest level the teacher's step ends at the clean chunk.
"""

import torch
from torch import Tensor

from .causal_settings import CausalSettings
from .causal_stage import CausalTrainer, ChunkText
from .models import FLOW_SHIFT, make_text_encoder, make_transformer
from .run_folder import RunFolder
from .training_forward import TrainingForward
from .transformer_stage import Round, train_round


def distil_round(settings: CausalSettings) -> Round:
    return Round("distil", "causal", "causal_latents", settings.distil_steps, settings.distil_learning_rate,
                 settings.warmup_steps, settings.distil_decay_share, settings.ema_decay, 0.0)


def shifted(share: Tensor) -> Tensor:
    """Even shares of the way, 0..1, as noise levels."""
    return FLOW_SHIFT * share / (1 + (FLOW_SHIFT - 1) * share)


class CausalDistiller(CausalTrainer):
    """`CausalTrainer` whose targets come from a guided teacher."""

    def __init__(self, settings: CausalSettings, plan: Round, device: torch.device) -> None:
        super().__init__(settings, plan, device)
        self.own_after = 0
        # Its parameters are never trained; they ask for gradients all the same, so that the programs that are compiled
        # for the student serve it too.
        self.teacher = make_transformer(settings).to(device)
        self.teacher_text_encoder = make_text_encoder(settings).to(device)
        self.teacher_forward = TrainingForward(self.teacher, self.dtype)

    def compile(self) -> None:
        super().compile()
        self.teacher_forward.block_forward = self.forward.block_forward

    def start_from(self, averages: list[Tensor]) -> None:
        super().start_from(averages)
        parameters = [*self.teacher.parameters(), *self.teacher_text_encoder.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.parameters)

    @torch.no_grad()
    def guided(self, context: Tensor, noisy: Tensor, level: Tensor, text: ChunkText) -> Tensor:
        """The teacher's velocity, away from that without a caption."""
        without = ChunkText(self.no_caption_ids.long().expand_as(text.ids), text.second, text.padded_lens)
        towards, away = (
            self.velocity(self.teacher_forward, context, noisy, level, self.encoded(which, self.teacher_text_encoder))
            for which in (text, without)
        )
        return away + self.settings.guidance_scale * (towards - away)

    def learn(self, latents: Tensor, text: ChunkText) -> tuple[Tensor, Tensor]:
        encoded = self.encoded(text, self.text_encoder)
        fixed = tuple(part.detach() for part in encoded)
        context = self.contexts(latents, fixed)
        shape, levels = (len(latents), self.settings.chunks), self.settings.levels
        rung = torch.randint(1, levels + 1, shape, generator=self.generator, device=self.device)
        level, lower = shifted(rung / levels), shifted((rung - 1) / levels)
        noisy = torch.lerp(latents, self.noise_like(latents), self.over_frames(level))
        with torch.no_grad():
            step = self.over_frames(level - lower)
            less_noisy = noisy - step * self.guided(context, noisy, level, text)
            velocity = self.velocity(self.forward, context, less_noisy, lower, fixed)
            clean = less_noisy - self.over_frames(lower) * velocity
            target = (noisy - clean) / self.over_frames(level)
        return self.regress(context, noisy, level, encoded, target)


def distil_causal(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """True when the round is finished."""
    return train_round(run, CausalDistiller, distil_round(run.settings), device, limit_s)
