"""The causal model on a device, through each flash kernel and read, against fp32."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer, WanTransformer
from visual_gen.pipelines.rollout import rollout_latents
from visual_gen.pipelines.text import TextRows

pytestmark = pytest.mark.gpu

C, (H, W), GRID = 4, (20, 24), (10, 12)
FRAME_TOKENS = 120
READS = ["extent", "block_table", "staged"]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).cuda()


class Pair:
    """Two sessions of unequal windows and prompts, one of which is a chunk ahead."""

    def __init__(self, model, make_paged, write_text, read):
        self.model = model
        staging = 20000 if read == "staged" else 0
        self.cache = make_paged(
            model, frame_tokens=FRAME_TOKENS, block_size="auto", num_blocks=400, read=read, staging_tokens=staging
        )
        windows = ((1, 4), (0, 6))
        self.sessions = [
            self.cache.open_session(sink_frames=sink, recent_frames=recent, max_chunk_frames=2)
            for sink, recent in windows
        ]
        self.pool, self.read = model.new_text_pool(2, 7), read
        for slot, n in enumerate((7, 3)):
            write_text(model, self.pool, slot, n, seed=slot)

    def step(self, rows, seed):
        chunks = [self.sessions[r].begin(2) for r in rows]
        outs = []
        for timestep in (900.0, 0.0):
            batch = self.cache.batch(chunks)
            assert batch.read == self.read
            x = torch.stack([noise(C, 2, H, W, seed=10 * seed + r) for r in rows])
            times = torch.full((len(rows),), timestep, device="cuda")
            outs.append(self.model(x, times, kv=batch, text_kv=self.pool.rows(rows)))
        assert batch.failed_rows(outs[-1]) == []
        for chunk in chunks:
            chunk.commit()
        return torch.cat(outs)

    def all(self):
        return torch.cat([self.step(rows, i) for i, rows in enumerate([[1], [0, 1], [0, 1], [1, 0], [0, 1], [0, 1]])])


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_a_rollout_is_as_close_to_fp32_as_sdpa_in_bf16(flash_kernel, make_gpu_model, make_paged, write_text, read):
    def run(name, dtype):
        model = make_gpu_model(name, dtype)
        assert model.attention_choices["self"].name == name
        return Pair(model, make_paged, write_text, read).all().float()

    exact = run("sdpa", torch.float32)
    plain = (run("sdpa", torch.bfloat16) - exact).square().mean().sqrt()
    error = (run(flash_kernel, torch.bfloat16) - exact).square().mean().sqrt()
    assert error <= 2 * plain and plain > 0


@torch.no_grad()
def test_q_and_k_are_normalised_and_turned_in_the_pass_that_writes(
    monkeypatch, make_gpu_model, make_paged, write_text
):
    from attention_backend import qk_norm_rope_triton

    cached, norm_rope = [], qk_norm_rope_triton.norm_rope

    def counting(*args):
        cached.append(len(args) == 5 and args[4] is not None)
        return norm_rope(*args)

    monkeypatch.setattr(qk_norm_rope_triton, "norm_rope", counting)
    model = make_gpu_model("sdpa", torch.bfloat16)
    Pair(model, make_paged, write_text, "extent").step([0, 1], 0)
    assert cached == [True] * 2 * model.config.num_layers
    cached.clear()
    whole = WanTransformer(model.config, dtype=torch.bfloat16, device="cuda")
    text = noise(2, 7, model.config.text_dim).bfloat16()
    whole(noise(2, C, 2, H, W), torch.zeros(2, device="cuda"), text)
    assert cached == [False] * model.config.num_layers


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_a_row_has_the_bits_of_its_run_in_other_company(flash_kernel, make_gpu_model, make_paged, write_text, read):
    """The other row of the bucket of two: one that made the same chunks, then one with another history and prompt."""
    model = make_gpu_model(flash_kernel)
    outs = []
    for ahead in (0, 3):
        pair = Pair(model, make_paged, write_text, read)
        for i in range(ahead):
            pair.step([1], 50 + i)
        outs.append(torch.stack([pair.step([0, 1], i)[::2] for i in range(5)]))
    assert torch.equal(*outs)


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_an_exception_inside_a_commit_leaves_the_sessions_as_they_were(
    monkeypatch, flash_kernel, make_gpu_model, make_paged, write_text, read
):
    """P11: raised by the second layer of the committing forward, after the first has written; the windows slide."""
    model = make_gpu_model(flash_kernel)
    clean, hurt = (Pair(model, make_paged, write_text, read) for _ in range(2))
    for i in range(4):
        assert torch.equal(clean.step([0, 1], i), hurt.step([0, 1], i))
    before, free = [session.snapshot() for session in hurt.sessions], hurt.cache.free_blocks
    site, raises = model.blocks[1].self_attn, iter((False, True))  # the denoising forward goes through
    project_qkv = type(site).project_qkv

    def boom(self, *args):
        if self is site and next(raises):
            raise RuntimeError("layer 1")
        return project_qkv(self, *args)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="layer 1"):
        patch.setattr(type(site), "project_qkv", boom)
        hurt.step([0, 1], 4)
    for session in hurt.sessions:
        session.chunk.abort()
    assert hurt.cache.free_blocks == free
    for was, session in zip(before, hurt.sessions, strict=True):
        now = session.snapshot()
        assert now.frames == was.frames and torch.equal(now.windows[0], was.windows[0])
    for i in (4, 5):
        assert torch.equal(clean.step([0, 1], i), hurt.step([0, 1], i))


@torch.no_grad()
def test_gemms_of_few_rows_do_not_depend_on_what_the_other_rows_hold(make_gpu_model):
    model = make_gpu_model("sdpa")
    for rows in range(1, 17):
        first, second = (torch.rand(rows, generator=torch.Generator().manual_seed(i)).cuda() * 1000 for i in range(2))
        second[rows // 2] = first[rows // 2]
        a, b = (model.time_embedding(t.view(rows, 1)) for t in (first, second))
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x[rows // 2], y[rows // 2]), rows


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_a_chunk_waits_for_nothing(flash_kernel, make_gpu_model, make_paged, write_text, read):
    """Begin, two forwards and commit, of a window that fills and then slides."""
    pair = Pair(make_gpu_model(flash_kernel), make_paged, write_text, read)
    model, text = pair.model, pair.pool.rows([0])
    x, timesteps = noise(1, C, 2, H, W), torch.tensor([[900.0], [0.0]], device="cuda")

    def chunk():
        with pair.sessions[0].begin(2) as chunk:
            for timestep in timesteps:
                model(x, timestep, kv=pair.cache.batch([chunk]), text_kv=text)
            chunk.commit()

    for _ in range(4):  # kernels are compiled and tables made on first use; a slid window writes its journal
        chunk()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            chunk()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("read", READS)
def test_compiled_blocks_are_one_graph_and_the_eager_result(flash_kernel, make_gpu_model, make_paged, write_text, read):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    model = make_gpu_model(flash_kernel)
    eager = [Pair(model, make_paged, write_text, read).step([0, 1], i) for i in range(1)]
    model.compile_blocks(backend=counter)
    pair = Pair(model, make_paged, write_text, read)
    compiled = [pair.step([0, 1], i) for i in range(5)]
    assert counter.frame_count == 1
    torch.testing.assert_close(compiled[0], eager[0], rtol=0, atol=2e-2 * float(eager[0].abs().max()))


@torch.no_grad()
def test_a_stream_on_a_device_is_the_stream_on_the_cpu(flash_kernel, make_gpu_model):
    settings = CausalConfig(frames_per_chunk=2, recent_frames=4, sink_frames=1, steps=[1000, 500])
    hidden = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(0))
    outs = []
    for name, device, dtype in (("sdpa", "cpu", torch.float32), (flash_kernel, "cuda", torch.bfloat16)):
        model = make_gpu_model(name, dtype).to(device)
        text, negative = (TextRows(hidden[i : i + 1].to(device, dtype), [7], [0]) for i in range(2))
        outs.append(
            rollout_latents(
                model, text, (H, W), num_chunks=4, settings=settings, negative=negative, guidance_scale=2.0,
                generator=torch.Generator().manual_seed(1),
            ).cpu()
        )  # fmt: skip
    exact, found = outs
    assert (found - exact).square().mean().sqrt() < 0.1 * exact.square().mean().sqrt()


def test_training_has_gradients_on_a_device(make_gpu_model):
    from visual_gen.modules.block_causal import ChunkWindow, teacher_forcing_mask

    grads = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = CausalWanTransformer(make_gpu_model("sdpa").config, trainable=True).to(device)
        mask = teacher_forcing_mask(ChunkWindow(2), 4, FRAME_TOKENS, device)
        latents, clean = noise(1, C, 4, H, W).to(device), noise(1, C, 4, H, W, seed=1).to(device)
        text = model.project_text(torch.ones(1, 7, 10, device=device), [5])
        out = model.forward_masked(
            latents, torch.full((1,), 500.0, device=device), block_mask=mask, text_kv=text, clean=clean
        )
        out.square().mean().backward()
        grads.append([p.grad.cpu() for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        assert (a - b).norm() <= 0.02 * a.norm() + 1e-8
