"""Stages "transformer", "refine": train transformer and text encoder together on cached latents, by flow matching."""

import random
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .captions import NO_CAPTION, make_tokenizer
from .latents_stage import load_latents, tokenise
from .models import FLOW_SHIFT, make_text_encoder, make_transformer
from .muon import Muon
from .run_folder import Deadline, RunFolder
from .settings import ModelSettings, Settings
from .training_forward import TrainingForward, encode_text, padding_bias

LOG_EVERY = 250
NOISE_BINS = 5


@dataclass(frozen=True)
class Round:
    """One round of training: the name of its state, whose averages it starts from, its latents and its schedule."""

    name: str
    starts_from: str | None
    latents: str
    steps: int
    learning_rate: float
    warmup_steps: int
    decay_share: float
    ema_decay: float
    dropped_captions: float  # share of the clips whose caption is left out


def first_round(settings: Settings) -> Round:
    return Round("transformer", None, "latents", settings.transformer_steps, settings.learning_rate,
                 settings.warmup_steps, settings.decay_share, settings.ema_decay, settings.dropped_captions)


def refining_round(settings: Settings) -> Round:
    return Round("refine", "transformer", "refine_latents", settings.refine_steps, settings.refine_learning_rate,
                 settings.warmup_steps, settings.refine_decay_share, settings.ema_decay,
                 settings.dropped_captions)


def learning_rate_at(plan: Round, step: int) -> float:
    """Warm-up, then constant, then straight down to zero.

    While the constant part lasts, nothing depends on the number of steps: it can still be changed for the time at hand.
    """
    left = (plan.steps - step) / (plan.decay_share * plan.steps)
    return plan.learning_rate * min(1.0, (step + 1) / plan.warmup_steps, max(left, 0.0))


def draw_noise_levels(batch: int, generator: torch.Generator) -> Tensor:
    """Noise shares [batch] in 0..1: half uniform, half logit-normal, then shifted as the sampler's are."""
    device = generator.device
    uniform = torch.rand(batch, generator=generator, device=device)
    middling = torch.sigmoid(torch.randn(batch, generator=generator, device=device))
    level = torch.where(torch.rand(batch, generator=generator, device=device) < 0.5, uniform, middling)
    return FLOW_SHIFT * level / (1 + (FLOW_SHIFT - 1) * level)


class TransformerTrainer:
    """Transformer, text encoder, their moving averages and optimisers, for one round."""

    def __init__(self, settings: ModelSettings, plan: Round, device: torch.device) -> None:
        self.settings, self.plan, self.device = settings, plan, device
        self.transformer = make_transformer(settings).to(device)
        self.text_encoder = make_text_encoder(settings).to(device)
        on_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        self.forward = TrainingForward(self.transformer, self.dtype)
        self.parameters = [*self.transformer.parameters(), *self.text_encoder.parameters()]
        self.averages = [parameter.detach().clone() for parameter in self.parameters]
        matrices = [parameter for parameter in self.transformer.blocks.parameters() if parameter.ndim == 2]
        of_muon = {id(parameter) for parameter in matrices}
        self.learning_rate = torch.tensor(plan.learning_rate, device=device)
        self.muon = Muon(matrices, self.learning_rate, weight_decay=settings.weight_decay)
        self.adamw = torch.optim.AdamW(
            [parameter for parameter in self.parameters if id(parameter) not in of_muon], lr=self.learning_rate,
            betas=(0.9, 0.98), weight_decay=settings.weight_decay, fused=on_gpu, capturable=on_gpu,
        )
        self.no_caption_ids = tokenise(make_tokenizer(), [NO_CAPTION], settings.text_slots).to(device)
        self.text_lengths = torch.tensor(settings.text_lengths, device=device)
        self.generator = torch.Generator(device)
        self.steps = 0

    def compile(self) -> None:
        self.forward.compile()

    def state(self) -> dict:
        return {
            "transformer": self.transformer.state_dict(), "text_encoder": self.text_encoder.state_dict(),
            "averages": self.averages, "muon": self.muon.state_dict(), "adamw": self.adamw.state_dict(),
            "steps": self.steps,
        }

    def load(self, state: dict) -> None:
        self.transformer.load_state_dict(state["transformer"])
        self.text_encoder.load_state_dict(state["text_encoder"])
        with torch.no_grad():
            torch._foreach_copy_(self.averages, [average.to(self.device) for average in state["averages"]])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate
        self.steps = state["steps"]

    def start_from(self, averages: list[Tensor]) -> None:
        """Weights and averages as another round left them; optimisers and steps begin anew."""
        with torch.no_grad():
            torch._foreach_copy_(self.averages, [average.to(self.device) for average in averages])
        self.use_averages()

    def use_averages(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.averages)

    def batch(self, cache: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Latents [B, C, F, h, w] of one clip size and caption ids [B, slots], drawn for the step at hand."""
        settings, generator = self.settings, self.generator
        rng = random.Random(f"{settings.seed} {self.plan.name} step {self.steps}")
        generator.manual_seed(settings.seed * 1_000_003 + self.steps)
        latents, ids = rng.choices(cache, [len(latents) for latents, _ in cache])[0]
        frames, height, width = latents.shape[2:]
        if frames > min(other.shape[2] for other, _ in cache) and rng.random() < settings.shorter_clips:
            # The VAE is causal: the first latents of a clip are those of a shorter one.
            frames -= 2
        size = max(1, settings.tokens_per_step // (frames * height * width // 4))
        rows = torch.randint(len(latents), (size,), generator=generator, device=self.device)
        which = torch.randint(ids.shape[1], (size,), generator=generator, device=self.device)
        dropped = torch.rand(size, 1, generator=generator, device=self.device) < self.plan.dropped_captions
        return latents[rows, :, :frames].float(), torch.where(dropped, self.no_caption_ids, ids[rows, which]).long()

    def learn(self, latents: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """One step; returns the loss of every clip [B] and its noise level [B]."""
        batch, settings = len(latents), self.settings
        level = draw_noise_levels(batch, self.generator)
        noise = torch.randn(latents.shape, generator=self.generator, device=self.device)
        share = level.view(-1, 1, 1, 1, 1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            text, text_lens = encode_text(self.text_encoder, ids)
        pick = torch.randint(len(self.text_lengths), (batch,), generator=self.generator, device=self.device)
        bias = padding_bias(text_lens, self.text_lengths[pick], settings.text_slots, self.dtype)
        velocity = self.forward(torch.lerp(latents, noise, share), level * 1000, text, bias)
        losses = (velocity - (noise - latents)).square().mean((1, 2, 3, 4))
        self.descend(losses.mean())
        return losses.detach(), level

    def descend(self, loss: Tensor) -> None:
        """Optimisers and averages by one step down `loss`."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adamw.step()
        self.muon.step()
        self.adamw.zero_grad(set_to_none=True)
        self.transformer.zero_grad(set_to_none=True)
        # A short average at first, so that the random start is soon forgotten.
        decay = min(self.plan.ema_decay, (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)
        self.steps += 1


def train_transformer(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The first round, on everything that clips can show; True when it is finished."""
    return train_round(run, TransformerTrainer, first_round(run.settings), device, limit_s)


def refine_transformer(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The second round, from the averages of the first; True when it is finished."""
    return train_round(run, TransformerTrainer, refining_round(run.settings), device, limit_s)


def train_round(
    run: RunFolder, kind: type[TransformerTrainer], plan: Round, device: torch.device, limit_s: float
) -> bool:
    """Trains until the steps are done or the time is up; True when the round is finished."""
    settings, deadline = run.settings, Deadline(limit_s)
    state = run.load(plan.name, device)
    if state is not None and state["done"]:
        return True
    torch.manual_seed(settings.seed + 1)
    trainer = kind(settings, plan, device)
    if plan.starts_from is not None:
        trainer.start_from(run.finished(plan.starts_from)["averages"])
    if state is not None:
        trainer.load(state)
        run.log(f"{plan.name}: going on from step {trainer.steps}")
    cache = load_latents(run, plan.latents, device)
    run.log(f"{plan.name}: clips of latent size " + ", ".join(
        f"{'×'.join(map(str, parts[0].shape[2:]))}: {len(parts[0])}" for parts in cache))
    if device.type == "cuda":
        trainer.compile()
    sums = torch.zeros(2, NOISE_BINS, device=device)
    timed_from, timed_steps = None, 0

    def rate() -> float:
        """Steps a second since the first, which is the slow one."""
        seconds = 0.0 if timed_from is None else time.monotonic() - timed_from
        return (trainer.steps - timed_steps) / max(seconds, 1e-9)

    while trainer.steps < plan.steps and not deadline.over():
        trainer.learning_rate.fill_(learning_rate_at(plan, trainer.steps))
        losses, level = trainer.learn(*trainer.batch(cache))
        bins = (level * NOISE_BINS).long().clamp(max=NOISE_BINS - 1)
        sums[0].index_add_(0, bins, losses)
        sums[1].index_add_(0, bins, torch.ones_like(losses))
        if timed_from is None:
            sums.sum().item()  # the first step compiles
            run.log(f"{plan.name}: first step done")
            timed_from, timed_steps = time.monotonic(), trainer.steps
        if trainer.steps % LOG_EVERY == 0 or trainer.steps == plan.steps:
            by_level = " ".join(f"{value:.3f}" for value in (sums[0] / sums[1].clamp(min=1)).tolist())
            run.log(f"{plan.name}: step {trainer.steps}, loss {float(sums[0].sum() / sums[1].sum()):.4f}, from little "
                    f"to much noise {by_level}, {rate():.2f} steps/s")
            sums.zero_()
        if trainer.steps % 20 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # steps are queued ahead of the device; the deadline is for the device
        if deadline.save_due():
            run.save(plan.name, trainer.state() | {"done": False})
    done, last_rate = trainer.steps >= plan.steps, rate()
    run.save(plan.name, trainer.state() | {"done": done})
    run.log(f"{plan.name}: {'finished' if done else 'stopped'} at step {trainer.steps} of {plan.steps}"
            + ("" if done else f", {last_rate:.2f} steps/s"))
    return done
