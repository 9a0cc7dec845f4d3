"""The denoising loop of Wan: classifier-free guidance in one forward or two, text K/V made once, no host sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from visual_gen.pipelines.conditioning import Conditioning
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.experts import Experts
from visual_gen.pipelines.text import TextRows

StepCallback = Callable[[int, torch.Tensor, dict[str, torch.Tensor]], dict[str, torch.Tensor] | None]


class GuidedModel:
    """Predicted flow of a WanTransformer for latents, with the text's and images' keys and values projected at
    construction.

    `text` holds a row for each prompt, `negative` one for each negative prompt, both of one encode, or None: no
    guidance. batched: both branches in one forward, rows [prompts; negative prompts]; else one forward each. Rows of
    one forward that show the same text share its projection, and branches that show the same texts share everything.
    A guidance_scale of 1 weighs the negative prompts by nothing: their branch is left out.
    """

    def __init__(
        self,
        transformer: torch.nn.Module,
        text: TextRows,
        negative: TextRows | None,
        guidance_scale: float,
        *,
        batched: bool,
        conditioning: Conditioning,
    ) -> None:
        self._transformer = transformer
        self._guidance_scale = guidance_scale
        self._conditioning = conditioning
        self._guided = negative is not None and guidance_scale != 1
        groups = [text, negative] if self._guided else [text]
        if self._guided and batched:
            groups = [text + negative]
        distinct = {tuple(rows.index): rows for rows in groups}
        text_kvs = {
            index: transformer.project_text(
                rows.hidden, rows.text_lens, self._image_tokens(len(rows.index) // len(text.index)), text_index=index
            )
            for index, rows in distinct.items()
        }
        self._text_kvs = [text_kvs[tuple(rows.index)] for rows in groups]
        self.formulations = sorted({kv.formulation for kv in self._text_kvs})
        self.forwards = 0

    def _image_tokens(self, branches: int) -> torch.Tensor | None:
        tokens = self._conditioning.image_tokens
        return None if tokens is None else tokens.repeat(branches, 1, 1)

    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        """fp32 flow for fp32 latents [B, C, F, H, W] at the 0-dimensional `timestep`."""
        one_forward = self._guided and len(self._text_kvs) == 1
        x = self._conditioning.model_input(latents).to(self._transformer.dtype)
        x = torch.cat([x, x]) if one_forward else x
        timestep = self._conditioning.timestep(timestep, x.shape[0])
        flows = [self._transformer(x, timestep, text_kv=kv) for kv in self._text_kvs]
        self.forwards += len(flows)
        if not self._guided:
            return flows[0].float()
        return guided(*(flows[0].chunk(2) if one_forward else flows), self._guidance_scale)


class ExpertModel:
    """Predicted flow, at each step of the expert that serves its timestep.

    host_timesteps: of all steps. make(transformer, index) gives an expert's GuidedModel: the first step's at once, the
    other's at its first step, when that of the first is gone. `expert_steps` says which expert each step took.
    """

    def __init__(
        self,
        experts: Experts,
        host_timesteps: Sequence[float],
        make: Callable[[torch.nn.Module, int], GuidedModel],
    ) -> None:
        self._experts = experts
        self._of_step = [experts.index(timestep) for timestep in host_timesteps]
        self._make = make
        self._model: GuidedModel | None = None
        self._model_index: int | None = None
        self._left_forwards = 0
        self.formulations: list[str] = []
        self.expert_steps: list[int] = []
        with experts.use(self._of_step[0]) as transformer:
            self._prepare(transformer, self._of_step[0])

    @property
    def forwards(self) -> int:
        return self._left_forwards + self._model.forwards

    def _prepare(self, transformer: torch.nn.Module, index: int) -> None:
        if self._model_index == index:
            return
        if self._model is not None:
            self._left_forwards, self._model = self.forwards, None
        self._model, self._model_index = self._make(transformer, index), index
        self.formulations = sorted({*self.formulations, *self._model.formulations})

    def __call__(self, latents: torch.Tensor, timestep: torch.Tensor, step: int) -> torch.Tensor:
        """fp32 flow for fp32 latents [B, C, F, H, W] at `step`, whose timestep is the 0-dimensional `timestep`."""
        index = self._of_step[step]
        with self._experts.use(index) as transformer:
            self._prepare(transformer, index)
            flow = self._model(latents, timestep)
        self.expert_steps.append(index)
        return flow


def guided(cond: torch.Tensor, uncond: torch.Tensor, guidance_scale: float) -> torch.Tensor:
    """fp32 flow of classifier-free guidance from the two branches' flows, of one shape."""
    # Guidance amplifies rounding: its difference is taken in fp32 whatever the model's dtype.
    uncond = uncond.float()
    return torch.sub(cond.float(), uncond).mul_(guidance_scale).add_(uncond)


def denoise_chunk(
    latents: torch.Tensor,
    flows: torch.Tensor,
    guidance_scale: float | None,
    sigmas: Sequence[float],
    step: int,
    noise: Callable[[int], torch.Tensor],
) -> torch.Tensor:
    """A chunk's latents [C, F, H, W] one step further: from noise level sigmas[step] to the clean ones that the flow
    says, and with fresh noise to the next level, or clean after the last.

    flows: [1 or 2, C, F, H, W], of one branch or guided by guidance_scale. noise(F) gives noise like latents.
    """
    flow = flows[0].float() if len(flows) == 1 else guided(*flows, guidance_scale)
    latents = latents - sigmas[step] * flow
    if step + 1 < len(sigmas):
        latents = torch.lerp(latents, noise(latents.shape[1]), sigmas[step + 1])
    return latents


@torch.inference_mode()
def denoise(
    model: ExpertModel,
    scheduler: Any,
    latents: torch.Tensor,
    *,
    on_step: Callable[[], None],
    callback: StepCallback | None = None,
) -> torch.Tensor:
    """Run all of `scheduler`'s timesteps, which are set, from the noise `latents`; fp32 latents.

    `on_step` is called before each step and once after the last. On the CPU a step that gives NaN or infinity raises
    GenerationError at once; on a device the flags stay there and are read after the loop, so that no step waits.
    """
    scheduler.set_begin_index(0)  # else the scheduler searches its timesteps on the device
    timesteps = scheduler.timesteps
    host_timesteps = timesteps.tolist()
    steps = len(host_timesteps)
    at_once = latents.device.type == "cpu"
    finite = torch.ones(steps, latents.shape[0], dtype=torch.bool, device=latents.device)
    shape = latents.shape
    for i in range(steps):
        on_step()
        flow = model(latents, timesteps[i], i)
        latents = scheduler.step(flow, timesteps[i], latents, return_dict=False)[0]
        if callback is not None:
            latents = _called_back(callback, i, timesteps[i], latents, shape)
        torch.all(torch.isfinite(latents).flatten(1), dim=1, out=finite[i])
        if at_once:
            check_finite(finite[: i + 1], host_timesteps)
    on_step()
    check_finite(finite, host_timesteps)
    return latents


def _called_back(
    callback: StepCallback, step: int, timestep: torch.Tensor, latents: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    device = latents.device
    given = callback(step, timestep, {"latents": latents})
    if given is None:
        given = {}
    if not isinstance(given, dict) or given.keys() - {"latents"}:
        found = f"a dict with {', '.join(map(repr, given))}" if isinstance(given, dict) else type(given).__name__
        raise ValueError(f"callback_on_step_end gave {found}; it must give None or {{'latents': …}} and no other key")
    latents = given.get("latents", latents)
    if not isinstance(latents, torch.Tensor) or latents.shape != shape:
        found = list(latents.shape) if isinstance(latents, torch.Tensor) else repr(latents)
        raise ValueError(f"callback_on_step_end gave latents {found}; they must be a tensor of shape {list(shape)}")
    if latents.device != device:
        raise ValueError(f"callback_on_step_end gave latents on {latents.device}; they must stay on {device}")
    return latents.float()


def check_finite(finite: torch.Tensor, host_timesteps: list[float]) -> None:
    """`finite` [steps, rows] on any device; raises GenerationError naming the first step and rows that are not."""
    flags = finite.tolist()
    for i, rows in enumerate(flags):
        if not all(rows):
            bad = ", ".join(str(row) for row, good in enumerate(rows) if not good)
            raise GenerationError(
                f"denoising step {i + 1} of {len(host_timesteps)} (timestep {host_timesteps[i]:g}) gave NaN or "
                f"infinity for prompt(s) {bad}: the weights or the latents are damaged, or the dtype overflows (try "
                "dtype bfloat16 or float32)",
                step=i + 1,
            )
