"""The denoising stage of one call: its own scheduler, the guided model of each step's expert, and what it leaves in the
record."""

from __future__ import annotations

import copy
from typing import Any

import torch

from visual_gen.pipelines.conditioning import Conditioning
from visual_gen.pipelines.denoise import ExpertModel, GuidedModel, StepCallback, denoise
from visual_gen.pipelines.experts import Experts
from visual_gen.pipelines.progress import StageProgress
from visual_gen.pipelines.request import Request
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.record import RunClock, RunRecord


def denoise_request(
    experts: Experts,
    scheduler: Any,
    request: Request,
    text: TextRows,
    negative: TextRows | None,
    conditioning: Conditioning,
    noise: torch.Tensor,
    *,
    clock: RunClock,
    bars: StageProgress,
    record: RunRecord,
    callback: StepCallback | None,
) -> torch.Tensor:
    """fp32 latents [B, C, F, H, W] to decode. `scheduler` is left as it is."""
    # One of its own: threads, and a call from a callback, may be at other steps of theirs.
    scheduler = copy.deepcopy(scheduler)
    scheduler.set_timesteps(request.num_inference_steps, device=noise.device)
    bar = bars.stage("denoise", total=len(scheduler.timesteps))
    exchanges = experts.exchanges

    def guided_model(transformer: torch.nn.Module, index: int) -> GuidedModel:
        return GuidedModel(
            transformer, text, negative, request.guidance_scales[index],
            batched=request.cfg == "batched", conditioning=conditioning,
        )  # fmt: skip

    with torch.inference_mode():
        model = ExpertModel(experts, scheduler.timesteps.tolist(), guided_model)

        def on_step() -> None:
            clock.step()
            if model.forwards:
                bar.advance()

        final = denoise(model, scheduler, noise, on_step=on_step, callback=callback)
        final = conditioning.result(final)
    record.transformer_forwards = model.forwards
    record.cross_kv_formulations = model.formulations
    record.timesteps = [float(timestep) for timestep in scheduler.timesteps.tolist()]
    if len(experts.transformers) > 1:
        record.expert_steps = model.expert_steps
        record.expert_exchanges = experts.exchanges - exchanges
    return final
