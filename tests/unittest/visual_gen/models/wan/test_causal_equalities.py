"""What a causal rollout must equal: the bidirectional model, a dense model with the block-causal mask, and itself."""

import pytest
import torch

from visual_gen.models.wan import CausalWanTransformer, WanTransformer

C, (H, W), S = 4, (4, 6), 6  # channels, latent size, tokens of a frame


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def pair(make_model):
    """The same weights as a causal and as a bidirectional model."""
    causal = make_model()
    plain = WanTransformer(causal.config).requires_grad_(False)
    plain.load_state_dict(causal.state_dict())
    return causal, plain


@pytest.fixture(params=["contiguous", "extent", "block_table", "staged"])
def rows_of(request, make_contiguous, make_paged):
    """begin(frames) → (chunks, batch) of a cache of that read, for any number of rows; everything stays visible."""

    def make(model, rows, capacity=8):
        if request.param == "contiguous":
            cache = make_contiguous(model, rows, capacity)

            def begin(frames, **options):
                chunk = cache.begin(frames)
                return [chunk], cache.batch(chunk, **options)

            return begin
        staging = rows * (capacity * S + 200) if request.param == "staged" else 0
        cache = make_paged(model, read=request.param, staging_tokens=staging)
        sessions = [
            cache.open_session(recent_frames=None, capacity_frames=capacity, max_chunk_frames=capacity)
            for _ in range(rows)
        ]

        def begin(frames, **options):
            chunks = [session.begin(frames) for session in sessions]
            batch = cache.batch(chunks, **options)
            assert batch.read == request.param
            return chunks, batch

        return begin

    make.cache = request.param
    return make


def roll(model, begin, latents, timesteps, text, sizes, **options):
    """Chunk by chunk over given latents; each chunk's forward at its timesteps, then its commit at 0."""
    outs, start = [], 0
    for n in sizes:
        part = slice(start, start + n)
        chunks, batch = begin(n, **options)
        outs.append(model(latents[:, :, part], timesteps[:, part], kv=batch, text_kv=text))
        committed = model(latents[:, :, part], torch.zeros(len(latents)), kv=batch, text_kv=text)
        for chunk in chunks:
            chunk.commit()
        start += n
    return torch.cat(outs, 2), committed


@torch.no_grad()
def test_a_folder_in_diffusers_format_loads_as_both_models(make_contiguous):
    causal, plain = (cls.from_pretrained("wan-shapes") for cls in (CausalWanTransformer, WanTransformer))
    text = plain.project_text(noise(1, 8, plain.config.text_dim), [5])
    latents, timestep = noise(1, plain.config.in_channels, 2, H, W), torch.tensor([625.0])
    cache = make_contiguous(causal, 1, 2)
    with cache.begin(2) as chunk:
        found = causal(latents, timestep, kv=cache.batch(chunk), text_kv=text)
    torch.testing.assert_close(found, plain(latents, timestep, text_kv=text), rtol=0, atol=1e-5)


@torch.no_grad()
def test_one_chunk_as_long_as_the_video_is_the_bidirectional_model(pair, make_text, rows_of):
    causal, plain = pair
    text = make_text(causal, (5, 3))
    latents, timestep = noise(2, C, 5, H, W), torch.tensor([937.5, 625.0])
    expected = plain(latents, timestep, text_kv=text)
    _, batch = rows_of(causal, 2)(5)
    torch.testing.assert_close(causal(latents, timestep, kv=batch, text_kv=text), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 3, 2)])
def test_chunks_are_a_dense_model_with_the_block_causal_mask(pair, make_text, rows_of, masked_forward, sizes):
    causal, plain = pair
    text = make_text(causal, (5, 3))
    latents, timesteps = noise(2, C, 6, H, W), torch.zeros(2, 6)
    chunk_of = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    expected = masked_forward(plain, latents, timesteps, text, chunk_of[:, None] >= chunk_of)
    found, _ = roll(causal, rows_of(causal, 2), latents, timesteps, text, sizes)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_denoising_forward_leaves_nothing_that_the_commit_does_not_write(pair, make_text, rows_of):
    causal, _ = pair
    text = make_text(causal, (5,))
    latents = noise(1, C, 4, H, W)
    hot, cold = torch.full((1, 4), 800.0), torch.zeros(1, 4)
    _, after_noise = roll(causal, rows_of(causal, 1), latents, hot, text, (2, 2))
    _, after_clean = roll(causal, rows_of(causal, 1), latents, cold, text, (2, 2))
    torch.testing.assert_close(after_noise, after_clean, rtol=0, atol=0)


@torch.no_grad()
def test_frame_causal_recache_is_one_frame_after_another(pair, make_text, make_paged):
    causal, _ = pair
    text = make_text(causal, (5,))
    latents = noise(1, C, 5, H, W)
    zero = torch.zeros(1)
    follow = {}
    for sizes, options in (((1, 1, 1, 1), {}), ((4,), {"frame_causal": True}), ((4,), {})):
        cache = make_paged(causal)
        session = cache.open_session(recent_frames=None, capacity_frames=8, max_chunk_frames=4)
        start, outs = 0, []
        for n in sizes:
            with session.begin(n) as chunk:
                batch = cache.batch([chunk], **options)
                outs.append(causal(latents[:, :, start : start + n], zero, kv=batch, text_kv=text))
                chunk.commit()
            start += n
        with session.begin(1) as chunk:
            outs.append(causal(latents[:, :, 4:], zero, kv=cache.batch([chunk]), text_kv=text))
        follow[sizes, bool(options)] = torch.cat(outs, 2)
    one_by_one, at_once, as_a_chunk = follow.values()
    torch.testing.assert_close(at_once, one_by_one, rtol=0, atol=1e-5)
    assert (as_a_chunk - one_by_one).abs().max() > 1e-3


@torch.no_grad()
def test_the_timestep_of_a_row_stands_for_all_its_frames(pair, make_text, rows_of):
    causal, _ = pair
    text, latents = make_text(causal, (5, 3)), noise(2, C, 2, H, W)
    timestep = torch.tensor([900.5, 0.25])
    _, batch = rows_of(causal, 2)(2)
    by_row = causal(latents, timestep, kv=batch, text_kv=text)
    by_frame = causal(latents, timestep[:, None].expand(2, 2), kv=batch, text_kv=text)
    assert torch.equal(by_row, by_frame)
    rounded = causal(latents, timestep.round(), kv=batch, text_kv=text)
    assert not torch.equal(by_row, rounded), "timesteps are not whole numbers"
