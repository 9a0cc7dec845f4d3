"""Inputs at fixed addresses, and CUDA graphs of a forward: one serves all chunks, sessions and prompts of its shape."""

import gc

import pytest
import torch

from visual_gen.models.wan.causal_inputs import CausalGraph

C, (H, W) = 4, (4, 6)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps(model, make_paged, write_text, read, device="cpu"):
    """(latents, timestep, inputs, commit) of two forwards of each chunk, of sessions that take turns: the window of 5
    frames fills, is full and slides."""
    cache = make_paged(model, read=read, staging_tokens=1000 if read == "staged" else 0, max_frames=5)
    windows = ((1, 4), (0, 4), (0, 2))
    sessions = [
        cache.open_session(sink_frames=sink, recent_frames=recent, max_chunk_frames=1) for sink, recent in windows
    ]
    pool = model.new_text_pool(3, 7)
    for slot, n in enumerate((7, 3, 5)):
        write_text(model, pool, slot, n, seed=slot)
    for i in range(7):
        for rows in ([0, 1], [1, 2]):
            chunks = [sessions[r].begin(1) for r in rows]
            for timestep in (800.0, 0.0):
                batch = cache.batch(chunks)
                assert batch.read == read
                x = noise(2, C, 1, H, W, seed=100 * i + rows[0]).to(device)
                yield x, torch.full((2,), timestep, device=device), model.prepare(batch, pool.rows(rows), (2, 3))
            for chunk in chunks:
                chunk.commit()


@torch.no_grad()
@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
def test_inputs_copied_to_fixed_addresses_are_all_that_a_forward_reads(make_model, make_paged, write_text, read):
    model, static, outs = make_model(attention={"cross_kv": "packed"}), None, []
    for x, timestep, inputs in steps(model, make_paged, write_text, read):
        expected = model.run(x, timestep, inputs)
        static = static or inputs.static()
        addresses = [static.rotary.data_ptr(), static.text[0].metadata.starts_kv.data_ptr()]
        inputs.copy_into(static)
        torch.testing.assert_close(model.run(x, timestep, static), expected, rtol=0, atol=1e-5)
        assert addresses == [static.rotary.data_ptr(), static.text[0].metadata.starts_kv.data_ptr()]
        outs.append(expected)
    assert len({float(out.sum()) for out in outs}) == len(outs), "every forward is another"


@torch.no_grad()
def test_inputs_of_other_shapes_pools_or_caches_are_refused(make_model, make_paged, make_text, make_contiguous):
    model = make_model()
    text, other = make_text(model, (5,)), make_text(model, (5,))
    cache = make_paged(model)
    session = cache.open_session(recent_frames=4, max_chunk_frames=2)
    with session.begin(1) as chunk:
        static = model.prepare(cache.batch([chunk]), text, (2, 3)).static()
        with pytest.raises(ValueError, match="another text pool"):
            model.prepare(cache.batch([chunk]), other, (2, 3)).copy_into(static)
    with session.begin(2) as chunk, pytest.raises(ValueError, match="capture another"):
        model.prepare(cache.batch([chunk]), text, (2, 3)).copy_into(static)
    contiguous = make_contiguous(model, 1, 4)
    with contiguous.begin(1) as chunk, pytest.raises(ValueError, match="not a paged cache's"):
        model.prepare(contiguous.batch(chunk), text, (2, 3)).static()


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
def test_a_graph_captured_with_one_frame_serves_all_chunks_and_sessions(
    flash_kernel, make_gpu_model, make_paged, write_text, read, compiled
):
    """P15 on the whole model."""
    model, graph = make_gpu_model(flash_kernel), None
    if compiled:
        model.compile_blocks()
    for x, timestep, inputs in steps(model, make_paged, write_text, read, device="cuda"):
        expected = model.run(x, timestep, inputs)
        if graph is None:
            graph = CausalGraph(model.run, x, timestep, inputs)
        found = graph(x, timestep, inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * float(expected.abs().max()))
    with pytest.raises(ValueError, match=r"timestep has shape \(3,\)"):
        graph(x, timestep.new_zeros(3), inputs)


@pytest.mark.gpu
@torch.no_grad()
def test_a_graph_is_captured_though_an_earlier_one_is_garbage_that_nothing_has_collected(
    flash_kernel, make_gpu_model, make_paged, write_text
):
    model = make_gpu_model(flash_kernel)
    x, timestep, inputs = next(steps(model, make_paged, write_text, "extent", device="cuda"))
    collected = []

    def run(*call):
        if torch.cuda.is_current_stream_capturing():
            collected.append(gc.collect())
        return model.run(*call)

    was_on = gc.isenabled()
    gc.disable()  # until the capture, or the garbage might be gone
    try:
        cycle = {"graph": CausalGraph(model.run, x, timestep, inputs)}
        cycle["self"] = cycle
        del cycle
        graph = CausalGraph(run, x, timestep, inputs)
    finally:
        if was_on:
            gc.enable()
    assert len(collected) == 1
    expected = model.run(x, timestep, inputs)
    torch.testing.assert_close(graph(x, timestep, inputs), expected, rtol=0, atol=2e-2 * float(expected.abs().max()))
