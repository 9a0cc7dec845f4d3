"""The pipeline's schedulers against diffusers' own."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from visual_gen.checkpoint import CheckpointError, resolve_folder
from visual_gen.pipelines.schedulers import HostCoefficientUniPC, make_scheduler

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def trajectory(scheduler, steps, seed=0):
    """Samples after each step for a model that is linear in the sample."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(2, 4, 2, 3, 3, generator=generator)
    mixing = torch.randn(4, 4, generator=generator) * 0.3
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    samples = []
    for timestep in scheduler.timesteps:
        flow = torch.einsum("ij,bj...->bi...", mixing, sample) - 0.5 * sample
        sample = scheduler.step(flow, timestep, sample, return_dict=False)[0]
        samples.append(sample)
    return torch.stack(samples)


@pytest.mark.parametrize("solver_type", ["bh1", "bh2"])
@pytest.mark.parametrize("solver_order", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_coefficients_on_the_host_give_the_parents_samples(solver_type, solver_order, steps):
    config = {**FLOW, "solver_type": solver_type, "solver_order": solver_order}
    expected = trajectory(UniPCMultistepScheduler(**config), steps)
    samples = trajectory(HostCoefficientUniPC(**config), steps)
    # bh1 multiplies the last step, infinite since its sigma is 0, by a residual of nothing: NaN in the parent alone
    last = -1 if solver_type == "bh1" else None
    torch.testing.assert_close(samples[:last], expected[:last], rtol=0, atol=2e-5)
    assert samples.isfinite().all()


def test_a_disabled_corrector_stays_disabled():
    config = {**FLOW, "disable_corrector": [0, 1]}
    expected = trajectory(UniPCMultistepScheduler(**config), 5)
    assert (trajectory(HostCoefficientUniPC(**config), 5) - expected).abs().max() < 1e-5
    assert (trajectory(HostCoefficientUniPC(**FLOW), 5) - expected).abs().max() > 1e-4


def test_no_coefficient_is_a_tensor(monkeypatch):
    # On a GPU each tensor made for a coefficient, and the solve above all, would make the host wait.
    monkeypatch.setattr(torch.linalg, "solve", lambda *_: pytest.fail("the system was solved on the device"))
    trajectory(HostCoefficientUniPC(**FLOW), 5)


def test_a_scheduler_starts_afresh_after_a_run_that_stopped_half_way():
    scheduler = HostCoefficientUniPC(**FLOW)
    scheduler.set_timesteps(6)
    scheduler.set_begin_index(0)
    for timestep in scheduler.timesteps[:3]:
        scheduler.step(torch.ones(1, 1, 1, 2, 2), timestep, torch.ones(1, 1, 1, 2, 2))
    assert torch.equal(trajectory(scheduler, 5), trajectory(HostCoefficientUniPC(**FLOW), 5))


@pytest.mark.parametrize(
    "stored", [UniPCMultistepScheduler(**FLOW), FlowMatchEulerDiscreteScheduler(shift=3.0)], ids=["unipc", "euler"]
)
@pytest.mark.parametrize("name", [None, "unipc", "euler"])
@pytest.mark.parametrize("flow_shift", [None, 5])
def test_name_and_shift_override_what_a_folder_says(stored, name, flow_shift, tmp_path):
    stored.save_pretrained(tmp_path)
    made = make_scheduler(tmp_path, name, flow_shift)
    euler = (name == "euler") if name else isinstance(stored, FlowMatchEulerDiscreteScheduler)
    shift = flow_shift or 3.0
    if euler:
        expected = FlowMatchEulerDiscreteScheduler(shift=shift)
    else:
        expected = UniPCMultistepScheduler(**{**FLOW, "flow_shift": shift})
    assert isinstance(made, type(expected))
    assert (trajectory(made, 4) - trajectory(expected, 4)).abs().max() < 1e-5


@pytest.mark.parametrize("flow_shift", [0, -3.0, float("nan"), float("inf"), "3", True])
def test_a_shift_that_is_no_positive_number_is_refused(flow_shift):
    with pytest.raises(ValueError, match="flow_shift is"):
        make_scheduler(resolve_folder("wan-shapes") / "scheduler", None, flow_shift)


def test_a_shift_of_numpy_is_a_number():
    made = make_scheduler(resolve_folder("wan-shapes") / "scheduler", None, np.float32(5))
    assert made.config.flow_shift == 5 and type(made.config.flow_shift) is float


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="scheduler is 'ddim'; it must be None .*, 'unipc' or 'euler'"):
        make_scheduler(resolve_folder("wan-shapes") / "scheduler", "ddim")


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"_class_name": "DDIMScheduler"}, "asks for 'DDIMScheduler'; served are"),
        ({"prediction_type": "epsilon"}, "Wan needs prediction_type 'flow_prediction'"),
        ({"use_flow_sigmas": False}, "Wan needs"),
        ({"use_dynamic_shifting": True}, "sets use_dynamic_shifting"),
        ({"flow_shift": None}, "scheduler_config.json .*flow_shift is None"),
        ({"flow_shift": 0}, "scheduler_config.json .*flow_shift is 0"),
        ({"flow_shift": "3"}, "scheduler_config.json .*flow_shift is '3'"),
        ({"num_train_timesteps": 0}, "scheduler_config.json .*num_train_timesteps is 0"),
        ({"solver_type": "magic"}, "scheduler_config.json .*magic"),
        ({"solver_order": 0}, "scheduler_config.json .*solver_order is 0"),
    ],
)
def test_a_folder_whose_scheduler_is_no_wan_scheduler_is_refused(copied, changes, said):
    folder = copied.edit("scheduler/scheduler_config.json", **changes)
    with pytest.raises(CheckpointError, match=said):
        make_scheduler(folder / "scheduler")
