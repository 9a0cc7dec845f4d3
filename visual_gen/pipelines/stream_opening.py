"""A checkpoint for streams before its weights are read: everything that can be refused by then is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from visual_gen.checkpoint import CONFIG_FILES, resolve_folder
from visual_gen.compilation import check_compile
from visual_gen.config import AttentionConfig, CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.models.wan.geometry import Geometry
from visual_gen.pipelines.components import open_tokenizer
from visual_gen.pipelines.folder import read_stream_folder
from visual_gen.pipelines.recommended import read_recommended, recommended_warnings
from visual_gen.pipelines.text import text_warnings, tokenize_all


def check_streams(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionConfig,
    height: int,
    width: int,
    latent_frames: int,
    causal: CausalConfig,
    texts: Sequence[tuple[str, str]],
    max_sequence_length: int,
    compile: bool = False,
) -> tuple[Path, str, list[str]]:
    """The folder, what the checkpoint calls itself, and warnings on what it may do badly.

    texts: (what it is, the text). Raises ValueError on whatever the folder, the model, its backends or its positions
    cannot serve.
    """
    check_compile(compile, device)
    folder = resolve_folder(folder_or_id, files=CONFIG_FILES)
    wan = read_stream_folder(folder).wan
    Geometry.from_folder(folder).latent_shape(1, 1, height, width)
    causal.check_frames(latent_frames, wan.rope_max_seq_len)
    # Without memory for weights: it selects the backends, or says why one cannot serve this model here.
    CausalWanTransformer(wan, attention=attention, dtype=dtype, device=device, init_weights=False)
    tokenizer = open_tokenizer(folder)
    recommended = read_recommended(folder)
    warnings = recommended_warnings(
        recommended, height=height, width=width, num_frames=None, max_sequence_length=max_sequence_length
    )
    rows = tokenize_all(tokenizer, [text for _, text in texts], max_sequence_length)
    for (what, _), tokens in zip(texts, rows, strict=True):
        warnings += text_warnings(what, tokens, max_sequence_length)
    return folder, recommended.get("label", ""), warnings
