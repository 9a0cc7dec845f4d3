"""Tokens beside the frames': attended to in their forward, with an output of their own, and never kept."""

import pytest
import torch

from visual_gen.modules.cross_kv import CrossKV

C, (H, W), S = 4, (4, 6), 6
D = 24


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def dense(model, latents, timestep, text, extra):
    """Flow and extra outputs of one first chunk [C, F, H, W] by the blocks alone: one sequence, no cache."""
    frames = latents.shape[1]
    temb, modulation = model.time_embedding(torch.full((frames, 1), timestep))
    rotary = model._rotary.grid(frames, 2, 3, torch.device("cpu")).unflatten(0, (frames, S))
    per_frame = [[temb], [modulation], [rotary]]
    x = torch.cat([model.patch_embedding(model._patchify(latents[None]))[0], extra])
    temb, modulation, rotary = (
        torch.cat([v.expand(frames, S, *v.shape[2:]).flatten(0, 1), v[-1:, 0].expand(len(extra), *v.shape[2:])])[None]
        for (v,) in per_frame
    )
    x = x[None]
    for block, layer in zip(model.blocks, text.text, strict=True):
        x = block(x, modulation, rotary, CrossKV(layer.k, layer.v))
    shift, scale = (model.scale_shift_table + temb.unsqueeze(2)).unbind(2)
    x = torch.nn.functional.layer_norm(x, (D,), eps=model.config.eps) * (1 + scale) + shift
    flow = model.proj_out(x[:, : frames * S])
    return model._unpatchify(flow, frames, 2, 3)[0], x[0, frames * S :]


@torch.no_grad()
@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
def test_a_first_chunk_with_extra_tokens_is_one_dense_sequence(make_model, make_paged, make_text, read):
    model = make_model()
    cache = make_paged(model, read=read, staging_tokens=2000 if read == "staged" else 0, action_capacity=3)
    texts = make_text(model, (5, 3))
    chunks = [cache.open_session(recent_frames=4, max_chunk_frames=2).begin(n) for n in (2, 1)]
    latents = [noise(C, n, H, W, seed=n) for n in (2, 1)]
    for counts in ((3, 1), (0, 2), (2, 0)):  # another number in the next forward
        extra = [noise(a, D, seed=9 + a) if a else None for a in counts]
        flows, outputs = model(
            latents, torch.tensor([700.0, 300.0]), kv=cache.batch(chunks, extra_tokens=counts), text_kv=texts,
            extra=extra,
        )  # fmt: skip
        for i, (timestep, n) in enumerate(((700.0, 5), (300.0, 3))):
            alone = make_text(model, (5, 3))
            alone = type(alone)(
                (n,), 1, alone.padded_len, alone.cross_kv,
                tuple(CrossKV(layer.k[i : i + 1], layer.v[i : i + 1]) for layer in alone.text),
            )  # fmt: skip
            expected, out = dense(model, latents[i], timestep, alone, noise(counts[i], D, seed=9 + counts[i]))
            torch.testing.assert_close(flows[i], expected, rtol=0, atol=1e-5)
            torch.testing.assert_close(outputs[i], out, rtol=0, atol=1e-5)
            assert outputs[i].shape == (counts[i], D)


@torch.no_grad()
def test_extra_tokens_leave_no_trace_in_what_is_kept(make_model, make_paged, make_text):
    model, outs = make_model(), []
    for extra in (True, False):
        cache = make_paged(model, action_capacity=3)
        text, session = make_text(model, (5,)), cache.open_session(recent_frames=3, max_chunk_frames=1)
        for i in range(5):
            with session.begin(1) as chunk:
                if extra:
                    batch = cache.batch([chunk], extra_tokens=[3])
                    model(
                        noise(1, C, 1, H, W, seed=i), torch.tensor([500.0]), kv=batch, text_kv=text, extra=[noise(3, D)]
                    )
                outs.append(
                    model(noise(1, C, 1, H, W, seed=i), torch.tensor([0.0]), kv=cache.batch([chunk]), text_kv=text)
                )
                chunk.commit()
    assert all(map(torch.equal, outs[:5], outs[5:]))


@torch.no_grad()
def test_extra_tokens_that_do_not_fit_are_refused_before_anything_is_written(make_model, make_paged, make_text):
    model = make_model()
    cache = make_paged(model, action_capacity=3)
    text = make_text(model, (5,))
    chunk = cache.open_session(recent_frames=3, max_chunk_frames=1).begin(1)
    x, t = noise(1, C, 1, H, W), torch.tensor([500.0])
    batch = cache.batch([chunk], extra_tokens=[2])
    for extra, says in (
        (None, r"\[2\] extra tokens: give their embeddings"),
        ([noise(3, D)], r"extra tokens have shapes \[\(3, 24\)\]; the cache's batch has \[2\]"),
        ([noise(2, D + 1)], r"of 24 each"),
        ([None], r"have shapes \[\(0, 24\)\]"),
        ([noise(2, D), None], r"the cache's batch has \[2\]"),
    ):
        with pytest.raises(ValueError, match=says):
            model(x, t, kv=batch, text_kv=text, extra=extra)
    assert all(k.eq(0).all() for layer in cache.pool.rows.layers for k in layer)
    with pytest.raises(ValueError, match="a graph has no places for extra tokens"):
        model.prepare(batch, text, (2, 3), [noise(2, D)]).static()
