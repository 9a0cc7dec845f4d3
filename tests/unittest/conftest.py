import json

import pytest

from attention_backend import flash_attn4, paged_flash_attn3
from attention_backend.kernel_probe import device_problem

FLASH_KERNELS = {
    "flash_attn4": flash_attn4.COMPUTE_MAJORS,
    "paged_flash_attn3": paged_flash_attn3.COMPUTE_MAJORS,
}


@pytest.fixture
def need_device_of():
    """need_device_of(a flash kernel's name) skips where no device that it is for is here: only that may be missing."""

    def need(name):
        problem = device_problem(FLASH_KERNELS[name])
        if problem:
            pytest.skip(problem)

    return need


@pytest.fixture(params=FLASH_KERNELS)
def flash_kernel(request, need_device_of):
    """Each flash kernel's name, on the devices that it is for; parametrize it indirectly to have one alone."""
    need_device_of(request.param)
    return request.param


@pytest.fixture(scope="session")
def random_causal_folder(tmp_path_factory):
    """A checkpoint for streams: random weights of the transformer and the VAE, all else is the packaged one's."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel

    from visual_gen.checkpoint import resolve_folder

    folder = tmp_path_factory.mktemp("causal")
    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=128, ffn_dim=64,
        num_layers=1, rope_max_seq_len=64,
    ).save_pretrained(folder / "transformer")  # fmt: skip
    AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 2, 2, 2], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    ).save_pretrained(folder / "vae")
    (folder / "model_index.json").write_text((resolve_folder("wan-shapes") / "model_index.json").read_text())
    (folder / "recommended.json").write_text('{"label": "random weights", "sizes": [[32, 48]]}')
    shared = ["text_encoder", "tokenizer", "scheduler"]
    (folder / "shares.json").write_text(json.dumps(dict.fromkeys(shared, "wan-shapes")))
    return folder


@pytest.fixture
def register_narrowed(monkeypatch):
    """register_narrowed(name, capabilities, block_size=16): sdpa under another name, able to do less."""
    from attention_backend import register_backend, selection
    from attention_backend.sdpa import SDPABackend

    monkeypatch.setattr(selection, "_classes", dict(selection.backend_classes()))

    def register(name, capabilities, block_size=16):
        body = {"name": name, "capabilities": frozenset(capabilities), "preferred_block_size": block_size}
        register_backend(type(name, (SDPABackend,), body))
        return name

    return register
