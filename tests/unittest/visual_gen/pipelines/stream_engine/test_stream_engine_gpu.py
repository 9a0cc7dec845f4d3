"""Streams on a device: kernels, graphs, and a host that runs ahead."""

import gc
import time

import pytest
import torch

from visual_gen.models.wan import CausalWanTransformer, WanConfig
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.stream_state import Unread
from visual_gen.pipelines.text import TextRows

pytestmark = pytest.mark.gpu

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32, freq_dim=64, ffn_dim=256,
    num_layers=2, rope_max_seq_len=512,
)  # fmt: skip
SIZE, TEXT_LEN = (20, 24), 16
SETTINGS = {"frames_per_chunk": 2, "sink_frames": 1, "recent_frames": 5, "steps": [1000, 750, 500]}


def encode(prompt):
    n = min(len(prompt.split()) + 1, TEXT_LEN)
    hidden = torch.randn(1, TEXT_LEN, CONFIG.text_dim, generator=torch.Generator().manual_seed(sum(prompt.encode())))
    hidden[:, n:] = 0
    return TextRows(hidden.to("cuda", torch.bfloat16), [n], [0])


@pytest.fixture
def engine(flash_kernel):
    """engine(**options): over a model of one flash kernel, in bf16; compiled: its blocks, from then on."""
    torch.manual_seed(0)
    attention = {"self": flash_kernel, "cross_text": flash_kernel}
    model = CausalWanTransformer(CONFIG, attention=attention, device="cuda", dtype=torch.bfloat16)
    model.requires_grad_(False)

    def make(compiled=False, **options):
        if compiled and not model.blocks_compiled:
            torch._dynamo.reset()
            model.compile_blocks()
        settings = SETTINGS | {name: options.pop(name) for name in ("read", "recent_frames") if name in options}
        given = {"causal": settings, "encode": encode, "text_len": TEXT_LEN, "max_streams": 4, "waiting_chunks": 100}
        return StreamEngine(model, SIZE, **(given | options))

    yield make
    gc.collect()  # engines are cycles, and a graph of theirs must not die in the capture of another test


def latents(engine, chunks):
    while any(stream.chunk_index < chunks for stream in engine.streams):
        engine.step([stream for stream in engine.streams if stream.chunk_index < chunks])
    return [torch.cat(stream.take_latents(), dim=2) for stream in engine.streams]


@pytest.mark.parametrize(
    "read, compiled", [("extent", False), ("block_table", False), ("staged", False), ("extent", True)]
)
@pytest.mark.parametrize("graphs", [False, True])
def test_deterministic_streams_have_the_bits_that_they_have_alone(engine, read, compiled, graphs):
    options = {"read": read, "deterministic": True, "graphs": graphs, "guidance_scale": 3.0, "batch_rows": 5}
    options["compiled"] = compiled
    alone = []
    for i, scale in enumerate((1.0, 3.0, 1.0)):
        single = engine(**options)
        single.open(f"prompt {i}", seed=i, guidance_scale=scale)
        alone += latents(single, 5)
    together = engine(**options)
    for i, scale in enumerate((1.0, 3.0, 1.0)):
        together.open(f"prompt {i}", seed=i, guidance_scale=scale)
        together.step()
    for a, b in zip(alone, latents(together, 5), strict=True):
        assert torch.equal(a, b), (a - b).abs().max()
    assert {forward.read for forward in together.record().timeline} == {read}


@pytest.mark.parametrize("deterministic, count", [(True, 1), (False, 3)], ids=["deterministic", "in buckets"])
def test_few_graphs_serve_all_and_give_the_bits_of_plain_forwards(engine, deterministic, count):
    """Plain forwards of the same rows through the same read, which launch the same kernels on the same shapes."""
    made = []
    for graphs in (False, True):
        streams = engine(graphs=True, deterministic=deterministic)
        streams._run._graphs_wanted = graphs  # without them the rows are filled up as they are with them
        a = streams.open("one", seed=1)
        streams.step()
        streams.open("two", seed=2)
        streams.step(until="chunk")
        a.switch_prompt("three", recache="window")
        streams.open("four", seed=4)
        made.append(latents(streams, 6))
        assert len(streams._run._graphs) == (count if graphs else 0), "one, or buckets of 1, 2 and 4 rows"
    for plain, graphed in zip(*made, strict=True):
        assert torch.equal(plain, graphed), (plain - graphed).abs().max()


def test_sixteen_streams_of_uneven_history_wait_for_nothing_between_forwards(engine, monkeypatch):
    """But for the checks of earlier forwards, which are read while the device has the next one."""
    streams = engine(max_streams=16)
    for i in range(16):
        streams.open(f"prompt {i % 5}", seed=i)
        streams.step()
    for _ in range(30):  # kernels are compiled and windows slide
        streams.step()
    failed = Unread.failed

    def may_wait(unread):
        mode = torch.cuda.get_sync_debug_mode()  # "default" once the steps are over
        torch.cuda.set_sync_debug_mode("default")
        try:
            return failed(unread)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(Unread, "failed", may_wait)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(12):
            streams.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert max(streams.record().batch_sizes) == 16
    for stream in streams.streams:
        assert all(x.isfinite().all() for x in stream.take_latents())


def test_joining_leaving_forking_and_switching_take_little_host_time(engine):
    streams = engine(max_streams=8)
    first = streams.open("one")
    prompts = {prompt: encode(prompt) for prompt in ("two", "three")}
    seconds = {"join": [], "leave": [], "fork": [], "switch": []}
    for i in range(6):
        streams.step([first], until="chunk")
        torch.cuda.synchronize()
        start = time.perf_counter()
        other = streams.open(prompts["two"], seed=i)
        seconds["join"].append(time.perf_counter() - start)
        start = time.perf_counter()
        fork = first.fork()
        seconds["fork"].append(time.perf_counter() - start)
        start = time.perf_counter()
        first.switch_prompt(prompts["three"])
        seconds["switch"].append(time.perf_counter() - start)
        start = time.perf_counter()
        other.close()
        seconds["leave"].append(time.perf_counter() - start)
        fork.close()
    best = {name: min(some) for name, some in seconds.items()}
    assert max(best.values()) < 0.005, best


@pytest.mark.parametrize("read", ["auto", "extent"])
def test_forks_rollbacks_snapshots_and_recaches_on_a_device(engine, tmp_path, read):
    options = {"read": read, "deterministic": True, "rollback_chunks": 1, "recent_frames": 4}
    plain = engine(**options)
    plain.open("one", seed=1)
    (expected,) = latents(plain, 6)
    streams = engine(**options)
    stream = streams.open("one", seed=1)
    (begun,) = latents(streams, 3)
    fork = stream.fork()
    stream.snapshot(tmp_path / "stream.safetensors")
    stream.rollback(1)
    restored = streams.restore(tmp_path / "stream.safetensors")
    made = latents(streams, 6)
    assert torch.equal(torch.cat([begun[:, :, :4], made[0]], dim=2), expected)
    assert torch.equal(made[1], expected[:, :, 6:]) and torch.equal(made[2], expected[:, :, 6:])
    fork.close(), restored.close()
    stream.switch_prompt("two", recache="window")
    assert latents(streams, 8)[0].isfinite().all()


def test_a_seed_means_the_same_noise_as_on_the_cpu(engine):
    """Every step's, of streams that were opened, forked and restored."""
    streams, drawn = engine(), []
    noise = streams._noise
    streams._noise = lambda *args: drawn.append(noise(*args)) or drawn[-1]
    stream = streams.open("one", seed=3)
    latents(streams, 2)
    assert {x.device.type for x in drawn} == {"cuda"} and len(drawn) == 2 * len(SETTINGS["steps"])
    generator = torch.Generator().manual_seed(3)
    for x in drawn:
        assert torch.equal(x.cpu(), torch.randn(x.shape, generator=generator))
    drawn.clear()
    others = [stream.fork(), streams.restore(stream.snapshot())]
    for other in others:
        streams.step([other], until="chunk")
    expected = [torch.randn(x.shape, generator=generator) for x in drawn[:3]]
    for x, y in zip(drawn, expected * 2, strict=True):
        assert torch.equal(x.cpu(), y)


def test_numbers_that_are_not_finite_are_found_one_forward_later(engine, monkeypatch):
    streams = engine()
    good, bad = streams.open("one", seed=1), streams.open("two", seed=2)
    latents(streams, 2)
    run = streams.transformer.run
    monkeypatch.setattr(streams.transformer, "run", lambda x, *rest: run(torch.stack([x[0], x[1] * torch.nan]), *rest))
    streams.step()
    monkeypatch.undo()
    for _ in range(3):
        streams.step()
    events = streams.step()
    assert bad.state == "failed" and bad.frames == 4 and good.state in ("idle", "denoising")
    assert good.chunk_index == 3 and events is not None
    latents(streams, 5)
    assert bad.chunk_index == 5
