"""Causal Wan: the same weights and blocks, a few latent frames at a time over a KV cache.

Shape letters: R rows (sessions' branches), C channels, F latent frames of a row's chunk, H, W latent height and width,
N frames of all rows, S tokens of a frame, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from attention_backend import AttentionBackend
from attention_backend.kv_cache import CachedAttention, KVBatch, KVCacheError
from attention_backend.metadata import host_lens
from visual_gen.config import AttentionConfig
from visual_gen.models.wan.causal_inputs import CausalInputs
from visual_gen.models.wan.config import WanConfig
from visual_gen.models.wan.extra_tokens import ExtraTokens
from visual_gen.models.wan.text_kv import TextKV
from visual_gen.models.wan.text_pool import PooledText, TextPool, check_served, pooled
from visual_gen.models.wan.transformer import WanTransformer
from visual_gen.modules.block_causal import BlockMask


def causal_needs(role: str, attention: AttentionConfig) -> frozenset[str]:
    """What a causal model asks of a role's backend."""
    # Each row reads its prompt where that lies. A backend that is named for self-attention may do without extents: the
    # cache then reads by copies.
    extents = role == "cross_text" or attention.self == "auto"
    return frozenset({"extent_kv"}) if extents else frozenset()


class CausalWanTransformer(WanTransformer):
    """WanTransformer's weights, settings and blocks; self-attention sees a KV cache instead of the whole video.

    Rows of a batch are branches of sessions, each with its own history, frames, timesteps, window and text. Raises
    ValueError on models that cannot run so: image inputs, frames that share tokens, cross_kv "packed_pad_exact".
    """

    def __init__(self, config: WanConfig, **settings) -> None:
        super().__init__(config, **settings)
        self._cached: CachedAttention | None = None
        check_served(self.attention.cross_kv)
        if config.image_dim is not None:
            raise ValueError(
                f"image_dim is {config.image_dim}: models with image inputs are not served chunk by chunk; commit the "
                "latents of the image as the first frame instead"
            )
        if config.patch_size[0] != 1:
            raise ValueError(
                f"patch_size is {config.patch_size}; chunk by chunk, each latent frame needs tokens of its own: (1, …)"
            )

    @property
    def self_attention(self) -> AttentionBackend:
        """The backend that a cache for this model is made with, and read through."""
        return self.blocks[0].self_attn.backend

    @property
    def max_frames(self) -> int:
        """Latent frames that a stream may have: what the rotary table reaches."""
        return self._rotary.max_frames

    def extend_frames(self, count: int) -> None:
        """Lets streams have `count` latent frames, past the checkpoint's rope_max_seq_len too; never fewer than now.

        A table of absolute positions is as exact there as before its old end, and rotations depend on distances alone,
        which a window bounds: only what a stream keeps as sink gets further away than in training. 8 · temporal
        channels bytes a frame.
        """
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"count is {count!r}; it must be an integer of at least 1")
        self._rotary.extend_frames(count)

    def new_text_pool(self, slots: int, text_len: int) -> TextPool:
        """An empty pool for `slots` prompts whose projected text has up to text_len rows."""
        return TextPool(
            self.config, slots, text_len, cross_kv=self.attention.cross_kv, dtype=self.dtype, device=self.device
        )

    @torch.no_grad()
    def write_text(self, pool: TextPool, slot: int, text: torch.Tensor, text_len: int | None = None) -> None:
        """Projects one prompt into a slot of a pool; the slot's old text serves until all layers of the new are there.

        text [L, text_dim]; text_len: its real rows, a host int (None: all L); rows past them count as zeros. The K/V
        are project_text's within rounding, without gradients; their bits depend on this text alone. Waits for the
        device once. Raises ValueError, before anything is written, on a pool of another model, on shapes and lengths
        that do not fit, and on K/V that are not finite.
        """
        self._check_pool("the text pool", pool, "make it with this model's new_text_pool")
        if text.ndim != 2 or text.shape[1] != self.config.text_dim:
            raise ValueError(f"text has shape {tuple(text.shape)}; expected [L, text_dim {self.config.text_dim}]")
        (real,) = host_lens("text_len", [len(text) if text_len is None else text_len], len(text))
        pads = len(text) - real if pool.cross_kv == "padded" else 0
        pool.check_room(slot, real + pads)
        # All pad rows are one vector, which stands behind the real rows in the same products.
        rows = self.text_embedding(F.pad(text[:real].to(self.dtype), (0, 0, 0, min(pads, 1))))
        keys, values = zip(*(block.cross_text.project_kv(rows) for block in self.blocks), strict=True)
        pool.write(slot, keys, values, repeats=max(pads - 1, 0))

    def _needs(self, role: str) -> frozenset[str]:
        return causal_needs(role, self.attention)

    def forward(
        self,
        hidden_states: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        *,
        kv: KVBatch,
        text_kv: PooledText | TextKV,
        extra: Sequence[torch.Tensor | None] | None = None,
    ) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor | list[torch.Tensor], list[torch.Tensor]]:
        """Predicted flow, shaped like hidden_states, of each row's chunk; the chunks' K/V are written into the cache.

        hidden_states [R, C, F, H, W], or a list of [C, F, H, W] where chunks differ in length. timestep in 0..1000:
        [R], or [R, F] with one for each frame, or a list of [F]. kv: the cache's batch of the rows' chunks. text_kv:
        rows of a TextPool, or project_text's of the R rows. Denoising and committing are the same call: afterwards
        chunk.commit() keeps what this forward wrote.

        extra: embedded tokens [a, D] of each row, or None, as many as kv has extra_tokens: frames see them and they see
        what frames see, in this forward alone. With them the result is (flow, what came out for them, [a, D] of each
        row, in front of an output projection of their own).

        A row gives the same bits whoever shares the batch, in a batch of the same total length and through one read
        path. In a batch of another length, or alone, the numbers agree within rounding: the bits of a matrix product
        depend on how many rows it has (on a CPU in fp32, the time embedding's on up to 10 frames).
        Raises ValueError, before anything is written, on shapes that do not fit each other or the cache, and on frames
        past the end of the rotary table.
        """
        grids = self._check_rows(hidden_states)
        inputs = self.prepare(kv, text_kv, grids[0][1:], extra)
        flow = self.run(hidden_states, timestep, inputs)
        return flow if extra is None else (flow, inputs.extra.outputs)

    def prepare(
        self,
        kv: KVBatch,
        text_kv: PooledText | TextKV,
        grid: tuple[int, int],
        extra: Sequence[torch.Tensor | None] | None = None,
    ) -> CausalInputs:
        """What `run` needs beside latents and timesteps, the same for all forwards of a batch's chunks; nothing is
        written. grid: tokens of a frame, vertically and horizontally. Raises ValueError as forward does."""
        height, width = grid
        if kv.frame_tokens != height * width:
            raise ValueError(
                f"a frame of hidden_states has {height * width} tokens; the cache was made for {kv.frame_tokens}"
            )
        if any(kv.extra_tokens) and extra is None:
            raise ValueError(f"the batch has {list(kv.extra_tokens)} extra tokens: give their embeddings as extra")
        self._check_layers(kv)
        self._bind_caches()
        text = pooled(text_kv)
        self._check_text(text, kv.num_rows)
        rotary = self._rotary.frames(kv.frame_runs, height, width, self.device)
        tokens = None
        if extra is not None:
            tokens = ExtraTokens(kv, extra, self.config.hidden_size)
            rotary = tokens.rotary(rotary)
        return CausalInputs(kv, rotary, tuple(text.layers(self.attention_metadata_state, kv.q_lens)), tokens)

    def run(
        self,
        hidden_states: torch.Tensor | Sequence[torch.Tensor],
        timestep: torch.Tensor | Sequence[torch.Tensor],
        inputs: CausalInputs,
    ) -> torch.Tensor | list[torch.Tensor]:
        """`forward` on prepared inputs: device work alone, for which no length is read, so that a graph may hold it."""
        ragged = not isinstance(hidden_states, torch.Tensor)
        grids = self._check_rows(hidden_states)
        frames, (height, width) = [grid[0] for grid in grids], grids[0][1:]
        if frames != list(inputs.kv.frames):
            raise ValueError(
                f"hidden_states has {len(frames)} rows of {frames} frames; the cache's batch has "
                f"{inputs.kv.num_rows} of {list(inputs.kv.frames)}"
            )
        timesteps = _frame_timesteps(timestep, frames, ragged)
        rows = [x.unsqueeze(0) for x in hidden_states] if ragged else [hidden_states]
        tokens = torch.cat([self._frame_tokens(x) for x in rows])
        caches = [inputs.kv.layer(i) for i in range(self.config.num_layers)]
        flow = self._run_blocks(
            tokens, timesteps.unsqueeze(1), inputs.rotary, inputs.text, caches=caches, extra=inputs.extra
        )
        if ragged:
            parts = flow.split(frames)
            return [self._unpatchify(x.flatten(0, 1)[None], len(x), height, width)[0] for x in parts]
        return self._unpatchify(flow.view(len(frames), -1, flow.shape[-1]), frames[0], height, width)

    def forward_masked(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        *,
        block_mask: BlockMask,
        text_kv: TextKV,
        clean: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Predicted flow of whole videos under a block-causal mask, without a cache: what training runs.

        hidden_states [R, C, F, H, W]; timestep [R] or [R, F]. clean, like hidden_states: the teacher's frames, which
        stand before the noisy ones at timestep 0; the flow of the noisy ones is returned. block_mask:
        diffusion_forcing_mask, or teacher_forcing_mask with clean. text_kv: project_text's of the R rows.
        Differentiable in weights and inputs for a model made with trainable=True. Raises ValueError on shapes that do
        not fit.
        """
        grid = frames, height, width = self._check_latents(hidden_states)
        batch = hidden_states.shape[0]
        timesteps = _frame_timesteps(timestep, [frames] * batch, False).view(batch, frames)
        videos, runs = [hidden_states], [(0, frames)]
        if clean is not None:
            if clean.shape != hidden_states.shape:
                raise ValueError(f"clean has shape {tuple(clean.shape)}, hidden_states {tuple(hidden_states.shape)}")
            videos, runs = [clean, hidden_states], runs * 2
            timesteps = torch.cat([torch.zeros_like(timesteps), timesteps], dim=1)
        length = len(videos) * grid[0] * height * width
        if block_mask.seq_lengths != (length, length):
            what = "hidden_states has" if clean is None else "clean and hidden_states have"
            raise ValueError(f"block_mask is for {block_mask.seq_lengths[0]} tokens; {what} {length}")
        text = pooled(text_kv)
        self._check_text(text, batch)
        tokens = torch.cat([self._frame_tokens(x).unflatten(0, (batch, frames)) for x in videos], dim=1)
        rotary = self._rotary.frames(runs * batch, height, width, hidden_states.device)
        layers = text.layers(self.attention_metadata_state, [length] * batch)
        flow = self._run_blocks(tokens.flatten(0, 1), timesteps.reshape(-1, 1), rotary, layers, block_mask=block_mask)
        noisy = flow.unflatten(0, (batch, -1))[:, -frames:]
        return self._unpatchify(noisy.flatten(1, 2), frames, height, width)

    def _frame_tokens(self, latents: torch.Tensor) -> torch.Tensor:
        """[R, C, F, H, W] → [R · F, S, C · patch] in the model's dtype."""
        frames = latents.shape[2]
        return self._patchify(latents.to(self.dtype)).unflatten(1, (frames, -1)).flatten(0, 1)

    def _check_rows(self, hidden_states: torch.Tensor | Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """The token grid of each row, or ValueError."""
        if not len(hidden_states):
            raise ValueError("hidden_states is empty; give latents for each row")
        if isinstance(hidden_states, torch.Tensor):
            return [self._check_latents(hidden_states)] * len(hidden_states)
        grids = [self._check_latents(x.unsqueeze(0)) for x in hidden_states]
        if len({grid[1:] for grid in grids}) != 1:
            raise ValueError(f"latents of one batch have the token grids {grids}; height and width must be equal")
        return grids

    def _check_layers(self, kv: KVBatch) -> None:
        self._check_form("the cache", kv.layer(0).k, "make the cache from the model's settings")
        kv.layer(self.config.num_layers - 1)
        try:
            kv.layer(self.config.num_layers)
        except KVCacheError:
            return
        raise ValueError(f"the cache has more layers than the {self.config.num_layers} of this model: make its own")

    def _check_form(self, what: str, k: torch.Tensor, way_out: str) -> None:
        heads = (self.config.num_attention_heads, self.config.attention_head_dim)
        found = (tuple(k.shape[-2:]), k.dtype, k.device)
        if found != (heads, self.dtype, self.device):
            raise ValueError(
                f"{what} holds heads, head_dim {found[0]} in {found[1]} on {found[2]}; this model has {heads} in "
                f"{self.dtype} on {self.device}: {way_out}"
            )

    def _bind_caches(self) -> None:
        """Gives each self-attention site what reads a cache through the backend that it has now. Made here, as looking
        a backend up is not for a compiled block."""
        for block in self.blocks:
            site = block.self_attn
            if site.cached is not None and site.cached.backend is site.backend:
                continue  # as in every forward but the first, and setting a module's attribute is slow
            if self._cached is None or self._cached.backend is not site.backend:
                self._cached = CachedAttention(site.backend)
            site.cached = self._cached

    def _check_text(self, text: PooledText, rows: int) -> None:
        if len(text.slots) != rows:
            raise ValueError(f"text_kv has {len(text.slots)} rows, hidden_states {rows}")
        self._check_pool("text_kv", text.pool, "project the text with this model")

    def _check_pool(self, what: str, pool: TextPool, way_out: str) -> None:
        if (len(pool.keys), pool.cross_kv) != (self.config.num_layers, self.attention.cross_kv):
            raise ValueError(
                f"{what} has {len(pool.keys)} layers in mode {pool.cross_kv!r}, this model has "
                f"{self.config.num_layers} in mode {self.attention.cross_kv!r}: {way_out}"
            )
        self._check_form(what, pool.keys[0], way_out)


def _frame_timesteps(timestep: torch.Tensor | Sequence[torch.Tensor], frames: list[int], ragged: bool) -> torch.Tensor:
    """One timestep for each frame of all rows, fp32 [N]."""
    if not isinstance(timestep, torch.Tensor):
        found = [tuple(x.shape) for x in timestep]
        if found != [(n,) for n in frames]:
            raise ValueError(f"timestep has shapes {found}; expected one for each frame, {[(n,) for n in frames]}")
        return torch.cat([x.float() for x in timestep])
    if timestep.shape == (len(frames),):
        return torch.cat([x.expand(n) for x, n in zip(timestep.float(), frames, strict=True)])
    if not ragged and timestep.shape == (len(frames), frames[0]):
        return timestep.float().flatten()
    expected = f"[R] = ({len(frames)},)" + ("" if ragged else f" or [R, F] = ({len(frames)}, {frames[0]})")
    raise ValueError(f"timestep has shape {tuple(timestep.shape)}; expected {expected}")
