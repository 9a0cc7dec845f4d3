"""What `visual-gen plan` says of causal streams, against the cache that a stream makes."""

import json
from pathlib import Path

import pytest
import torch

from visual_gen.checkpoint import resolve_folder
from visual_gen.cli import main
from visual_gen.config import CausalConfig, RunConfig, load_config
from visual_gen.models.wan import CausalWanTransformer, WanConfig
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.stream_loading import engine_cache
from visual_gen.pipelines.stream_options import EngineOptions
from visual_gen.runtime.costs import activation_bytes, flops, text_write_bytes
from visual_gen.runtime.plan import plan
from visual_gen.runtime.streams import pad_size, stream_size

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = {"frames_per_chunk": 2, "recent_frames": 4}


@pytest.fixture
def planned(tmp_path):
    """planned(causal settings, overrides…) → the plan of wan-shapes with them."""

    def planned(causal, *overrides, memory=None):
        path = tmp_path / "config.yaml"
        settings = {
            "model": {"path": "wan-shapes"},
            "causal": causal,
            "generation": {"height": 96, "width": 96, "max_sequence_length": 64},
        }
        path.write_text(json.dumps(settings))
        return plan(load_config(path, overrides), device_memory_bytes=memory)

    return planned


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sink_frames": 2},
        {"recent_frames": 7},
        {"frames_per_chunk": 3},
        {"first_chunk_frames": 4},
        {"block_size": 5},
        {"read": "staged"},
        {"steps": [1000], "flow_shift": 2.0},
    ],
    ids=str,
)
def test_the_bytes_are_those_of_the_cache_that_a_stream_makes(planned, changes, scale, deterministic):
    given = [f"generation.guidance_scale={scale}", f"stream.deterministic={str(deterministic).lower()}"]
    found, settings = planned(SMALL | changes, *given).stream, CausalConfig(**(SMALL | changes))
    options = EngineOptions(guidance_scale=scale, max_streams=1, deterministic=deterministic)
    config = WanConfig(num_attention_heads=4, attention_head_dim=64, ffn_dim=32, num_layers=8, in_channels=8)
    pads = options.branches if deterministic else 0  # each row may be filled up
    cache = engine_cache(CausalWanTransformer(config), settings, 36, options, pads=pads)
    null_block = cache.memory_bytes - cache.pool.rows.nbytes * cache.free_blocks // (cache.free_blocks + 1)
    null_block -= cache.staging.rows.nbytes if cache.staging else 0
    assert found.kv_cache_bytes == cache.memory_bytes - null_block
    assert found.block_size == cache.block_size
    assert found.chunk_tokens == 36 * settings.max_chunk_frames
    assert found.window_frames == settings.sink_frames + settings.recent_frames
    assert found.timesteps == settings.timesteps
    with cache.open_session(
        sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=options.branches,
        max_chunk_frames=settings.max_chunk_frames, rollback_chunks=options.kept_chunks,
    ) as session, session.begin(1) as chunk:  # fmt: skip
        pad_blocks = pads * pad_size(settings, stream_size(settings, 36, cache.backend), cache.backend).num_blocks
        assert cache.free_blocks == pad_blocks
        assert found.read == cache.batch([chunk]).read == settings.read.replace("auto", "extent")


def test_streams_fit_into_what_the_weights_leave(planned):
    alone = planned(SMALL)
    weights = sum(alone.memory_bytes[name] for name in ("weights", "text_encoder", "vae"))
    assert alone.stream.streams_that_fit is None
    assert planned(SMALL, memory=weights - 1).stream.streams_that_fit == 0
    each = planned(SMALL, memory=weights + 2**40).stream.streams_that_fit
    per_stream = 2**40 // each
    assert planned(SMALL, memory=weights + 5 * per_stream + 1).stream.streams_that_fit in (4, 5)
    assert per_stream > alone.stream.kv_cache_bytes


@pytest.mark.parametrize(
    ("changes", "chunk", "largest", "forwards"),
    [({}, 2, 2, 5), ({"first_chunk_frames": 4}, 2, 4, 5), ({"steps": [1000, 500]}, 2, 2, 3)],
)
def test_what_is_counted_is_a_chunk_with_a_full_window(planned, changes, chunk, largest, forwards):
    found, config = planned(SMALL | changes), RunConfig(model={"path": "wan-shapes"})
    assert (found.num_frames, found.latent_shape, found.tokens) == (4 * chunk, (1, 8, chunk, 12, 12), 36 * chunk)
    assert (found.num_steps, found.rows_per_forward) == (forwards, 2)
    wan = WanConfig.from_folder(resolve_folder("wan-shapes") / "transformer")
    assert found.flops_per_step == flops(wan, 36 * chunk, found.text_lens, 64, config, False, keys=36 * 4)
    assert found.flops_per_step["self_attention"] == 2 * wan.num_layers * 4 * (36 * chunk) * (36 * 4) * wan.hidden_size
    forward = activation_bytes(wan, 2, 36 * largest, torch.float32, on_gpu=True)
    assert found.memory_bytes["activations"] == max(forward, text_write_bytes(wan, 64, torch.float32))
    assert found.memory_bytes["kv_cache"] == found.stream.kv_cache_bytes


def test_each_prompt_is_a_stream(planned):
    one, two = planned(SMALL), planned(SMALL, "generation.prompt=[a red ball, a blue ball]")
    assert two.rows_per_forward == 2 * one.rows_per_forward
    for part in ("kv_cache", "text_kv"):
        assert two.memory_bytes[part] == 2 * one.memory_bytes[part]


@pytest.mark.parametrize("mode", ["padded", "packed"])
def test_the_text_takes_what_an_engine_keeps_for_it(planned, random_causal_folder, mode):
    found = planned(SMALL, f"model.path={random_causal_folder}", f"attention.cross_kv={mode}")
    engine = StreamEngine.from_pretrained(
        random_causal_folder, attention={"cross_kv": mode}, causal=CausalConfig(**SMALL), height=96, width=96,
        max_sequence_length=64, max_streams=1,
    )  # fmt: skip
    pool = engine._texts._pool
    engine.close()
    assert found.text_kv_bytes[mode] == sum(x.nbytes for x in (*pool.keys, *pool.values))
    assert list(found.text_kv_bytes) == ["padded", "packed"]


def test_a_mode_that_streams_refuse_is_refused(planned):
    with pytest.raises(ValueError, match="cross_kv is 'packed_pad_exact', which the causal model does not serve"):
        planned(SMALL, "attention.cross_kv=packed_pad_exact")


def test_without_the_section_there_is_no_stream():
    assert plan(RunConfig(model={"path": "wan-shapes"})).stream is None


@pytest.mark.parametrize(("backend", "dtype", "size"), [("auto", "float32", 16), ("flash_attn4", "bfloat16", 64)])
def test_the_block_size_follows_the_backend_and_the_frame(planned, backend, dtype, size):
    found = planned(SMALL, f"attention.self={backend}", f"dtype={dtype}").stream
    assert found.block_size == size  # 36 tokens a frame


@pytest.mark.parametrize(
    ("capabilities", "read"),
    [({"extent_kv", "paged_kv"}, "extent"), ({"varlen", "paged_kv"}, "block_table"), ({"varlen"}, "staged")],
)
def test_the_read_follows_what_the_backend_can_do(planned, register_narrowed, capabilities, read):
    name = register_narrowed("narrow", capabilities)
    found = planned(SMALL, f"attention.self={name}").stream
    assert (found.read, found.read_reason) == (read, "the first that narrow can do")


def test_a_read_that_the_backend_cannot_do_is_refused(planned, register_narrowed):
    with pytest.raises(ValueError, match="read is 'extent' but narrow reads no extents; read='auto' takes what"):
        planned(SMALL | {"read": "extent"}, f"attention.self={register_narrowed('narrow', {'varlen'})}")


def test_a_read_that_is_named_is_said_to_be(planned):
    found = planned(SMALL | {"read": "block_table"}).stream
    assert (found.read, found.read_reason) == ("block_table", "causal.read")


def test_an_unknown_backend_is_named(planned):
    with pytest.raises(ValueError, match="attention.self = 'sdp': no attention backend 'sdp' .did you mean 'sdpa'"):
        planned(SMALL, "attention.self=sdp")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "stream.yaml"
    path.write_text("model: {path: Wan, preset: wan2.1-t2v-1.3b}\ndtype: bfloat16\ncausal: {recent_frames: 9}\n")
    return str(path)


def test_plan_shows_a_stream_and_how_many_fit(file, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", "--config", file]) == 0
    out = capsys.readouterr().out
    assert "visible latent frames" in out and "4,680 in each row" in out and "give --memory-gib" in out
    assert "832×480, 12 frames, 3 latent" in out and "16 channels, 3 × 60 × 104" in out
    assert "5, the last to commit, with 2 row(s)" in out and "once the window is full" in out
    assert "packed_pad_exact" not in out and "81 frames" not in out and "50 steps" not in out
    assert "in 3 slots of a stream" in out and "KV caches" in out
    assert "extent (the first that paged_flash_attn3 can do)" in out
    assert main(["plan", "--config", file, "--memory-gib", "139", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stream"]["streams_that_fit"] > 10


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "many"])
def test_memory_that_is_none_is_refused(file, capsys, value):
    with pytest.raises(SystemExit):
        main(["plan", "--config", file, f"--memory-gib={value}"])
    assert "--memory-gib" in capsys.readouterr().err


def test_generate_refuses_causal_settings_and_names_the_way(file, capsys):
    assert main(["generate", "--config", file, "--prompt", "a circle"]) == 2
    assert "visual-gen stream" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        *("generation.num_frames=9", "generation.image=a.png", "generation.guidance_scale_2=null"),
        *("offload=experts", "lora=[{path: a.safetensors}]", "causal=null"),
        *("attention.cross_kv=packed_pad_exact", "stream.chunks=100000", "causal.rope_max_seq_len=3"),
    ],
)
def test_all_commands_refuse_what_no_stream_follows_in_the_same_words(override, capsys):
    said = set()
    for command in ("stream", "plan", "warmup"):
        assert main([command, "--config", str(CONFIGS / "wan_shapes_stream.yaml"), "--set", override]) == 2
        said.add(capsys.readouterr().err)
    assert len(said) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("causal.frame_per_chunk=1", "did you mean frames_per_chunk"),
        ("causal.recent_frames=2", "recent_frames of at least 3"),
        ("causal.steps=[1,2]", "noise levels that fall"),
        ("causal.sink_frames=-1", "causal.sink_frames = -1: wants 0 or more"),
        ("causal.block_size=tiny", "causal.block_size"),
        ("frames_per_chunk=3", "did you mean causal.frames_per_chunk"),
    ],
)
def test_bad_settings_are_told_as_all_others(file, override, says):
    with pytest.raises(ValueError, match=says.replace("[", r"\[")):
        load_config(file, [override])


def test_half_the_width_is_half_the_bytes(planned):
    half = planned(SMALL, "dtype=bfloat16", "causal.block_size=16").stream
    assert 2 * half.kv_cache_bytes == planned(SMALL, "causal.block_size=16").stream.kv_cache_bytes
