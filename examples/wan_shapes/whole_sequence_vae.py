"""diffusers' Wan VAE run over a whole clip at once, for training.

The VAE's own encode and decode go through the clip in chunks of frames with a cache, which is slow to train through;
called with no cache, its layers silently leave the time resampling out. Here a clip goes through in one pass with the
same result (4e-6 in fp32).
"""

import types

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, WanRMS_norm


def _resample_in_space(module: WanResample, x: torch.Tensor) -> torch.Tensor:
    batch, _, frames, _, _ = x.shape
    x = module.resample(x.transpose(1, 2).flatten(0, 1))
    return x.unflatten(0, (batch, frames)).transpose(1, 2)


def _resample(self: WanResample, x: torch.Tensor, feat_cache=None, feat_idx=None) -> torch.Tensor:
    if feat_cache is not None:
        return WanResample.forward(self, x, feat_cache, feat_idx)
    if self.mode == "upsample3d" and x.shape[2] > 1:
        # The cached path keeps frame 0 out of the time convolution, also out of the context of the frames after it.
        batch, channels, frames, height, width = x[:, :, 1:].shape
        pairs = self.time_conv(x[:, :, 1:]).reshape(batch, 2, channels, frames, height, width)
        doubled = torch.stack((pairs[:, 0], pairs[:, 1]), 3).flatten(2, 3)
        x = torch.cat([x[:, :, :1], doubled], 2)
    x = _resample_in_space(self, x)
    if self.mode == "downsample3d" and x.shape[2] > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], 2)
    return x


def _rms_norm(self: WanRMS_norm, x: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min(1e-12)
    return x * (self.scale / norm).to(x.dtype) * self.gamma.to(x.dtype)


def run_whole_sequences(vae: AutoencoderKLWan, fast_norm: bool = False) -> AutoencoderKLWan:
    """Changes this VAE object so that `encode` and `decode` below hold; its own methods go on working.

    `fast_norm` keeps activations in bf16 through the norms, which saves memory traffic under autocast.
    """
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = types.MethodType(_resample, module)
        elif fast_norm and isinstance(module, WanRMS_norm):
            module.forward = types.MethodType(_rms_norm, module)
    return vae


def encode(vae: AutoencoderKLWan, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance [B, C, F', H/8, W/8] of frames [B, 3, F, H, W] in -1..1, F = 4·F' − 3."""
    mean, log_variance = vae.quant_conv(vae.encoder(frames)).float().chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    """Frames [B, 3, F, H, W], not clamped, of latents as `encode` gives them."""
    return vae.decoder(vae.post_quant_conv(latents)).float()


def psnr_db(frames: torch.Tensor, reconstructed: torch.Tensor) -> torch.Tensor:
    """PSNR [B] of frames [B, 3, F, H, W] in -1..1."""
    error = F.mse_loss(reconstructed.float(), frames.float(), reduction="none").mean((1, 2, 3, 4))
    return 10 * torch.log10(4 / error)
