"""Two transformers: which of them each step takes, what stays in memory, and how they change places."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.experts import HOST, Experts

SMALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 24}
DEVICE = torch.device("meta")  # of the stand-ins below; nothing is computed on it


def run(pipe, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    return pipe("a red circle", generator=generator, progress=False, **{**SMALL, "output_type": "latent", **settings})


class Weight:
    """Stands in for a tensor, in host memory or on a device; counts those that there are on the device."""

    alive = weakref.WeakSet()
    most_on_device = 0

    def __init__(self, value, device):
        self.value, self.device = value, device
        Weight.alive.add(self)
        Weight.most_on_device = max(Weight.most_on_device, sum(w.device == DEVICE for w in Weight.alive))

    def to(self, device):
        return self if device == self.device else Weight(self.value, device)

    def copy_(self, other):
        self.value = other.value
        return self


class Model:
    def __init__(self, name, device=DEVICE, count=5):
        self.weights = [SimpleNamespace(data=Weight(f"{name}{i}", device)) for i in range(count)]

    def parameters(self):
        return iter(self.weights)

    @property
    def device(self):
        return self.weights[0].data.device

    @property
    def places(self):
        return [weight.data.device for weight in self.weights]

    def holds(self, name):
        return [weight.data.value for weight in self.weights] == [f"{name}{i}" for i in range(len(self.weights))]


@pytest.fixture
def resting():
    """Two stand-ins, loaded as one_on_device loads them."""
    Weight.alive.clear()
    Weight.most_on_device = 0
    names = {"transformer": "a", "transformer_2": "b"}
    return Experts.load(lambda name: Model(names[name]), tuple(names), 875.0, one_on_device=True)


def test_only_one_lies_on_the_device_at_any_time(resting):
    a, b = resting.transformers
    assert (set(a.places), set(b.places)) == ({DEVICE}, {HOST})
    for index in (0, 1, 1, 0, 1):
        with resting.use(index) as model:
            assert model is resting.transformers[index] and set(model.places) == {DEVICE}
            assert set(resting.transformers[1 - index].places) == {HOST}
        assert a.holds("a") and b.holds("b")
    assert resting.exchanges == 3
    assert Weight.most_on_device == 6  # five weights, and the one that has just come


def test_host_memory_that_one_leaves_is_taken_by_the_other(resting):
    left = {id(weight.data) for weight in resting.transformers[1].weights}
    with resting.use(1):
        assert {id(weight.data) for weight in resting.transformers[0].weights} == left


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("operation", ["to", "copy_"])
@pytest.mark.parametrize("wanted_then", [0, 1])
def test_an_interrupted_exchange_loses_nothing(resting, monkeypatch, at, operation, wanted_then):
    original, calls = getattr(Weight, operation), []

    def interrupted(self, other):
        calls.append(self)
        if len(calls) == at + 1:
            raise KeyboardInterrupt
        return original(self, other)

    with monkeypatch.context() as patch:
        patch.setattr(Weight, operation, interrupted)
        with pytest.raises(KeyboardInterrupt), resting.use(1):
            pytest.fail("it was not interrupted")
    for index in (wanted_then, 1 - wanted_then):
        with resting.use(index) as model:
            assert set(model.places) == {DEVICE} and set(resting.transformers[1 - index].places) == {HOST}
        assert resting.transformers[0].holds("a") and resting.transformers[1].holds("b")


def test_a_call_that_needs_the_other_waits_until_the_one_in_use_is_left(resting):
    order = []

    def need_the_other():
        with resting.use(1):
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with resting.use(0) as model:
            waiting = pool.submit(need_the_other)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.1)
            assert set(model.places) == {DEVICE}
            with resting.use(0):  # the same thread may, as a callback's own call does
                order.append("one")
        waiting.result(timeout=10)
    assert order == ["one", "other"]


def test_without_the_setting_nothing_moves():
    models = [Model("a"), Model("b")]
    experts = Experts(models, 875.0)
    with experts.use(1) as model:
        assert model is models[1] and set(models[0].places) == set(models[1].places) == {DEVICE}
    assert experts.exchanges == 0


@pytest.mark.parametrize("timestep, index", [(1000, 0), (875.5, 0), (875.0, 0), (874.99, 1), (0, 1)])
def test_the_second_serves_what_is_below_the_boundary(timestep, index):
    assert Experts([Model("a"), Model("b")], 875.0).index(timestep) == index
    assert Experts([Model("a")]).index(timestep) == 0


def test_each_step_runs_the_expert_of_its_timestep(opened, monkeypatch):
    pipe, ran = opened("t2v_a14b"), []
    for index, transformer in enumerate((pipe.transformer, pipe.transformer_2)):
        forward = transformer.forward
        monkeypatch.setattr(
            transformer, "forward",
            lambda x, t, text_kv, index=index, forward=forward: ran.append(index) or forward(x, t, text_kv=text_kv),
        )  # fmt: skip
    record = run(pipe).record
    assert record.expert_steps == ran == [int(timestep < 875) for timestep in record.timesteps]
    assert 0 < sum(ran) < 4
    assert record.settings["guidance_scale_2"] == 5.0


def test_the_boundary_may_be_another_than_the_folders(member):
    pipe = WanPipeline.from_pretrained(member("t2v_a14b"), boundary_ratio=0.6, progress=False)
    record = run(pipe).record
    assert (
        record.expert_steps
        == [int(timestep < 600) for timestep in record.timesteps]
        != [int(timestep < 875) for timestep in record.timesteps]
    )


@pytest.mark.parametrize("cfg, both, one", [("batched", 1, 1), ("sequential", 2, 1)])
def test_guidance_1_of_the_second_expert_runs_one_branch(opened, cfg, both, one):
    record = run(opened("t2v_a14b"), guidance_scale=3.0, guidance_scale_2=1.0, cfg=cfg).record
    second = sum(record.expert_steps)
    assert record.transformer_forwards == both * (4 - second) + one * second


def test_text_keys_and_values_of_the_first_are_gone_when_the_second_makes_its_own(opened, monkeypatch):
    pipe, kept = opened("t2v_a14b"), []

    def watched(transformer):
        project = transformer.project_text

        def project_text(*args, **kwargs):
            assert all(text_kv() is None for text_kv in kept)
            text_kv = project(*args, **kwargs)
            kept.append(weakref.ref(text_kv))
            return text_kv

        return project_text

    for transformer in (pipe.transformer, pipe.transformer_2):
        monkeypatch.setattr(transformer, "project_text", watched(transformer))
    run(pipe)
    assert len(kept) == 2


def test_a_scale_for_the_second_without_guidance_is_warned_about(opened):
    record = run(opened("t2v_a14b"), guidance_scale=1.0, guidance_scale_2=3.0).record
    assert any("guidance_scale_2 has no effect: guidance_scale 1.0 runs no second" in w for w in record.warnings)


def test_threads_share_two_experts(opened):
    pipe = opened("t2v_a14b")
    alone = [run(pipe, seed).frames for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(run, pipe, seed) for seed in range(3)]
    for call, expected in zip(calls, alone, strict=True):
        assert (call.result().frames - expected).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["t2v_a14b", "i2v_a14b"])
def test_experts_that_take_turns_on_a_gpu_give_the_same_bits(member, pictures, name):
    image = {"image": pictures.first} if name == "i2v_a14b" else {}
    frames = {}
    for offload in ("none", "experts"):
        pipe = WanPipeline.from_pretrained(
            member(name), dtype=torch.bfloat16, device="cuda", offload=offload, progress=False
        )
        runs = [run(pipe, output_type="np", **image) for _ in range(2)]
        assert np.array_equal(runs[0].frames, runs[1].frames)
        frames[offload] = runs[0].frames
        exchanges = [output.record.expert_exchanges for output in runs]
        assert exchanges == ([1, 2] if offload == "experts" else [0, 0])
        devices = [{p.device.type for p in t.parameters()} for t in pipe.experts.transformers]
        assert devices == ([{"cpu"}, {"cuda"}] if offload == "experts" else [{"cuda"}, {"cuda"}])
    assert np.array_equal(frames["none"], frames["experts"])
