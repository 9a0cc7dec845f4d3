"""Both formulations of the pad rows on FA4: against attention over all rows, compiled, without syncs, and in Wan.

Every test runs on the CPU with the folder's stand-in in the kernel package's place, and the same lines on a device.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import AttentionMetadataState, AttentionSpec, GraphBuffers, merge_pad_rows
from attention_backend.flash_attn4 import FlashAttention4Backend
from attention_backend.sdpa import SDPABackend
from visual_gen.models.wan import WanConfig
from visual_gen.models.wan.block import WanBlock
from visual_gen.modules.attention import Attention
from visual_gen.modules.rope import RotaryTable

TEXT_ROWS = 512
LAYOUTS = {
    "repeated_key": [(512, 126), (120, 1), (127, 0)],
    "merge": [(*(512,) * 7, n) for n in (126, 1, 0)],  # where one text of many has pads
}
MOST_TEXTS = 8
CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=128, in_channels=4, out_channels=4, text_dim=64, freq_dim=16, ffn_dim=512,
    num_layers=1, rope_max_seq_len=32,
)  # fmt: skip


class OnCPU(FlashAttention4Backend):
    unavailable_reason = classmethod(lambda cls: None)
    unsupported_reasons = classmethod(lambda cls, spec: [])


@pytest.fixture(params=["stand-in", pytest.param("device", marks=pytest.mark.gpu)])
def place(request, need_device_of):
    """(device, dtype, backend class)."""
    torch._dynamo.reset()
    if request.param == "stand-in":
        request.getfixturevalue("kernel")
        yield "cpu", torch.float32, OnCPU
    else:
        need_device_of("flash_attn4")
        yield "cuda", torch.bfloat16, FlashAttention4Backend
    torch._dynamo.reset()


def plain(q, k, v, scale):
    """The plain computation, every step rounded to the dtype: q [S, H, D], k and v [L, Hkv, D]."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    return (torch.softmax(scale * (q @ k.transpose(1, 2)), dim=-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("formulation", LAYOUTS)
@pytest.mark.parametrize(
    "lens, heads, kv_heads, head_dim, scale",
    [
        ((512, 126), 4, 4, 128, None),
        ((300, 126), 4, 4, 128, None),
        ((120, 1), 4, 4, 128, 0.3),
        ((511, 512, 0, 127, 128, 255), 4, 4, 128, None),
        ((200, 512, 7), 8, 2, 128, None),
        ((300, 1), 4, 4, 64, None),
    ],
)
def test_either_formulation_equals_attention_over_all_rows(
    place, oracle, formulation, lens, heads, kv_heads, head_dim, scale
):
    """At most twice the error of the plain low-precision computation over the padded rows."""
    device, dtype, backend_class = place
    spec = AttentionSpec(
        "cross_text", heads, head_dim, dtype, device, num_kv_heads=kv_heads, softmax_scale=scale, needs={"lse"}
    )
    backend = backend_class(spec)
    gen = torch.Generator(device).manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, head_dim, generator=gen, device=device, dtype=dtype)

    q = rand(len(lens), 300, heads)
    padded, pad = rand(2, len(lens), TEXT_ROWS, kv_heads), rand(2, kv_heads)
    for b, n in enumerate(lens):
        padded[:, b, n:] = pad[:, None]
    pads = AttentionMetadataState().packed_pad_kv("cross_text", lens, TEXT_ROWS, device, formulation=formulation)
    k, v = (torch.cat([x[b, :n] for b, n in enumerate(pads.packed.kv_lens)]) for x in padded)
    if formulation == "merge":
        out, lse = backend.forward(q, k, v, pads.packed, return_lse=True)
        out = merge_pad_rows(q, out, lse, *pad, pads, backend.spec.softmax_scale)
    else:
        out = backend.forward(q, k, v, pads.packed)
    for b in range(len(lens)):
        sequence = (q[b], padded[0, b], padded[1, b], backend.spec.softmax_scale)
        expected, _ = oracle(*sequence)
        limit = 2 * (plain(*sequence) - expected).abs().max().item()
        limit = max(limit, torch.finfo(dtype).eps * expected.abs().max().item())
        error = (out[b].double() - expected).abs().max().item()
        assert error <= limit, f"sequence {b} of {lens[b]} keys: off by {error}, limit {limit}"  # false for NaN too


def test_the_log_sum_exp_counts_a_repeated_key(place, oracle):
    device, dtype, backend_class = place
    backend = backend_class(AttentionSpec("cross_text", 2, 128, dtype, device))
    q, k, v = (torch.randn(n, 2, 128, device=device, dtype=dtype) for n in (600, 10, 10))
    pads = AttentionMetadataState().packed_pad_kv("cross_text", [6, 2], 512, device, formulation="repeated_key")
    _, lse = backend.forward(q.unflatten(0, (2, 300)), k, v, pads.packed, return_lse=True)
    rows = torch.cat([k[:7], k[6:7].expand(505, -1, -1)])
    torch.testing.assert_close(lse[0].double(), oracle(q[:300], rows, rows, 128**-0.5)[1], atol=1e-3, rtol=0)


class Wan:
    """One Wan block with real projections and QK norm, and text for up to eight prompts."""

    def __init__(self, device, dtype, backend_class):
        self.device, self.dtype = device, dtype
        gen = torch.Generator().manual_seed(0)
        dim, tokens = CONFIG.hidden_size, 2 * 8 * 8
        self.x = torch.randn(MOST_TEXTS, tokens, dim, generator=gen).to(device, dtype)
        self.modulation = (0.1 * torch.randn(MOST_TEXTS, 1, 6, dim, generator=gen)).to(device)
        self.text = torch.randn(MOST_TEXTS * TEXT_ROWS, dim, generator=gen).to(device, dtype)
        table = RotaryTable(CONFIG.attention_head_dim, CONFIG.rope_max_seq_len)
        self.rotary = table.grid(2, 8, 8, torch.device(device))
        self.backend_class = backend_class
        torch.manual_seed(1)
        self.weights = self._new("padded", torch.float32, "cpu").state_dict()

    def _new(self, cross_kv, dtype, device, backend_class=None):
        spec = AttentionSpec("self", CONFIG.num_attention_heads, CONFIG.attention_head_dim, dtype, device)
        make = backend_class or OnCPU
        backends = {role: make(replace(spec, role=role)) for role in ("self", "cross_text")}
        return WanBlock(CONFIG, backends, AttentionMetadataState(), cross_kv).requires_grad_(False)

    def block(self, cross_kv, *, precise=False):
        """precise: fp32 on SDPA."""
        if precise:
            block = self._new(cross_kv, torch.float32, self.device, SDPABackend).to(self.device)
        else:
            block = self._new(cross_kv, self.dtype, self.device, self.backend_class).to(self.device, self.dtype)
            block.norm2.float()  # fp32 as the whole model keeps them
            block.scale_shift_table.data = block.scale_shift_table.data.float()
        block.load_state_dict(self.weights)
        return block

    def text_kv(self, block, lens, **options):
        site: Attention = block.cross_text
        rows = self.text[: sum(lens)].to(site.to_kv.weight.dtype)
        return site.make_cross_kv(rows.split(lens), TEXT_ROWS, torch.zeros_like(rows[:1]), **options)

    def run(self, block, text_kv, batch, first=0):
        weight, rows = block.cross_text.to_kv.weight, slice(first, first + batch)
        return block(self.x[rows].to(weight.dtype), self.modulation[rows], self.rotary, text_kv)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@torch.no_grad()
def test_pad_exact_equals_padded_in_a_wan_block(place):
    wan = Wan(*place)
    blocks = {mode: wan.block(mode) for mode in ("padded", "packed", "packed_pad_exact")}
    precise = wan.block("padded", precise=True)
    for formulation, layouts in LAYOUTS.items():
        for lens in layouts:
            expected = wan.run(precise, wan.text_kv(precise, lens), len(lens))
            short = [n < TEXT_ROWS for n in lens]
            for rows in ([True] * len(lens), short):
                error = {}
                for mode, block in blocks.items():
                    out = wan.run(block, wan.text_kv(block, lens), len(lens))
                    error[mode] = relative(out[rows], expected[rows])
                assert error["packed_pad_exact"] <= max(2 * error["padded"], 1e-5), (lens, error)
            assert error["packed"] > 3 * max(error["packed_pad_exact"], 1e-5), (lens, error)
            assert wan.text_kv(blocks["packed_pad_exact"], lens).metadata.formulation == formulation


@torch.no_grad()
def test_packed_text_equals_masked_attention_over_padded_text_in_a_wan_block(place):
    """The oracle has all rows, large values behind each text, and a mask of its lengths."""
    wan = Wan(*place)
    padded, packed, precise = wan.block("padded"), wan.block("packed"), wan.block("padded", precise=True)
    state = AttentionMetadataState()
    for lens in ((500, 5), (512, 126), (1, 120), (0, 7)):

        def masked(block, lens=lens):
            kv = wan.text_kv(block, lens)
            for b, n in enumerate(lens):
                kv.k[b, n:], kv.v[b, n:] = 1e4, 1e4
            return replace(kv, metadata=state.padded_kv("cross_text", lens, TEXT_ROWS, wan.device))

        expected = wan.run(precise, masked(precise), 2)
        error = relative(wan.run(packed, wan.text_kv(packed, lens), 2), expected)
        assert error <= max(2 * relative(wan.run(padded, masked(padded), 2), expected), 1e-5), lens


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_a_branch_beside_another_gives_what_it_gives_alone(place, mode):
    wan = Wan(*place)
    block = wan.block(mode)
    for lens in ((512, 126), (60, 1)):
        together = wan.run(block, wan.text_kv(block, lens), 2)
        for b, n in enumerate(lens):
            rows = wan.text[sum(lens[:b]) :][:n].to(wan.dtype)
            alone = block.cross_text.make_cross_kv([rows], TEXT_ROWS, torch.zeros_like(rows[:1]))
            error = relative(wan.run(block, alone, 1, first=b), together[b : b + 1])
            assert error <= (1e-2 if wan.dtype == torch.bfloat16 else 1e-5), (lens, b)


@torch.no_grad()
@pytest.mark.parametrize("formulation", LAYOUTS)
def test_a_wan_block_compiles_fullgraph_once_for_all_layouts_of_a_formulation(place, formulation):
    wan = Wan(*place)
    block = wan.block("packed_pad_exact")
    counter = CompileCounterWithBackend("inductor" if wan.device == "cuda" else "aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for lens in LAYOUTS[formulation]:
        kv = wan.text_kv(block, lens, fixed_capacity=True)
        assert kv.k.shape[0] == len(lens) * TEXT_ROWS
        got = wan.run(compiled, kv, len(lens))
        expected = wan.run(block, wan.text_kv(block, lens), len(lens))
        assert relative(got, expected) <= (1e-2 if wan.dtype == torch.bfloat16 else 1e-5), lens
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_step_with_a_new_layout_waits_for_nothing(place):
    wan = Wan(*place)
    block = wan.block("packed_pad_exact")
    for layouts in LAYOUTS.values():  # compiles the kernels
        wan.run(block, wan.text_kv(block, layouts[0]), len(layouts[0]))

    @contextlib.contextmanager
    def no_sync():
        if wan.device != "cuda":
            yield
            return
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with no_sync():
        for layouts in LAYOUTS.values():
            kv = wan.text_kv(block, layouts[1])
            for _ in range(2):
                wan.run(block, kv, len(layouts[1]))
    state = block.cross_text.attention_metadata_state
    assert (state.builds, state.device_copies) == (4, 4)


@torch.no_grad()
@pytest.mark.parametrize(
    "mode, layouts",
    [
        ("padded", [(512, 126), (120, 1), (300, 0)]),
        ("packed", [(512, 126), (120, 1), (300, 0)]),
        ("packed_pad_exact", LAYOUTS["repeated_key"]),
        ("packed_pad_exact", [*LAYOUTS["merge"], (126, *(512,) * 7)]),
    ],
    ids=["padded", "packed", "repeated_key", "merge"],
)
def test_a_captured_block_follows_the_layouts_copied_into_its_buffers(place, mode, layouts):
    """Its buffers hold the first layout when it is captured: which rows have pads must not be a part of it.

    On the CPU, where nothing can be captured, the block is called on the buffers in place of every replay.
    """
    wan = Wan(*place)
    block, batch = wan.block(mode), len(layouts[0])

    def text_kv(lens):
        return wan.text_kv(block, lens, fixed_capacity=True)

    buffers = GraphBuffers(text_kv(layouts[0]))
    out = wan.run(block, buffers.entry, batch)  # compiles the kernels, which a capture must not do
    if wan.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = wan.run(block, buffers.entry, batch)
    seen = []
    for lens in (*layouts, layouts[0], layouts[1]):  # the last two are hits in the state
        current = text_kv(lens)
        buffers.copy_from(current)
        if wan.device == "cuda":
            graph.replay()
        else:
            out = wan.run(block, buffers.entry, batch)
        expected = wan.run(block, current, batch)
        assert torch.equal(out, expected) if wan.device == "cuda" else relative(out, expected) < 1e-6, lens
        seen.append(out.clone())
    count = len(layouts)
    assert torch.equal(seen[0], seen[count]) and torch.equal(seen[1], seen[count + 1])
    assert not any(torch.equal(seen[0], other) for other in seen[1:count])
