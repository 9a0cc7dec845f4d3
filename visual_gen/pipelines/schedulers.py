"""The schedulers a Wan pipeline steps with: diffusers' own, made from what a checkpoint's folder says."""

from __future__ import annotations

import copy
import math
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan.layouts import read_config

SCHEDULER_NAMES = {"UniPCMultistepScheduler": "unipc", "FlowMatchEulerDiscreteScheduler": "euler"}


class HostCoefficientUniPC(UniPCMultistepScheduler):
    """diffusers' UniPC with the coefficients of each update worked out on the host.

    The parent builds them from tensors on the samples' device and solves a small linear system there, which makes the
    host wait for the GPU in every step. They depend on the sigmas alone, so here they are Python numbers. Formulas:
    UniPC (https://arxiv.org/abs/2302.04867), data prediction, as in the parent.
    """

    def _coefficients(self, s0: int, order: int) -> tuple[float, float, float, np.ndarray, np.ndarray, np.ndarray]:
        """For the update from sigma index s0 to s0 + 1: the weights of x and m0, that of the residual, the ratios
        r_k, and the system (R, b) whose solution weighs the residual's terms."""
        sigmas = self.sigmas[max(s0 - order + 1, 0) : s0 + 2].double().numpy()[::-1]  # s0 + 1, s0, s0 - 1, …
        with np.errstate(divide="ignore", invalid="ignore"):  # the last sigma is 0 and its lambda infinite
            lambdas = np.log1p(-sigmas) - np.log(sigmas)
            h = lambdas[0] - lambdas[1]
            ratios = np.append((lambdas[2 : order + 1] - lambdas[1]) / h, 1.0)
            phi_1 = np.expm1(-h)
            b_h = -h if self.config.solver_type == "bh1" else phi_1
            phi, factorial, b = phi_1 / -h - 1, 1, []
            for i in range(1, order + 1):
                b.append(phi * factorial / b_h)
                factorial *= i + 1
                phi = phi / -h - 1 / factorial
        alpha_t = 1.0 - sigmas[0]
        powers = np.stack([ratios**i for i in range(order)])
        return sigmas[0] / sigmas[1], -alpha_t * phi_1, -alpha_t * b_h, ratios, powers, np.array(b)

    def _residual(self, weights: np.ndarray, ratios: np.ndarray) -> torch.Tensor | None:
        m0, total = self.model_outputs[-1], None
        for k, (weight, ratio) in enumerate(zip(weights, ratios, strict=True)):
            term = (self.model_outputs[-(k + 2)] - m0).mul_(float(weight / ratio))
            total = term if total is None else total.add_(term)
        return total

    def multistep_uni_p_bh_update(
        self, model_output: torch.Tensor, *args: Any, sample: torch.Tensor, order: int, **kwargs: Any
    ) -> torch.Tensor:
        c_x, c_m0, c_res, ratios, powers, b = self._coefficients(self.step_index, order)
        # the published short cut for order 2
        weights = np.array([0.5]) if order == 2 else np.linalg.solve(powers[:-1, :-1], b[:-1])
        out = (sample * float(c_x)).add_(self.model_outputs[-1], alpha=float(c_m0))
        residual = self._residual(weights, ratios[:-1])
        return out if residual is None else out.add_(residual, alpha=float(c_res))

    def multistep_uni_c_bh_update(
        self,
        this_model_output: torch.Tensor,
        *args: Any,
        last_sample: torch.Tensor,
        this_sample: torch.Tensor,
        order: int,
        **kwargs: Any,
    ) -> torch.Tensor:
        c_x, c_m0, c_res, ratios, powers, b = self._coefficients(self.step_index - 1, order)
        weights = np.array([0.5]) if order == 1 else np.linalg.solve(powers, b)
        m0 = self.model_outputs[-1]
        out = (last_sample * float(c_x)).add_(m0, alpha=float(c_m0))
        correction = (this_model_output - m0).mul_(float(weights[-1]))
        residual = self._residual(weights[:-1], ratios[:-1])
        return out.add_(correction if residual is None else correction.add_(residual), alpha=float(c_res))


def check_flow_shift(flow_shift: float | None, *, allow_none: bool = True) -> None:
    """Raise ValueError unless `flow_shift` is None or a finite number above 0."""
    if flow_shift is None and allow_none:
        return
    if isinstance(flow_shift, bool) or not isinstance(flow_shift, Real):
        raise ValueError(f"flow_shift is {flow_shift!r}; it must be a number above 0 (Wan: 3 at 480p, 5 at 720p)")
    if not math.isfinite(flow_shift) or flow_shift <= 0:
        raise ValueError(f"flow_shift is {flow_shift}; it must be finite and above 0 (Wan: 3 at 480p, 5 at 720p)")


def make_scheduler(
    folder: Path, name: str | None = None, flow_shift: float | None = None
) -> HostCoefficientUniPC | FlowMatchEulerDiscreteScheduler:
    """The scheduler that `folder`/scheduler_config.json describes, or another by `name`, with its shift or another.

    name: None, "unipc" or "euler". flow_shift: None keeps the folder's. Raises ValueError on anything else, and
    CheckpointError (a ValueError) on a folder whose scheduler does not do flow matching or cannot be made.
    """
    if name is not None and name not in SCHEDULER_NAMES.values():
        raise ValueError(f"scheduler is {name!r}; it must be None (what the checkpoint says), 'unipc' or 'euler'")
    check_flow_shift(flow_shift)
    path = folder / "scheduler_config.json"
    config = read_config(folder, path.name)
    stored = config.get("_class_name")
    if stored not in SCHEDULER_NAMES:
        raise CheckpointError(
            f"{path} asks for {stored!r}; served are {' and '.join(SCHEDULER_NAMES)}: use one of them as the scheduler"
        )
    if stored == "UniPCMultistepScheduler":
        flow = {key: config.get(key) for key in ("prediction_type", "use_flow_sigmas", "predict_x0")}
        if flow != {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "predict_x0": True}:
            raise CheckpointError(
                f"{path} has {flow}; Wan needs prediction_type 'flow_prediction' with use_flow_sigmas and predict_x0: "
                "use the scheduler folder of a Wan checkpoint"
            )
    unserved = [key for key in ("use_dynamic_shifting", "solver_p", "stochastic_sampling") if config.get(key)]
    if unserved:
        raise CheckpointError(f"{path} sets {', '.join(unserved)}, which this pipeline does not serve: remove it")
    shift = flow_shift if flow_shift is not None else config.get("flow_shift", config.get("shift", 1.0))
    try:
        check_flow_shift(shift, allow_none=False)
        made = _from_config(config, name or SCHEDULER_NAMES[stored], float(shift))
        copy.deepcopy(made).set_timesteps(2)
    except Exception as error:  # whatever diffusers meets in values of another kind
        raise CheckpointError(f"{path} describes no scheduler that can be made ({error}): download it again") from error
    return made


def _from_config(config: dict, name: str, shift: float) -> HostCoefficientUniPC | FlowMatchEulerDiscreteScheduler:
    for key, default in (("num_train_timesteps", 1000), ("solver_order", 2)):
        value = config.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key} is {value!r}; it must be an integer of at least 1")
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler.from_config(config, shift=shift)
    return HostCoefficientUniPC.from_config(
        config, flow_shift=shift, prediction_type="flow_prediction", use_flow_sigmas=True
    )
