"""What the causal model refuses, before anything is written."""

import dataclasses

import pytest
import torch

from attention_backend import AttentionBackendError
from visual_gen.models.wan import CausalWanTransformer

C, (H, W) = 4, (4, 6)


def latents(rows=1, frames=2, channels=C, size=(H, W)):
    return torch.ones(rows, channels, frames, *size)


@pytest.fixture
def opened(make_model, make_text, make_contiguous):
    """A model, a batch of one row and two frames, its text, and a check that nothing was written."""
    model = make_model()
    cache = make_contiguous(model, 1, 4)
    chunk = cache.begin(2)
    batch = cache.batch(chunk)
    yield model, batch, make_text(model, (5,))
    for i in range(model.config.num_layers):
        layer = batch.layer(i)
        assert not layer.k.any() and not layer.v.any(), "something was written"


@torch.no_grad()
@pytest.mark.parametrize(
    ("hidden", "timestep", "says"),
    [
        (latents(2), torch.zeros(2), r"2 rows of \[2, 2\] frames; the cache's batch has 1 of \[2\]"),
        (latents(frames=3), torch.zeros(1), r"1 rows of \[3\] frames"),
        (latents(size=(4, 8)), torch.zeros(1), "a frame of hidden_states has 8 tokens; the cache was made for 6"),
        (latents(channels=5), torch.zeros(1), r"expected \[B, 4, F, H, W\]"),
        (latents(size=(5, 6)), torch.zeros(1), "latent H is 5"),
        (latents(), torch.zeros(2), r"timestep has shape \(2,\); expected \[R\] = \(1,\) or \[R, F\] = \(1, 2\)"),
        (latents(), torch.zeros(1, 12), r"timestep has shape \(1, 12\)"),
        ([latents()[0]], torch.zeros(1, 2), r"timestep has shape \(1, 2\); expected \[R\] = \(1,\)$"),
        ([latents()[0]], [torch.zeros(3)], r"timestep has shapes \[\(3,\)\]; expected"),
        ([], torch.zeros(0), "hidden_states is empty"),
        (latents(0), torch.zeros(0), "hidden_states is empty"),
        ([latents()[0], latents(size=(4, 8))[0]], torch.zeros(2), "height and width must be equal"),
    ],
)
def test_shapes_that_do_not_fit_the_cache(opened, hidden, timestep, says):
    model, batch, text = opened
    with pytest.raises(ValueError, match=says):
        model(hidden, timestep, kv=batch, text_kv=text)


@torch.no_grad()
def test_text_of_other_rows_or_of_another_model(opened, make_model, make_text):
    model, batch, text = opened
    with pytest.raises(ValueError, match="text_kv has 2 rows, hidden_states 1"):
        model(latents(), torch.zeros(1), kv=batch, text_kv=make_text(model, (5, 3)))
    packed = make_model(attention={"cross_kv": "packed"})
    with pytest.raises(ValueError, match="3 layers in mode 'packed', this model has 3 in mode 'padded'"):
        model(latents(), torch.zeros(1), kv=batch, text_kv=make_text(packed, (5,)))
    other_heads = make_model(dataclasses.replace(model.config, num_attention_heads=1, attention_head_dim=24))
    with pytest.raises(ValueError, match=r"text_kv holds heads, head_dim \(1, 24\).*project the text"):
        model(latents(), torch.zeros(1), kv=batch, text_kv=make_text(other_heads, (5,)))
    with pytest.raises(ValueError, match="text_kv holds .* torch.bfloat16 on cpu; this model has .* torch.float32"):
        model(latents(), torch.zeros(1), kv=batch, text_kv=make_text(make_model(dtype=torch.bfloat16), (5,)))
    with pytest.raises(ValueError, match=r"slots \[1\] of the text pool hold no text"):
        model(latents(), torch.zeros(1), kv=batch, text_kv=model.new_text_pool(2, 7).rows([1]))


@torch.no_grad()
@pytest.mark.parametrize(
    ("changes", "dtype", "says"),
    [
        ({"num_layers": 2}, torch.float32, "layer 2 of a cache of 2 layers"),
        ({"num_layers": 5}, torch.float32, "the cache has more layers than the 3 of this model"),
        ({"num_attention_heads": 1, "attention_head_dim": 24}, torch.float32, r"the cache holds .* \(1, 24\)"),
        ({}, torch.bfloat16, "the cache holds .* torch.bfloat16 on cpu; this model has .* torch.float32 on cpu"),
    ],
)
def test_a_cache_of_another_model(make_model, make_text, make_contiguous, changes, dtype, says):
    model = make_model()
    cache = make_contiguous(make_model(dataclasses.replace(model.config, **changes), dtype=dtype), 1, 4)
    with cache.begin(2) as chunk, pytest.raises(ValueError, match=says):
        model(latents(), torch.zeros(1), kv=cache.batch(chunk), text_kv=make_text(model, (5,)))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_the_end_of_the_rotary_table_is_an_error_before_any_write(
    make_model, make_text, make_contiguous, make_paged, kind
):
    model = make_model(dataclasses.replace(make_model().config, rope_max_seq_len=5))
    text = make_text(model, (5,))
    if kind == "contiguous":
        cache = session = make_contiguous(model, 1, 8)
    else:
        cache = make_paged(model)
        session = cache.open_session(recent_frames=8, max_chunk_frames=2)
    for i in range(3):
        with session.begin(2) as chunk:
            batch = cache.batch([chunk])
            if i < 2:
                model(latents(), torch.zeros(1), kv=batch, text_kv=text)
                chunk.commit()
                continue
            before = [batch.layer(i).k.clone() for i in range(3)]
            with pytest.raises(ValueError, match="frames 4 to 5 .* rope_max_seq_len 5"):
                model(latents(), torch.zeros(1), kv=batch, text_kv=text)
            assert all(torch.equal(k, batch.layer(i).k) for i, k in enumerate(before))
    assert session.frames == 4


def test_gradients_through_a_cache_are_refused_and_name_the_way_out(make_model, make_text, make_contiguous):
    model = make_model(trainable=True)
    cache = make_contiguous(model, 1, 4)
    with cache.begin(2) as chunk, pytest.raises(AttentionBackendError, match=r"torch.no_grad\(\)"):
        model(latents(), torch.zeros(1), kv=cache.batch(chunk), text_kv=make_text(model, (5,)))


@pytest.mark.parametrize(
    ("changes", "settings", "says"),
    [
        ({}, {"attention": {"cross_kv": "packed_pad_exact"}}, "packed_pad_exact.*use 'padded'"),
        ({"image_dim": 8, "added_kv_proj_dim": 24}, {}, "image_dim is 8"),
        ({"patch_size": (2, 2, 2)}, {}, r"patch_size is \(2, 2, 2\)"),
        ({}, {"dtype": torch.int8}, "dtype is torch.int8"),
    ],
)
def test_models_that_cannot_run_chunk_by_chunk(make_model, changes, settings, says):
    config = dataclasses.replace(make_model().config, **changes)
    with pytest.raises(ValueError, match=says):
        CausalWanTransformer(config, **settings)
