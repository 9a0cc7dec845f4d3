import pytest
import torch
from diffusers import WanTransformer3DModel


@pytest.fixture
def make_reference(tmp_path):
    """Builds diffusers' model with random weights in every tensor, norms included, and saves it for ours to load."""

    def make(seed: int = 0, **config) -> tuple[WanTransformer3DModel, str]:
        generator = torch.Generator().manual_seed(seed)
        model = WanTransformer3DModel(**config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            if "norm" in name and name.endswith("weight"):
                value = 1 + 0.2 * noise
            elif parameter.ndim == 1:
                value = 0.1 * noise
            else:
                value = noise / fan_in**0.5
            # Values that bf16 holds exactly, so that a bf16 model's error is its arithmetic alone.
            parameter.copy_(value.to(torch.bfloat16).float())
        folder = tmp_path / f"wan-{seed}"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def make_inputs():
    """Random latents, timesteps and zero-padded text for a batch, as keyword arguments."""

    def make(config, *, latent=(3, 6, 10), text_lens=(5,), text_len=16, per_token=False, image_tokens=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        batch = len(text_lens)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        text = randn(batch, text_len, config.text_dim)
        for b, n in enumerate(text_lens):
            text[b, n:] = 0
        tokens = torch.Size(s // p for s, p in zip(latent, config.patch_size, strict=True)).numel()
        shape = (batch, tokens) if per_token else (batch,)
        inputs = {
            "hidden_states": randn(batch, config.in_channels, *latent),
            "timestep": torch.rand(*shape, generator=generator) * 1000,
            "encoder_hidden_states": text,
        }
        if image_tokens:
            pairs = 2 if config.pos_embed_seq_len else 1
            inputs["encoder_hidden_states_image"] = randn(pairs * batch, image_tokens, config.image_dim)
        return inputs

    return make
