"""Blocks of the causal model compile whole, and one graph of a read path serves all layers, sessions and windows."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from visual_gen.modules.block_causal import ChunkWindow, teacher_forcing_mask

C, (H, W) = 4, (4, 6)


@pytest.fixture
def graphs():
    """Graphs compiled so far, and a torch.compile backend that notes them and runs them through aot_eager."""
    torch._dynamo.reset()
    found = []

    def backend(graph, example_inputs):
        found.append(graph)
        return aot_eager(graph, example_inputs)

    yield found, backend
    torch._dynamo.reset()


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
def test_one_graph_for_filling_full_and_sliding_windows(graphs, make_model, write_text, make_paged, read):
    found, backend = graphs
    """And a window of another size, whose bound is another constant, makes one graph more."""
    compiled, eager = make_model(), make_model()
    compiled.compile_blocks(backend=backend)
    outs, graphs_before = [], None
    for model in (compiled, eager):
        pool = model.new_text_pool(2, 7)
        for slot, n in enumerate((7, 3)):
            write_text(model, pool, slot, n, seed=slot)
        cache = make_paged(model, read=read, staging_tokens=1000 if read == "staged" else 0)
        sessions = [cache.open_session(sink_frames=1, recent_frames=4, max_chunk_frames=2) for _ in range(2)]
        for i in range(5):  # two chunks fill the window, the third is the last that fits, then it slides
            for j, session in enumerate(sessions if i else sessions[:1]):
                with session.begin(2) as chunk:
                    batch = cache.batch([chunk])
                    assert batch.read == read
                    for step, timestep in enumerate((937.5, 0.0)):
                        x = noise(1, C, 2, H, W, seed=100 * i + 10 * j + step)
                        outs.append(model(x, torch.tensor([timestep]), kv=batch, text_kv=pool.rows([j])))
                    chunk.commit()
        graphs_before = graphs_before or len(found)
        with cache.open_session(recent_frames=9, max_chunk_frames=2) as session, session.begin(2) as chunk:
            batch, x = cache.batch([chunk]), noise(1, C, 2, H, W, seed=7)
            outs.append(model(x, torch.tensor([500.5]), kv=batch, text_kv=pool.rows([0])))
    half = len(outs) // 2
    for a, b in zip(outs[:half], outs[half:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert (graphs_before, len(found)) == (1, 2)


@torch.no_grad()
def test_one_graph_for_all_chunks_of_the_contiguous_cache(graphs, make_model, make_text, make_contiguous):
    found, backend = graphs
    model = make_model()
    model.compile_blocks(backend=backend)
    text, cache = make_text(model, (5, 3)), make_contiguous(model, 2, 6)
    for i in range(3):
        with cache.begin(2) as chunk:
            for timestep in (800.0, 0.0):
                x = noise(2, C, 2, H, W, seed=i)
                model(x, torch.full((2,), timestep), kv=cache.batch(chunk), text_kv=text)
            chunk.commit()
    assert len(found) == 1


def test_masked_blocks_compile_whole_and_have_gradients(graphs, make_model, make_text):
    found, backend = graphs
    model, plain = make_model(trainable=True), make_model(trainable=True)
    model.compile_blocks(backend=backend)
    mask = teacher_forcing_mask(ChunkWindow(2), 4, 6, "cpu")
    latents, clean = noise(1, C, 4, H, W), noise(1, C, 4, H, W, seed=1)
    for m in (model, plain):
        out = m.forward_masked(latents, torch.tensor([500.0]), block_mask=mask, text_kv=make_text(m, (5,)), clean=clean)
        out.square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6)
    assert len(found) == 1
