"""Block-causal masks against a plain loop over frames, at lengths round FlexAttention's own blocks of 128."""

import pytest
import torch
import torch.nn.functional as F

from visual_gen.modules.block_causal import (
    ChunkWindow,
    attend_block_mask,
    diffusion_forcing_mask,
    teacher_forcing_mask,
)

WINDOWS = {
    "unlimited": ChunkWindow(3),
    "first chunk of one": ChunkWindow(3, first_chunk_frames=1),
    "first chunk of four": ChunkWindow(2, first_chunk_frames=4),
    "sliding": ChunkWindow(2, recent_frames=5),
    "sink": ChunkWindow(2, first_chunk_frames=1, sink_frames=1, recent_frames=3),
    "frame by frame": ChunkWindow(1, recent_frames=2),
}
# frames, tokens of a frame: 1, 63, 64, 65, 126 to 130, 192, 256, 258 tokens
SIZES = [(1, 1), (7, 9), (8, 8), (5, 13), (7, 18), (1, 127), (8, 16), (3, 43), (10, 13), (8, 24), (8, 32), (6, 43)]


def chunk_bounds(window: ChunkWindow, num_frames: int):
    start, size = 0, window.first_chunk_frames or window.frames_per_chunk
    while start < num_frames:
        yield range(start, start + size)
        start, size = start + size, window.frames_per_chunk


def kept(window: ChunkWindow, frame: int, chunk: range) -> bool:
    recent = window.recent_frames
    return frame < chunk.stop and (recent is None or frame < window.sink_frames or frame >= chunk.stop - recent)


def dense(window: ChunkWindow, num_frames: int, tokens: int, clean: bool) -> torch.Tensor:
    """Boolean [queries, keys], written frame by frame."""
    halves = 2 if clean else 1
    mask = torch.zeros(halves, num_frames, tokens, halves, num_frames, tokens, dtype=torch.bool)
    for chunk in chunk_bounds(window, num_frames):
        for q in chunk:
            for k in range(num_frames):
                if q >= num_frames or not kept(window, k, chunk):
                    continue
                mask[0, q, :, 0, k] = True
                if clean and k in chunk:
                    mask[1, q, :, 1, k] = True
                elif clean:
                    mask[1, q, :, 0, k] = True
    return mask.view(halves * num_frames * tokens, -1)


def check(window, frames, tokens, clean, grads=False):
    expected = dense(window, frames, tokens, clean)
    mask = (teacher_forcing_mask if clean else diffusion_forcing_mask)(window, frames, tokens, "cpu")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, 2, len(expected), 1, 8, generator=generator).requires_grad_(grads).unbind()
    out = attend_block_mask(*inputs, mask, 0.3)
    plain = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in inputs), expected, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-5)
    assert out.requires_grad == grads


@pytest.mark.parametrize("clean", [False, True], ids=["diffusion forcing", "teacher forcing"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_masks_are_what_a_loop_over_frames_says(window, clean):
    check(window, 10, 13, clean)
    check(window, 8, 3, clean, grads=True)


@pytest.mark.parametrize("clean", [False, True], ids=["diffusion forcing", "teacher forcing"])
def test_every_length(clean):
    for frames, tokens in SIZES:
        check(WINDOWS["sink"], frames, tokens, clean)


def test_rows_of_a_sequence_may_come_in_frames():
    mask = diffusion_forcing_mask(ChunkWindow(2), 4, 5, "cpu")
    q, k, v = torch.randn(3, 2, 20, 1, 8).unbind()
    whole = attend_block_mask(q, k, v, mask, 1.0)
    in_frames = attend_block_mask(*(x.reshape(8, 5, 1, 8) for x in (q, k, v)), mask, 1.0)
    assert torch.equal(in_frames.reshape(whole.shape), whole)
    with pytest.raises(ValueError, match="15 rows, the block mask is for sequences of 20"):
        attend_block_mask(*(x[:1, :15] for x in (q, k, v)), mask, 1.0)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0,), "frames_per_chunk is 0"),
        ((3, 0), "first_chunk_frames is 0"),
        ((3, None, -1), "sink_frames is -1"),
        ((3, None, 0, 2), "recent_frames is 2, below the 3 frames of a chunk"),
        ((1, 4, 0, 3), "recent_frames is 3, below the 4 frames"),
        ((True,), "frames_per_chunk is True"),
    ],
)
def test_windows_that_no_cache_would_take_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        ChunkWindow(*sizes)


def test_a_mask_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no rows"):
        diffusion_forcing_mask(ChunkWindow(1), 0, 6, "cpu")


@pytest.mark.gpu
def test_a_mask_of_a_whole_video_takes_little_memory():
    """21 frames of 1 560 tokens, clean and noisy: densely 4 GiB."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = teacher_forcing_mask(ChunkWindow(3), 21, 1560, "cuda")
    assert torch.cuda.max_memory_allocated() - before < 2**30
    small, expected = teacher_forcing_mask(ChunkWindow(3), 6, 43, "cuda"), dense(ChunkWindow(3), 6, 43, True)
    assert mask.seq_lengths == (65520, 65520)
    blocks = F.pad(expected, (0, 124, 0, 124)).view(5, 128, 5, 128).any(3).any(1)
    assert torch.equal(small.to_dense()[0, 0].bool().cpu(), blocks)


@pytest.mark.gpu
@pytest.mark.parametrize("frames_tokens", [(8, 16), (3, 43), (9, 60)])
def test_the_compiled_kernel_and_its_gradients(frames_tokens):
    window = WINDOWS["sink"]
    expected = dense(window, *frames_tokens, clean=True).cuda()
    mask = teacher_forcing_mask(window, *frames_tokens, "cuda")
    inputs = [torch.randn(1, len(expected), 2, 64, device="cuda", requires_grad=True) for _ in "qkv"]
    out = attend_block_mask(*inputs, mask, 0.125)
    plain = F.scaled_dot_product_attention(*(x.double().transpose(1, 2) for x in inputs), expected, scale=0.125)
    plain = plain.transpose(1, 2)
    torch.testing.assert_close(out.double(), plain, rtol=0, atol=5e-3)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((plain * weight).sum(), inputs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-2)
