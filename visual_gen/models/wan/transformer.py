"""The Wan video transformer on the attention layer, for text-to-video and image-to-video shapes.

Shape letters: B batch, C channels, F latent frames, H, W latent height and width, S tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attention_backend.kv_cache import LayerKV
from attention_backend.metadata import host_lens
from visual_gen.compilation import watch_compilation
from visual_gen.models.wan.extra_tokens import ExtraTokens
from visual_gen.models.wan.model import WanModel
from visual_gen.models.wan.text_kv import TextKV, real_rows
from visual_gen.modules.block_causal import BlockMask
from visual_gen.modules.cross_kv import CrossKV
from visual_gen.modules.norms import modulated_layer_norm

GRAPHS = 32  # kinds of calls of a compiled block, with some to spare


class WanTransformer(WanModel):
    """Wan with diffusers' weights and results, one attention backend for each role, and text K/V made once.

    attention: an AttentionConfig, or a mapping with its keys (self, cross_text, cross_image, cross_kv).
    attention_choices says which backend each role took and why. init_weights False leaves the parameters on the meta
    device, without memory, for to_empty and a load. trainable: "auto" takes only backends with gradients.
    blocks_compiled: whether compile_blocks was called. Raises ValueError on settings that do not fit the model,
    AttentionBackendError if a named backend cannot serve its role.
    """

    blocks_compiled = False

    def compile_blocks(self, **options: Any) -> None:
        """torch.compile for every block, whole or not at all; options go to torch.compile.

        Blocks of one shape of input share one graph, those of another model of the same settings too. Prompts of other
        lengths share it if they are projected with fixed_capacity, as they then are where nothing else is said, or lie
        in a TextPool; each formulation of the pad rows has a graph. So have blocks with LoRA, for each kind of layers
        that it covers. Over a KV cache there is a graph for one row and one for several, and each again for every read,
        for chunks with extra tokens, and for given frames; lengths and places have none.
        """
        watch_compilation()
        self.blocks_compiled = True
        # Torch's own 8 are fewer than the kinds of calls that streams make, and one more is an error. For the process,
        # as torch before 2.13 has no limit for one function.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
        for block in self.blocks:
            block.compile(fullgraph=True, **options)

    @property
    def repeats_last_key(self) -> bool:
        """Whether text attention may count one pad row several times, see attention_backend.pad_formulation."""
        return self.blocks[0].cross_text.backend.supports_repeated_last_key()

    def project_text(
        self,
        encoder_hidden_states: torch.Tensor,
        text_lens: Sequence[int] | None = None,
        encoder_hidden_states_image: torch.Tensor | None = None,
        *,
        text_mask: Sequence[Sequence[bool]] | torch.Tensor | None = None,
        text_index: Sequence[int] | None = None,
        fixed_capacity: bool | None = None,
    ) -> TextKV:
        """Text keys and values of all layers, from the real rows and one pad row; needed once for a request.

        encoder_hidden_states [T, L, text_dim]; text_lens: host ints, the real rows of each (None: all L); rows past
        them count as zeros. text_mask [T, L], in its place: True for every real row, in any pattern; the others count
        as zeros; host bools or a tensor on the CPU. text_index: host ints, the text of each batch row (None: B = T,
        each its own); rows that share a text share its projection. encoder_hidden_states_image [B, N, image_dim], for
        models with image inputs. fixed_capacity: packed text lies in buffers whose shapes do not depend on text_lens,
        for compiled or captured steps; it then takes the memory of the padded form. None: if the blocks are compiled.
        Raises ValueError on shapes, lengths and masks that do not fit, and on a mask that only a device knows.
        """
        text = encoder_hidden_states
        if text.ndim != 3 or text.shape[-1] != self.config.text_dim:
            raise ValueError(
                f"encoder_hidden_states has shape {tuple(text.shape)}; expected [B, L, text_dim {self.config.text_dim}]"
            )
        num_texts, padded_len = text.shape[:2]
        if fixed_capacity is None:
            fixed_capacity = self.blocks_compiled
        index = tuple(range(num_texts))
        if text_index is not None:
            index = host_lens("text_index", text_index, num_texts - 1)
        texts = real_rows(text, text_lens, text_mask, self.attention_metadata_state)
        # Row by row, so that a prompt's bits do not depend on the lengths of its neighbours (see make_cross_kv).
        used = sorted(set(index))
        rows = [self.text_embedding(texts[i].to(self.dtype)) for i in used]
        index = tuple(map(used.index, index))
        pad_row = None
        if min(map(len, rows)) < padded_len:
            pad_row = self.text_embedding(rows[0].new_zeros(1, self.config.text_dim))
        layers = tuple(
            block.cross_text.make_cross_kv(rows, padded_len, pad_row, index=index, fixed_capacity=fixed_capacity)
            for block in self.blocks
        )
        image = self._project_image(encoder_hidden_states_image, len(index))
        lens = tuple(len(rows[i]) for i in index)
        return TextKV(lens, len(index), padded_len, self.attention.cross_kv, layers, image)

    def _project_image(self, tokens: torch.Tensor | None, batch: int) -> tuple[CrossKV, ...] | None:
        if (tokens is None) != (self.image_embedding is None):
            if tokens is None:
                raise ValueError("this model attends to image tokens: give encoder_hidden_states_image")
            raise ValueError("encoder_hidden_states_image is given, but this model has no image inputs: leave it out")
        if tokens is None:
            return None
        if tokens.ndim != 3 or tokens.shape[-1] != self.config.image_dim:
            raise ValueError(
                f"encoder_hidden_states_image has shape {tuple(tokens.shape)}; expected [B, N, {self.config.image_dim}]"
            )
        rows = self.image_embedding(tokens.to(self.dtype))
        if rows.shape[0] != batch:
            raise ValueError(f"encoder_hidden_states_image serves {rows.shape[0]} rows, the text {batch}")
        return tuple(CrossKV(*(x.contiguous() for x in block.cross_image.project_kv(rows))) for block in self.blocks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_hidden_states_image: torch.Tensor | None = None,
        text_lens: Sequence[int] | None = None,
        text_kv: TextKV | None = None,
    ) -> torch.Tensor:
        """Predicted flow [B, out_channels, F, H, W] for noisy latents hidden_states [B, in_channels, F, H, W].

        timestep [B], or [B, S] with one for each token (Wan 2.2 TI2V), in 0..1000. Text comes as text_kv, projected
        once by project_text, or as encoder_hidden_states (with text_lens, encoder_hidden_states_image), projected here.
        Raises ValueError on shapes that do not fit, or if both or neither of the two text forms is given.
        """
        frames, height, width = self._check_latents(hidden_states)
        tokens = frames * height * width
        batch = hidden_states.shape[0]
        if tuple(timestep.shape) not in ((batch,), (batch, tokens)):
            raise ValueError(
                f"timestep has shape {tuple(timestep.shape)}; expected [B] = ({batch},) or one for each token, "
                f"[B, S] = ({batch}, {tokens})"
            )
        if (encoder_hidden_states is None) == (text_kv is None):
            raise ValueError("give either encoder_hidden_states or text_kv, not both and not neither")
        if text_kv is None:
            text_kv = self.project_text(encoder_hidden_states, text_lens, encoder_hidden_states_image)
        elif encoder_hidden_states_image is not None or text_lens is not None:
            raise ValueError("text_kv holds text_lens and image tokens already: give them to project_text")
        if text_kv.batch != batch:
            raise ValueError(f"text_kv was projected for {text_kv.batch} rows, hidden_states has {batch}")
        if (len(text_kv.text), text_kv.cross_kv) != (self.config.num_layers, self.attention.cross_kv):
            raise ValueError(
                f"text_kv has {len(text_kv.text)} layers in mode {text_kv.cross_kv!r}, this model has "
                f"{self.config.num_layers} in mode {self.attention.cross_kv!r}: project the text with this model"
            )

        if timestep.stride(0) == 0:
            timestep = timestep[:1]  # expanded over the rows, as pipelines pass it: embed it once for all

        rotary = self._rotary.grid(frames, height, width, hidden_states.device)
        tokens = self._patchify(hidden_states.to(self.dtype))
        x = self._run_blocks(tokens, timestep.view(timestep.shape[0], -1), rotary, text_kv.text, text_kv.image)
        return self._unpatchify(x, frames, height, width)

    def _run_blocks(
        self,
        tokens: torch.Tensor,
        timestep: torch.Tensor,
        rotary: torch.Tensor,
        text: Sequence[CrossKV],
        image: Sequence[CrossKV] | None = None,
        caches: Sequence[LayerKV] | None = None,
        block_mask: BlockMask | None = None,
        extra: ExtraTokens | None = None,
    ) -> torch.Tensor:
        """tokens [N, S, C · patch], timestep [N or 1, S or 1], rotary [S, 1, D / 2H] or [N, S, 1, D / 2H]; text, image
        and caches have one entry for each layer; extra: tokens beside those, rotary then being of all → flow
        [N, S, patch · C]."""
        temb, modulation = self.time_embedding(timestep)
        x = self.patch_embedding(tokens)
        if extra is not None:
            x, temb, modulation = extra.join(x), extra.per_token(temb), extra.per_token(modulation)
        elif self.blocks_compiled:
            x = x.clone()  # a linear layer gives a view, a block does not, and each kind of input has its own graph
        if self.blocks_compiled:
            rotary = torch.view_as_real(rotary)  # Inductor has no complex numbers
        for layer, block in enumerate(self.blocks):
            x = block(
                x, modulation, rotary, text[layer], None if image is None else image[layer],
                cache=None if caches is None else caches[layer], block_mask=block_mask,
            )  # fmt: skip
        shift, scale = (self.scale_shift_table + temb.unsqueeze(2).float()).unbind(2)
        x = modulated_layer_norm(x, scale, shift, self.config.eps)
        return self.proj_out(x if extra is None else extra.part(x))

    def _check_latents(self, latents: torch.Tensor) -> tuple[int, int, int]:
        """The token grid of latents, or ValueError."""
        if latents.ndim != 5 or latents.shape[1] != self.config.in_channels:
            raise ValueError(
                f"hidden_states has shape {tuple(latents.shape)}; expected [B, {self.config.in_channels}, F, H, W]"
            )
        for name, size, patch in zip("FHW", latents.shape[2:], self.config.patch_size, strict=True):
            if size % patch or size < patch:
                raise ValueError(
                    f"latent {name} is {size}, which the patch size {patch} does not divide; the nearest sizes are "
                    f"{max(size // patch, 1) * patch} and {(size // patch + 1) * patch}"
                )
        return tuple(size // patch for size, patch in zip(latents.shape[2:], self.config.patch_size, strict=True))

    def _patchify(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, C, F, H, W] → [B, S, C · patch], channel outermost, as the convolution's kernel is stored."""
        pt, ph, pw = self.config.patch_size
        x = latents.unflatten(4, (-1, pw)).unflatten(3, (-1, ph)).unflatten(2, (-1, pt))
        return x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)

    def _unpatchify(self, x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
        """[B, S, patch · C], channel innermost, → [B, C, F, H, W]."""
        pt, ph, pw = self.config.patch_size
        x = x.unflatten(2, (pt, ph, pw, -1)).unflatten(1, (frames, height, width))
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)
