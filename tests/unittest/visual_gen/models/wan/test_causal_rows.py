"""Rows of a batch are sessions of their own: history, frames, timesteps, window and text."""

import pytest
import torch

C, (H, W), S = 4, (4, 6), 6


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Streams:
    """Sessions of one cache with their prompts, run chunk by chunk in any company."""

    def __init__(self, model, make_paged, write_text, *, read="extent", windows=((0, 4),) * 3, lens=(7, 3, 5)):
        self.model = model
        self.cache = make_paged(model, read=read, staging_tokens=1000 if read == "staged" else 0)
        self.sessions = [
            self.cache.open_session(sink_frames=sink, recent_frames=recent, max_chunk_frames=3)
            for sink, recent in windows
        ]
        self.write, self.pool = write_text, model.new_text_pool(len(lens), 7)
        for slot, n in enumerate(lens):
            self.write_text(slot, n, seed=slot)

    def write_text(self, slot, n, seed):
        self.write(self.model, self.pool, slot, n, seed=seed)

    def step(self, rows, frames=2, timesteps=(700.0, 0.0), poison=()):
        """One chunk of the sessions `rows`: the flow of each at each timestep, then a commit. Noise depends only on the
        session, its position and the timestep."""
        sizes = frames if isinstance(frames, list) else [frames] * len(rows)
        chunks = [self.sessions[r].begin(n) for r, n in zip(rows, sizes, strict=True)]
        outs = []
        for i, timestep in enumerate(timesteps):
            x = [
                noise(C, n, H, W, seed=1000 * r + 10 * chunk.frame_start + i) + (torch.inf if r in poison else 0)
                for r, n, chunk in zip(rows, sizes, chunks, strict=True)
            ]
            if isinstance(frames, list):
                times = [torch.linspace(timestep, timestep / 2, n) for n in sizes]
            else:
                x, times = torch.stack(x), torch.full((len(rows),), timestep)
            batch = self.cache.batch(chunks)
            outs.append(self.model(x, times, kv=batch, text_kv=self.pool.rows(rows)))
        self.failed = batch.failed_rows(outs[-1])
        for i, chunk in enumerate(chunks):
            chunk.abort() if i in self.failed else chunk.commit()
        return [torch.stack([out[i] for out in outs]) for i in range(len(rows))]


@pytest.fixture
def streams(make_model, make_paged, write_text):
    """streams(**settings) → Streams of a model with the same weights."""

    def make(cross_kv="padded", **settings):
        return Streams(make_model(attention={"cross_kv": cross_kv}), make_paged, write_text, **settings)

    return make


READS = ["extent", "block_table", "staged"]


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_a_row_has_the_bits_of_its_run_in_other_company(streams, read):
    """P10, P14: the same bucket of two rows, whoever the other row is; histories, prompts and windows differ."""
    windows = ((0, 4), (1, 3), (0, 6))
    a, b = (streams(read=read, windows=windows) for _ in "ab")
    for company in (1, 2, 1, 1, 2):
        one = a.step([0, company])[0]
        other = b.step([0, 3 - company])[0]
        assert torch.equal(one, other)


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_rows_of_any_length_history_and_window_are_their_single_runs(streams, read):
    windows = ((0, 4), (1, 3), (0, 6))
    together, alone = (streams(read=read, windows=windows) for _ in "ab")
    for rows, frames in [([1], [3]), ([0, 1, 2], [1, 2, 3]), ([2, 0], [3, 1]), ([0, 1, 2], [2, 3, 1])]:
        found = together.step(rows, frames)
        for row, n, out in zip(rows, frames, found, strict=True):
            (single,) = alone.step([row], [n])
            torch.testing.assert_close(out, single, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_list_of_equal_chunks_is_the_tensor_of_them(streams):
    as_tensor, as_list = streams(), streams()
    for x, y in zip(as_tensor.step([0, 1], 2, (0.0,)), as_list.step([0, 1], [2, 2], (0.0,)), strict=True):
        assert torch.equal(x, y)


@torch.no_grad()
@pytest.mark.parametrize("cross_kv", ["padded", "packed"])
def test_a_prompt_switched_between_chunks_counts_at_once_and_for_its_session_alone(streams, cross_kv):
    """P13, with the same number of tokens and with another."""
    plain, switched = streams(cross_kv), streams(cross_kv)
    for before in range(2):
        for x, y in zip(plain.step([0, 1]), switched.step([0, 1]), strict=True):
            assert torch.equal(x, y), before
    for n in (3, 6):  # session 1 had 3
        switched.write_text(1, n, seed=9)
        anew = switched.pool.extents([1])[1]
        assert anew == ((7,) if cross_kv == "padded" else (n,))
        (x0, x1), (y0, y1) = plain.step([0, 1]), switched.step([0, 1])
        assert torch.equal(x0, y0)
        assert (x1 - y1).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_a_row_that_is_not_finite_fails_alone_and_can_be_made_again(streams, read):
    """P16, P11: its neighbour has the bits that it would have had, and the chunk made again those of a clean run."""
    healthy, broken = streams(read=read), streams(read=read)
    for s in (healthy, broken):
        s.step([0, 1])
    x0, x1 = healthy.step([0, 1])
    y0, _ = broken.step([0, 1], poison=(1,))
    assert broken.failed == [1] and torch.equal(x0, y0)
    healthy_again, broken_again = healthy.step([0, 2])[0], broken.step([0, 2])[0]
    assert torch.equal(healthy_again, broken_again)
    (y1,) = broken.step([1])
    torch.testing.assert_close(y1, x1, rtol=0, atol=1e-5)


@torch.no_grad()
def test_an_exception_inside_a_commit_leaves_the_session_as_it_was(streams):
    """P11: raised by the second layer, after the first has written."""
    clean, hurt = streams(), streams()
    for s in (clean, hurt):
        s.step([0]), s.step([0]), s.step([0])  # the window of 4 has slid
    site = hurt.model.blocks[1].self_attn
    original, free = type(site).project_qkv, hurt.cache.free_blocks

    def boom(self, *args):
        if self is site:
            raise RuntimeError("layer 1")
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="layer 1"):
        patch.setattr(type(site), "project_qkv", boom)
        with hurt.sessions[0].begin(2) as chunk:
            hurt.model(noise(1, C, 2, H, W), torch.zeros(1), kv=hurt.cache.batch([chunk]), text_kv=hurt.pool.rows([0]))
    assert (hurt.cache.free_blocks, hurt.sessions[0].frames) == (free, clean.sessions[0].frames)
    assert torch.equal(clean.step([0])[0], hurt.step([0])[0])


@torch.no_grad()
def test_gemms_of_few_rows_do_not_depend_on_what_the_other_rows_hold(make_model):
    """The time embedding has one row for each frame: 1 to 16 of them in a batch."""
    model = make_model()
    for rows in range(1, 17):
        first, second = (torch.rand(rows, generator=torch.Generator().manual_seed(i)) * 1000 for i in range(2))
        second[rows // 2] = first[rows // 2]
        a, b = (model.time_embedding(t.view(rows, 1)) for t in (first, second))
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x[rows // 2], y[rows // 2]), rows


@torch.no_grad()
def test_each_site_reads_through_its_own_backend_and_is_told_so_once(make_model, make_text, make_contiguous):
    """A backend that was put in a site's place stays its own, and no forward after the first sets anything."""
    model = make_model()
    sites = [block.self_attn for block in model.blocks]
    sites[1].backend = type(sites[1].backend)(sites[1].backend.spec)
    cache, text, told = make_contiguous(model, 1, 4), make_text(model, (5,)), []
    for _ in range(2):
        with cache.begin(1) as chunk:
            model(torch.ones(1, C, 1, H, W), torch.zeros(1), kv=cache.batch(chunk), text_kv=text)
        told.append([site.cached for site in sites])
    assert all(site.cached.backend is site.backend for site in sites)
    assert all(first is second for first, second in zip(*told, strict=True))
