"""Stage "vae": trains the VAE on drawn clips, then measures its PSNR and the statistics of its latents."""

import math
import random
import time
from dataclasses import replace

import torch
from torch import Tensor

from .clips import Clip, draw, random_clip
from .combinations import held_out_combinations
from .models import channels_last, make_vae
from .muon import Muon
from .run_folder import Deadline, RunFolder
from .settings import Settings
from .whole_sequence_vae import decode, encode, psnr_db, run_whole_sequences

LOG_EVERY = 250
# A channel that says nothing would be blown up to full size if it were divided by its own spread.
MIN_LATENT_STD = 0.25
# Weights with fewer rows or columns have nothing to orthogonalise: the first and the last layer.
MIN_MATRIX_SIDE = 8


def _recoloured(rng: random.Random, clip: Clip) -> Clip:
    """A quarter of the pool gets colours that have no name, so that the VAE knows more than twelve."""
    shapes = tuple(replace(shape, rgb=(rng.random(), rng.random(), rng.random())) for shape in clip.shapes)
    return replace(clip, shapes=shapes, background_rgb=(rng.random(), rng.random(), rng.random()))


def draw_pool(settings: Settings, device: torch.device) -> list[Tensor]:
    """Per size, clips [vae_pool_clips, 3, vae_pool_frames, H, W]."""
    held_out = held_out_combinations()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pools = []
    for height, width in settings.sizes:
        rng = random.Random(f"{settings.seed} vae {height}x{width}")
        clips = [random_clip(rng, settings.vae_pool_frames, height, width, held_out, two_shapes=0.5)
                 for _ in range(settings.vae_pool_clips)]
        clips = [_recoloured(rng, clip) if index % 4 == 0 else clip for index, clip in enumerate(clips)]
        pools.append(torch.cat([draw(clips[start:start + 64], device).to(dtype) for start in range(0, len(clips), 64)]))
    return pools


class VaeTrainer:
    """VAE, its moving average and its optimiser; on a GPU one step is one CUDA graph."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.vae = run_whole_sequences(make_vae(settings), fast_norm=True).to(device)
        if device.type == "cuda":
            channels_last(self.vae)
        self.parameters = list(self.vae.parameters())
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        self.averages = [parameter.detach().clone() for parameter in self.parameters]
        self.learning_rate = torch.tensor(settings.vae_learning_rate, device=device)
        on_gpu = device.type == "cuda"
        # AdamW alone is far slower: on single frames it was at 18.5 dB after the 300 steps that took Muon to 25.
        matrices = [parameter for name, parameter in self.vae.named_parameters()
                    if name.endswith("weight") and min(parameter.shape[0], parameter[0].numel()) >= MIN_MATRIX_SIDE]
        of_muon = {id(parameter) for parameter in matrices}
        self.muon = Muon(matrices, self.learning_rate, step_size=settings.vae_muon_step_size)
        self.adamw = torch.optim.AdamW(
            [parameter for parameter in self.parameters if id(parameter) not in of_muon], lr=self.learning_rate,
            betas=(0.9, 0.99), weight_decay=0.0, fused=on_gpu, capturable=on_gpu,
        )
        self.losses = torch.zeros(3, device=device)  # L1, MSE, KL of the last step
        self.steps = 0

    def state(self) -> dict:
        return {"vae": self.vae.state_dict(), "averages": self.averages, "muon": self.muon.state_dict(),
                "adamw": self.adamw.state_dict(), "steps": self.steps}

    def load(self, state: dict) -> None:
        self.vae.load_state_dict(state["vae"])
        with torch.no_grad():
            torch._foreach_copy_(self.averages, [average.to(self.device) for average in state["averages"]])
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])
        # The optimiser keeps the loaded tensor; the schedule writes to this one.
        for group in self.adamw.param_groups:
            group["lr"] = self.learning_rate
        self.steps = state["steps"]

    def use_averages(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.averages)

    def learn(self, frames: Tensor) -> None:
        torch._foreach_zero_([parameter.grad for parameter in self.parameters])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda", cache_enabled=False):
            mean, log_variance = encode(self.vae, frames)
            sampled = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
            error = decode(self.vae, sampled) - frames.float()
        l1, mse = error.abs().mean(), error.square().mean()
        kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        (l1 + 2 * mse + self.settings.kl_weight * kl).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adamw.step()
        self.muon.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.parameters, 1 - self.settings.vae_ema_decay)
        self.losses.copy_(torch.stack([l1, mse, kl]).detach())

    def graphed(self, example: Tensor):
        """`learn` as a function of frames of the example's shape: a graph replay on a GPU, the plain call elsewhere."""
        if self.device.type != "cuda":
            return self.learn
        buffer = example.clone(memory_format=torch.channels_last_3d)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(4):  # capture needs warm kernels; these steps train like any other
                self.learn(buffer)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.learn(buffer)

        def replay(frames: Tensor) -> None:
            buffer.copy_(frames)
            graph.replay()

        return replay


def crop(rng: random.Random, pool: Tensor, batch: int, size: tuple[int, int, int]) -> Tensor:
    """`batch` clips of the pool, cut to `size` at one random place."""
    frames, height, width = size
    first, top, left = (rng.randint(0, have - want) for have, want in zip(pool.shape[2:], size, strict=True))
    rows = torch.tensor(rng.sample(range(len(pool)), batch)).to(pool.device, non_blocking=True)
    return pool[rows, :, first:first + frames, top:top + height, left:left + width]


def _learning_rate(settings: Settings, step: int) -> float:
    total = settings.vae_small_steps + settings.vae_large_steps
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return settings.vae_learning_rate * min(1.0, (step + 1) / settings.vae_warmup_steps) * (0.02 + 0.98 * cosine)


def train_vae(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """Trains until the steps are done or the time is up; True when the stage is finished."""
    settings, deadline = run.settings, Deadline(limit_s)
    state = run.load("vae", device)
    if state is not None and state["done"]:
        return True
    torch.manual_seed(settings.seed)
    trainer = VaeTrainer(settings, device)
    if state is not None:
        trainer.load(state)
        torch.manual_seed(settings.seed + trainer.steps)
        run.log(f"vae: going on from step {trainer.steps}")
    pools = draw_pool(settings, device)
    run.log(f"vae: drew {sum(len(pool) for pool in pools)} clips")
    total = settings.vae_small_steps + settings.vae_large_steps
    phase, learn, timed_from, timed_steps = None, None, 0.0, 0
    while trainer.steps < total and not deadline.over():
        small = trainer.steps < settings.vae_small_steps
        size = settings.vae_small_crop if small else settings.vae_large_crop
        batch = settings.vae_small_batch if small else settings.vae_large_batch
        rng = random.Random(f"{settings.seed} vae step {trainer.steps}")
        frames = crop(rng, rng.choices(pools, settings.size_shares)[0], batch, size)
        trainer.learning_rate.fill_(_learning_rate(settings, trainer.steps))
        if size != phase:
            phase, learn = size, trainer.graphed(frames)
            timed_from, timed_steps = time.monotonic(), trainer.steps
        learn(frames)
        trainer.steps += 1
        if trainer.steps % LOG_EVERY == 0 or trainer.steps == total:
            l1, mse, kl = trainer.losses.tolist()
            rate = (trainer.steps - timed_steps) / (time.monotonic() - timed_from)
            run.log(f"vae: step {trainer.steps}, L1 {l1:.4f}, {10 * math.log10(4 / mse):.1f} dB, KL {kl:.2f}, "
                    f"{rate:.1f} steps/s")
        if trainer.steps % 25 == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # steps are queued ahead of the device; the deadline is for the device
        if deadline.save_due():
            run.save("vae", trainer.state() | {"done": False})
    if trainer.steps < total:
        run.save("vae", trainer.state() | {"done": False})
        run.log(f"vae: stopped at step {trainer.steps} of {total}")
        return False
    trainer.use_averages()
    psnr = measure_psnr(trainer.vae, settings, device)
    run.log(f"vae: finished {total} steps, PSNR " + ", ".join(f"{size} {value:.2f} dB" for size, value in psnr.items()))
    mean, std, largest = latent_statistics(trainer.vae, settings, device)
    run.log(f"vae: latent mean {_short(mean)}, std {_short(std)}, largest after scaling {largest:.1f}")
    run.save("vae", {"vae": trainer.vae.state_dict(), "latents_mean": mean, "latents_std": std, "psnr_db": psnr,
                     "done": True})
    return True


def _short(values: list[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


@torch.no_grad()
def measure_psnr(vae, settings: Settings, device: torch.device, clips_per_size: int = 32) -> dict[str, float]:
    """Mean PSNR in dB of fresh clips of each size, through the means of their latents."""
    psnr = {}
    for height, width in settings.sizes:
        rng = random.Random(f"{settings.seed} vae psnr {height}x{width}")
        values = []
        for _ in range(clips_per_size // 8 if device.type == "cuda" else 1):
            clips = [random_clip(rng, settings.vae_pool_frames, height, width) for _ in range(8)]
            frames = draw(clips, device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                values.append(psnr_db(frames, decode(vae, encode(vae, frames)[0]).clamp(-1, 1)))
        psnr[f"{height}x{width}"] = float(torch.cat(values).mean())
    return psnr


@torch.no_grad()
def latent_statistics(vae, settings: Settings, device: torch.device) -> tuple[list[float], list[float], float]:
    """Mean and spread of every latent channel, and the largest value once they are taken out."""
    rng = random.Random(f"{settings.seed} vae statistics")
    height, width = settings.sizes[0]
    means = []
    for _ in range(16 if device.type == "cuda" else 1):
        clips = [random_clip(rng, settings.vae_pool_frames, height, width) for _ in range(32)]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            means.append(encode(vae, draw(clips, device))[0])
    latents = torch.cat(means)
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4)).clamp(min=MIN_LATENT_STD)
    largest = ((latents - mean.view(1, -1, 1, 1, 1)) / std.view(1, -1, 1, 1, 1)).abs().max()
    return mean.tolist(), std.tolist(), float(largest)


def load_vae(run: RunFolder, device: torch.device):
    """The trained VAE, with the statistics of its latents in its config, ready for whole sequences."""
    state = run.finished("vae")
    vae = make_vae(run.settings)
    vae.load_state_dict(state["vae"])
    vae.register_to_config(latents_mean=state["latents_mean"], latents_std=state["latents_std"])
    vae = run_whole_sequences(vae, fast_norm=True).requires_grad_(False).eval().to(device)
    return channels_last(vae) if device.type == "cuda" else vae
