"""Streams past the positions of their checkpoint."""

import dataclasses

import pytest
import torch

from visual_gen.models.wan import WanTransformer
from visual_gen.modules.block_causal import ChunkWindow, diffusion_forcing_mask

C, SIZE, FRAMES, CHUNK = 4, (2, 2), 1040, 20  # one token a frame; chunks of 20


@torch.no_grad()
def test_frames_past_1024_equal_the_dense_computation(make_model, make_text, make_paged):
    """Every chunk at a noise level of its own, over clean chunks, in a window; against one forward over all frames of a
    model whose own table reaches them, with the window's mask in its attention."""
    config = dataclasses.replace(make_model().config, num_layers=1, rope_max_seq_len=1024)
    model = make_model(config)
    dense = make_model(dataclasses.replace(config, rope_max_seq_len=2000))
    latents = torch.randn(1, C, FRAMES, *SIZE, generator=torch.Generator().manual_seed(3))
    text = make_text(model, (5,))
    model.extend_frames(FRAMES)
    cache = make_paged(model, frame_tokens=1)
    session, found = cache.open_session(recent_frames=3 * CHUNK, max_chunk_frames=CHUNK), []
    for start in range(0, FRAMES, CHUNK):
        with session.begin(CHUNK) as chunk:
            part = latents[:, :, start : start + CHUNK]
            found.append(model(part, torch.zeros(1), kv=cache.batch([chunk]), text_kv=text))
            chunk.commit()
    mask = diffusion_forcing_mask(ChunkWindow(CHUNK, recent_frames=3 * CHUNK), FRAMES, 1, "cpu")
    expected = dense.forward_masked(latents, torch.zeros(1), block_mask=mask, text_kv=make_text(dense, (5,)))
    torch.testing.assert_close(torch.cat(found, 2), expected, rtol=0, atol=1e-5)
    past = found[-1] - model(  # the same frames without a history: what was compared depends on it
        latents[:, :, -CHUNK:], torch.zeros(1), kv=_alone(make_paged(model, frame_tokens=1)), text_kv=text
    )
    assert past.abs().max() > 1e-3


def _alone(cache):
    return cache.batch([cache.open_session(recent_frames=CHUNK, max_chunk_frames=CHUNK).begin(CHUNK)])


@torch.no_grad()
def test_past_the_end_is_an_error_before_anything_is_written(make_model, make_text, make_paged):
    model = make_model()
    model.extend_frames(66)
    cache, text = make_paged(model), make_text(model, (5,))
    session = cache.open_session(recent_frames=4, max_chunk_frames=2)
    for _ in range(33):
        with session.begin(2) as chunk:
            model(torch.zeros(1, C, 2, 4, 6), torch.zeros(1), kv=cache.batch([chunk]), text_kv=text)
            chunk.commit()
    before = session.snapshot()
    with pytest.raises(ValueError, match="frames 66 to 67 do not all lie"), session.begin(2) as chunk:
        model(torch.ones(1, C, 2, 4, 6), torch.zeros(1), kv=cache.batch([chunk]), text_kv=text)
    after = session.snapshot()
    assert torch.equal(before.windows[0], after.windows[0]) and session.frames == after.frames == 66
    for count in (0, True, 2.5):
        with pytest.raises(ValueError, match="count is .*; it must be an integer of at least 1"):
            model.extend_frames(count)


def test_a_bidirectional_model_keeps_its_checkpoints_end(make_model):
    assert not hasattr(WanTransformer, "extend_frames")
    model = make_model(model_class=WanTransformer)
    with pytest.raises(ValueError, match="frames is 65 tokens; the rotary table ends at rope_max_seq_len 64"):
        model(torch.zeros(1, C, 65, 2, 2), torch.zeros(1), torch.zeros(1, 7, 10))
