"""`visual-gen warmup`: which calls it makes for a configuration, and what it says where it can make none."""

import json
from pathlib import Path

import pytest
import torch

from attention_backend import register_backend
from attention_backend.flash_attn4 import CACHE_SWITCH, FlashAttention4Backend
from attention_backend.selection import _classes
from visual_gen.cli import main
from visual_gen.config import load_config
from visual_gen.runtime.warmup import QUERIES, warm_up

CONFIGS = Path(__file__).parents[4] / "configs"
ALL_KEYS = ("all keys", None, False, False)
SMALL = ["generation.height=32", "generation.width=48", "generation.num_frames=9"]  # 18 tokens
MODES = {  # cross_kv → the calls of cross_text: (name, max_seqlen_k, score_mod, return_lse)
    "padded": [ALL_KEYS],
    "packed": [ALL_KEYS, ("packed K/V", 64, False, False)],
    "packed_pad_exact": [
        ALL_KEYS,
        ("packed K/V, repeated key", 64, True, False),
        ("packed K/V with LSE, and merge", 64, False, True),
    ],
}


class StandIn(FlashAttention4Backend):
    name = "stand_in"
    unavailable_reason = classmethod(lambda cls: None)
    unsupported_reasons = classmethod(lambda cls, spec: [])


@pytest.fixture
def stand_in(kernel):
    register_backend(StandIn)
    yield kernel
    del _classes["stand_in"]


def arguments(*settings):
    return [x for setting in settings for x in ("--set", setting)]


@pytest.mark.parametrize("cfg, guidance_scale, batch", [("batched", 4, 2), ("sequential", 4, 1), ("batched", 1, 1)])
@pytest.mark.parametrize("mode", MODES)
def test_every_form_that_a_configuration_can_take_is_called_once(stand_in, mode, cfg, guidance_scale, batch):
    config = load_config(
        CONFIGS / "wan_shapes_t2v.yaml",
        [*SMALL, "device=cpu", "dtype=bfloat16", "attention.self=stand_in", "attention.cross_text=stand_in",
         f"attention.cross_kv={mode}", f"generation.cfg={cfg}", f"generation.guidance_scale={guidance_scale}"],
    )  # fmt: skip
    found = warm_up(config)
    wanted = [("self", *ALL_KEYS), *(("cross_text", *call) for call in MODES[mode])]
    calls = [
        (v.role, v.call, c.get("max_seqlen_k"), c.get("score_mod") is not None, c["return_lse"])
        for v, c in zip(found.variants, stand_in.calls, strict=True)
    ]
    assert calls == wanted
    assert all(v.backend == "stand_in" and v.seconds > 0 for v in found.variants)
    assert found.compile_seconds == sum(v.seconds for v in found.variants)
    for call in stand_in.calls:
        assert call["q"].shape == (batch, QUERIES + 18 % 16, 4, 64) and call["q"].dtype == torch.bfloat16
    assert stand_in.calls[1]["k"].shape[:2] == (batch, 64)


@pytest.mark.parametrize("read, pages", [("auto", False), ("extent", False), ("block_table", True), ("staged", False)])
@pytest.mark.parametrize("guidance_scale, rows", [(4, 2), (1, 1)])
def test_a_stream_is_called_as_over_its_cache(stand_in, read, pages, guidance_scale, rows):
    config = load_config(
        CONFIGS / "wan_shapes_stream.yaml",
        [*SMALL[:2], "device=cpu", "dtype=bfloat16", "attention.self=stand_in", "attention.cross_text=stand_in",
         f"generation.guidance_scale={guidance_scale}", f"causal.read={read}", "causal.block_size=4"],
    )  # fmt: skip
    found = warm_up(config)
    over = f"a KV cache, {'extent' if read == 'auto' else read}"
    assert [(v.role, v.call) for v in found.variants] == [("self", over), ("cross_text", "a text pool")]
    assert all(v.seconds > 0 for v in found.variants)
    over_cache, over_text = stand_in.calls
    queries = QUERIES + 3 * 6 % 16
    for call in stand_in.calls:
        assert call["q"].shape == (rows * queries, 4, 64) and call["cu_seqlens_q"].diff().tolist() == [queries] * rows
    if pages:
        assert over_cache["k"].shape[1] == 4 and over_cache["page_table"].shape == (rows, queries // 4 + 1)
    else:
        assert over_cache["k"].ndim == 3 and over_cache["cu_seqlens_k"] is not None
        assert over_cache["seqused_k"].tolist() == [queries] * rows
    assert over_text["k"].shape == (rows * 64, 4, 64) and over_text["seqused_k"].tolist() == [64] * rows


def test_roles_are_chosen_apart_and_sdpa_needs_nothing(stand_in, capsys):
    settings = ["device=cpu", "attention.cross_text=stand_in", "attention.self=sdpa"]
    path = str(CONFIGS / "wan_shapes_t2v.yaml")
    assert main(["warmup", "--config", path, "--json", *arguments(*SMALL, *settings)]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = {variant["role"]: variant["seconds"] for variant in found["variants"]}
    assert seconds["self"] is None and seconds["cross_text"] > 0
    assert len(stand_in.calls) == 1 and found["compile_seconds"] == seconds["cross_text"]


def test_image_cross_attention_is_called_with_its_own_keys(stand_in):
    config = load_config(
        CONFIGS / "wan2.1_i2v_14b_480p.yaml",
        [*SMALL, "device=cpu", "dtype=bfloat16", "attention.cross_image=stand_in", "attention.cross_kv=packed"],
    )
    assert [v.role for v in warm_up(config).variants if v.seconds is not None] == ["cross_image"]
    assert [call["k"].shape for call in stand_in.calls] == [(2, 257, 40, 128)]


def test_a_machine_without_a_gpu_says_what_it_cannot_do(capsys):
    path = str(CONFIGS / "wan2.1_t2v_14b.yaml")
    if not torch.cuda.is_available():
        assert main(["warmup", "--config", path]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "sdpa: kernels come compiled, nothing was called" in out
        assert "There is no GPU here: the kernels of one are compiled on the machine that has it." in out
        assert main(["warmup", "--config", str(CONFIGS / "wan2.1_t2v_14b_fa4.yaml")]) == 2
        assert "nothing can be compiled here: device is 'cuda'; torch" in capsys.readouterr().err
    assert main(["warmup", "--config", path, *arguments("device=cpu", "attention.self=flash_attn4")]) == 2
    err = capsys.readouterr().err
    assert "nothing can be compiled here: backend 'flash_attn4' cannot serve self attention" in err
    assert "Kernels are compiled on the machine whose card will run them" in err


def test_it_says_whether_compiled_kernels_are_kept(stand_in, monkeypatch, capsys):
    command = ["warmup", "--config", str(CONFIGS / "wan_shapes_t2v.yaml")]
    command += arguments(*SMALL, "device=cpu", "attention.self=stand_in")
    said = []
    for value in ("0", "1"):
        monkeypatch.setenv(CACHE_SWITCH, value)
        assert main(command) == 0
        said.append("keeps compiled kernels in memory only: set " + CACHE_SWITCH + "=1" in capsys.readouterr().out)
    assert said == [True, False]


def test_a_model_that_is_not_known_here_is_bad_input(capsys):
    path = str(CONFIGS / "wan2.1_t2v_14b.yaml")
    assert main(["warmup", "--config", path, *arguments("model={path: a/b}")]) == 2
    assert "there is no such folder here" in capsys.readouterr().err


@pytest.mark.gpu
def test_what_was_warmed_up_is_not_compiled_again(monkeypatch, need_device_of):
    """A request of the warmed configuration reaches the kernel package's compiler no more."""
    need_device_of("flash_attn4")
    import cutlass.cute

    from visual_gen.models.wan import WanTransformer
    from visual_gen.runtime.model import required_model

    settings = ["dtype=bfloat16", "device=cuda", "attention.cross_kv=packed_pad_exact"]
    config = load_config(CONFIGS / "wan_shapes_t2v.yaml", [*settings, "generation.max_sequence_length=512"])
    found = warm_up(config)
    assert [v.backend for v in found.variants] == ["flash_attn4"] * 5
    assert [v.call for v in found.variants[:2]] == ["QK norm and RoPE", "all keys"]
    compile_kernel, compiled = cutlass.cute.compile, []

    def counting_compile(*args, **kwargs):
        compiled.append(args[0])
        return compile_kernel(*args, **kwargs)

    monkeypatch.setattr(cutlass.cute, "compile", counting_compile)
    wan = required_model(config).transformer
    model = WanTransformer(wan, attention=config.attention, dtype=torch.bfloat16, device="cuda")
    latents = torch.zeros(2, wan.in_channels, 9, 12, 12, device="cuda")
    with torch.inference_mode():
        for lens, formulation in (((512, 126), "repeated_key"), ((512, 512), "padded"), ((500, 400), "padded")):
            text_kv = model.project_text(torch.zeros(2, 512, wan.text_dim, device="cuda"), lens)
            assert text_kv.formulation == formulation
            model(latents, torch.tensor([5.0, 5.0], device="cuda"), text_kv=text_kv)
    assert not compiled
