"""Our attention under diffusers' own Wan pipelines: `use(pipe, {"cross_kv": "packed_pad_exact"})`.

Shape letters: B batch, S tokens, L text length, C width, H heads, D head_dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor

from attention_backend import AttentionBackend, AttentionMetadataState, AttentionSpec, Selection, select_backend
from visual_gen.config import AttentionConfig, attention_config
from visual_gen.modules.attention import Attention
from visual_gen.modules.cross_kv import CROSS_KV_NEEDS, CrossKV
from visual_gen.modules.rope import apply_rotary

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")
MAX_TEXTS = 8  # whose lengths are remembered: a pipeline's two branches, and those of a few others
TEXT_ROWS = 512  # what diffusers takes the text's length to be where image tokens stand before it


def use(pipe: Any, config: AttentionConfig | dict | None = None) -> InUse:
    """Puts our backends under the transformers of a diffusers Wan pipeline, which otherwise stays as it is.

    config: the keys of AttentionConfig (self, cross_text, cross_image, cross_kv). "padded" and "packed_pad_exact" give
    the video that the pipeline gave before, to rounding; "packed" another one. In the packed modes a prompt's length is
    read from the zero rows behind its embeddings, once for a tensor of embeddings.

    Returns what takes it off again: `.undo()`, or the end of a `with`; `.choices` says which backend each role took and
    why. Raises ValueError on a pipeline or a transformer that is not known or has other attention processors already,
    AttentionBackendError if a named backend cannot serve: nothing is changed then.
    """
    config = attention_config(config)
    if type(pipe).__name__ not in PIPELINES:
        raise ValueError(f"pipe is a {type(pipe).__name__}; served are diffusers' {', '.join(PIPELINES)}")
    found = {name: getattr(pipe, name, None) for name in ("transformer", "transformer_2")}
    transformers = {name: model for name, model in found.items() if model is not None}
    if not transformers:
        raise ValueError("the pipeline has no transformer: load one")
    for name, model in transformers.items():
        _check(name, model, config)
    return InUse([_Transformer(model, config) for model in transformers.values()])


def _check(name: str, model: Any, config: AttentionConfig) -> None:
    if type(model) is not WanTransformer3DModel:
        raise ValueError(f"pipe.{name} is a {type(model).__name__}; only WanTransformer3DModel is served")
    if model.config.image_dim is None and config.cross_image != "auto":
        raise ValueError(f"cross_image is {config.cross_image!r}, but pipe.{name} has no image tokens: leave it out")
    for attention in _attentions(model):
        if type(attention.processor) is not WanAttnProcessor:
            raise ValueError(
                f"pipe.{name} has the attention processor {type(attention.processor).__name__}: take it off first "
                "(`undo()` where it is from here)"
            )
        if attention.processor._parallel_config is not None:
            raise ValueError(f"pipe.{name} runs context-parallel, which our backends do not do under diffusers")


def _attentions(model: WanTransformer3DModel) -> list[WanAttention]:
    return [attention for block in model.blocks for attention in (block.attn1, block.attn2)]


class InUse:
    """Our attention in a pipeline, until `undo` or the end of a `with`."""

    def __init__(self, transformers: Sequence[_Transformer]) -> None:
        self._transformers = list(transformers)
        self._choices = self._transformers[0].choices
        for transformer in self._transformers:
            transformer.install()

    @property
    def choices(self) -> dict[str, Selection]:
        """Role → the backend taken (`name`) and the reasons (`why`)."""
        return self._choices

    def undo(self) -> None:
        """Gives every attention its own processor back; nothing on a second call."""
        while self._transformers:
            self._transformers.pop().remove()

    def __enter__(self) -> InUse:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()


class _Transformer:
    """What the processors of one transformer share: backends, metadata, and the text of the forward that runs."""

    def __init__(self, model: WanTransformer3DModel, config: AttentionConfig) -> None:
        self.model, self.config = model, config
        self.state = AttentionMetadataState()
        self.text_lens: tuple[int, ...] = ()
        self.choices: dict[str, Selection] = {}
        self._backends: dict[tuple, AttentionBackend] = {}
        self._arrangers: dict[AttentionBackend, Attention] = {}
        self._lens: list[tuple[weakref.ref[torch.Tensor], int, tuple[int, ...]]] = []  # of the last texts
        self._rotary: tuple[torch.Tensor, torch.Tensor] | None = None
        weight = model.blocks[0].attn1.to_q.weight
        roles = ["self", "cross_text"] + (["cross_image"] if model.config.image_dim is not None else [])
        for role in roles:  # a backend that cannot serve says so now
            self.backend(role, weight.dtype, weight.device)

    def install(self) -> None:
        self._before = [(attention, attention.processor) for attention in _attentions(self.model)]
        for attention, _ in self._before:
            attention.set_processor(_Processor(self))
        self._hook = self.model.register_forward_pre_hook(self._note_text, with_kwargs=True)

    def remove(self) -> None:
        self._hook.remove()
        for attention, processor in self._before:
            attention.set_processor(processor)

    def backend(self, role: str, dtype: torch.dtype, device: torch.device) -> AttentionBackend:
        """Chosen once for each place that the model's rows turn up in."""
        key = (role, dtype, device)
        if key not in self._backends:
            needs = CROSS_KV_NEEDS[self.config.cross_kv] if role == "cross_text" else frozenset()
            heads, head_dim = self.model.config.num_attention_heads, self.model.config.attention_head_dim
            spec = AttentionSpec(role, heads, head_dim, dtype, device, needs=needs)
            self._backends[key] = select_backend(getattr(self.config, role), spec)
        self.choices[role] = self._backends[key].selection
        return self._backends[key]

    def arranger(self, backend: AttentionBackend) -> Attention:
        """Our text site without memory: it arranges and attends to keys and values that diffusers' layers projected."""
        if backend not in self._arrangers:
            config = self.model.config
            heads, head_dim = config.num_attention_heads, config.attention_head_dim
            with torch.device("meta"):
                self._arrangers[backend] = Attention(
                    heads * head_dim, heads, head_dim, role="cross_text", backend=backend,
                    attention_metadata_state=self.state, cross_kv=self.config.cross_kv, eps=config.eps,
                )  # fmt: skip
        return self._arrangers[backend]

    def rotary(self, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """diffusers' table [1, S, 1, D], each angle twice, as e^(i·angle) [S, 1, D / 2], once for all layers."""
        if self._rotary is None or self._rotary[0] is not cosines:
            self._rotary = cosines, torch.complex(cosines[0, ..., ::2].float(), sines[0, ..., 1::2].float())
        return self._rotary[1]

    def _note_text(self, model: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Before each forward: the lengths of its texts, where the mode needs them."""
        if self.config.cross_kv == "padded":
            return
        text = kwargs["encoder_hidden_states"] if "encoder_hidden_states" in kwargs else args[2]
        self.text_lens = self._known_lens(text)

    def _known_lens(self, text: torch.Tensor) -> tuple[int, ...]:
        if text.is_inference():  # in that mode it could change unseen
            return _real_rows(text)
        for known, version, lens in self._lens:
            if known() is text and version == text._version:
                return lens
        lens = _real_rows(text)
        self._lens = [(weakref.ref(text), text._version, lens), *self._lens[: MAX_TEXTS - 1]]
        return lens


def _real_rows(text: torch.Tensor) -> tuple[int, ...]:
    """The number of rows [B, L, C] in front of the zero ones at the end, at least one. Waits for the device."""
    real = (text != 0).any(-1)
    lens = torch.where(real, torch.arange(1, text.shape[1] + 1, device=text.device), 1).amax(-1)
    return tuple(lens.tolist())


class _Processor:
    """A WanAttnProcessor whose attention is ours. Projections, norms and output are those of diffusers' layer."""

    def __init__(self, shared: _Transformer) -> None:
        self.shared = shared

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """hidden_states [B, S, C], encoder_hidden_states [B, L, C] (image tokens first) → [B, S, C]."""
        if attention_mask is not None:
            raise ValueError("an attention mask was given; Wan's pipelines give none, and none is served here")
        if encoder_hidden_states is None:
            out = self._self_attention(attn, hidden_states, rotary_emb)
        else:
            out = self._cross_attention(attn, hidden_states, encoder_hidden_states)
        return attn.to_out[1](attn.to_out[0](out.flatten(2).type_as(hidden_states)))

    def _self_attention(self, attn: WanAttention, x: torch.Tensor, rotary_emb: tuple | None) -> torch.Tensor:
        if getattr(attn, "fused_projections", False):
            q, k, v = attn.to_qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = attn.to_q(x), attn.to_k(x), attn.to_v(x)
        q, k, v = (y.unflatten(-1, (attn.heads, -1)) for y in (attn.norm_q(q), attn.norm_k(k), v))
        if rotary_emb is not None:
            rotary = self.shared.rotary(*rotary_emb)
            q, k = (apply_rotary(y.float(), rotary).to(v.dtype) for y in (q, k))
        return self.shared.backend("self", v.dtype, v.device).forward(q, k, v)

    def _cross_attention(self, attn: WanAttention, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        image = None
        if attn.add_k_proj is not None:
            image, rows = rows.split([rows.shape[1] - TEXT_ROWS, TEXT_ROWS], dim=1)
        q = attn.norm_q(attn.to_q(x)).unflatten(-1, (attn.heads, -1))
        backend = self.shared.backend("cross_text", q.dtype, q.device)
        out = self.shared.arranger(backend).attend(q, self._text_kv(attn, rows, backend))
        if image is not None:
            if getattr(attn, "fused_projections", False):
                k, v = attn.to_added_kv(image).chunk(2, dim=-1)
            else:
                k, v = attn.add_k_proj(image), attn.add_v_proj(image)
            k, v = (y.unflatten(-1, (attn.heads, -1)) for y in (attn.norm_added_k(k), v))
            out = out + self.shared.backend("cross_image", q.dtype, q.device).forward(q, k, v)
        return out

    def _text_kv(self, attn: WanAttention, rows: torch.Tensor, backend: AttentionBackend) -> CrossKV:
        batch, padded_len = rows.shape[:2]
        if self.shared.config.cross_kv == "padded":
            return CrossKV(*self._project_kv(attn, rows))
        lens = self.shared.text_lens
        if len(lens) != batch or max(lens) > padded_len:
            raise ValueError(
                f"the lengths of text are {lens}, not {batch} of at most {padded_len}: call the whole transformer"
            )
        # The real rows of all texts, and one pad row of each that has any: all of them are alike.
        short = [b for b in range(batch) if lens[b] < padded_len]
        parts = [rows[b, : lens[b]] for b in range(batch)] + [rows[b, lens[b] :][:1] for b in short[:1]]
        keys, values = (y.split([len(part) for part in parts]) for y in self._project_kv(attn, torch.cat(parts)))
        pad = (keys[-1][0], values[-1][0]) if short else None
        return self.shared.arranger(backend).arrange_kv(keys[:batch], values[:batch], padded_len, pad)

    def _project_kv(self, attn: WanAttention, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [..., C] → k, v [..., H, D]."""
        if getattr(attn, "fused_projections", False):
            k, v = attn.to_kv(rows).chunk(2, dim=-1)
        else:
            k, v = attn.to_k(rows), attn.to_v(rows)
        return tuple(y.unflatten(-1, (attn.heads, -1)) for y in (attn.norm_k(k), v))
