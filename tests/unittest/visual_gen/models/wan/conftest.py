import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from attention_backend.kv_cache import ContiguousKVCache, PagedKVCache
from visual_gen.models.wan import CausalWanTransformer, WanConfig

DATA = Path(__file__).parents[4] / "data" / "self_forcing"
TINY = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=3, rope_max_seq_len=64,
)  # fmt: skip
TEXT_LEN = 7
LATENT_HW = (4, 6)
FRAME_TOKENS = 6


@dataclass(frozen=True)
class Recording:
    """Inputs, weights and outputs of Self-Forcing's model; see the README beside the files."""

    config: dict
    tensors: dict[str, torch.Tensor]

    @property
    def wan(self) -> WanConfig:
        c = self.config
        return WanConfig(
            num_attention_heads=c["num_heads"], attention_head_dim=c["dim"] // c["num_heads"],
            in_channels=c["channels"], out_channels=c["channels"], text_dim=c["text_dim"], freq_dim=c["freq_dim"],
            ffn_dim=c["ffn_dim"], num_layers=c["num_layers"], patch_size=c["patch_size"], eps=c["eps"],
            cross_attn_norm=c["cross_attn_norm"],
        )  # fmt: skip

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name.removeprefix("weights."): x for name, x in self.tensors.items() if name.startswith("weights.")}


@pytest.fixture(scope="session")
def recordings() -> dict[str, Recording]:
    found = {}
    for name in ("unlimited", "window"):
        with safe_open(DATA / f"self_forcing_{name}.safetensors", framework="pt") as file:
            config = json.loads(file.metadata()["config"])
            found[name] = Recording(config, {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    return found


@pytest.fixture
def make_model():
    """A small causal model whose every parameter counts."""

    def make(config: WanConfig = TINY, seed: int = 0, model_class=CausalWanTransformer, **settings):
        torch.manual_seed(seed)
        model = model_class(config, **settings)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("qk_norm_weight"):
                parameter.data += 0.2 * torch.randn_like(parameter)
        return model if settings.get("trainable") else model.requires_grad_(False)

    return make


@pytest.fixture
def make_gpu_model(make_model):
    """A model of head_dim 64 on the GPU, through one backend, whose weights bf16 holds exactly."""

    def make(backend, dtype=torch.bfloat16):
        config = dataclasses.replace(TINY, attention_head_dim=64, ffn_dim=256)
        model = make_model(config, attention={"self": backend, "cross_text": backend}, device="cuda", dtype=dtype)
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
        return model

    return make


@pytest.fixture
def masked_forward():
    """A bidirectional model's own forward, with frame-by-frame visibility [F, F] put into its self-attention: timesteps
    [R, F]."""

    def forward(model, latents, timesteps, text, visible):
        mask = visible.repeat_interleave(FRAME_TOKENS, 0).repeat_interleave(FRAME_TOKENS, 1)

        class Masked:
            spec = model.blocks[0].self_attn.backend.spec

            def forward(self, q, k, v):
                return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), mask).transpose(1, 2)

        for block in model.blocks:
            block.self_attn.backend = Masked()
        return model(latents, timesteps.repeat_interleave(FRAME_TOKENS, 1), text_kv=text)

    return forward


def text_rows(model, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, TEXT_LEN, model.config.text_dim, generator=generator).to(model.device)


@pytest.fixture
def make_text():
    """Projected text of a prompt for each length, zero-padded to TEXT_LEN."""

    def make(model, lens, seed: int = 0):
        return model.project_text(text_rows(model, len(lens), seed), lens)

    return make


@pytest.fixture
def write_text():
    """Puts a prompt of n rows, as make_text's of one with the seed, into a slot of a pool."""

    def write(model, pool, slot, n, seed: int = 0):
        model.write_text(pool, slot, text_rows(model, 1, seed)[0], n)

    return write


@pytest.fixture
def make_contiguous():
    def make(model, batch, capacity_frames, frame_tokens=FRAME_TOKENS):
        heads = (model.config.num_attention_heads, model.config.attention_head_dim)
        return ContiguousKVCache(
            model.config.num_layers, batch, capacity_frames, frame_tokens, *heads, model.dtype, model.device,
            model.attention_metadata_state,
        )  # fmt: skip

    return make


@pytest.fixture
def make_paged():
    def make(model, frame_tokens=FRAME_TOKENS, num_blocks=200, block_size=4, read="auto", **settings):
        return PagedKVCache(
            model.config.num_layers, model.config.num_attention_heads, model.config.attention_head_dim, frame_tokens,
            num_blocks=num_blocks, block_size=block_size, backend=model.blocks[0].self_attn.backend, dtype=model.dtype,
            device=model.device, read=read, attention_metadata_state=model.attention_metadata_state, **settings,
        )  # fmt: skip

    return make
