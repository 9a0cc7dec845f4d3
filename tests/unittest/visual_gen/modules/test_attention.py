"""The Attention module on its own, as another video transformer would use it."""

import pytest
import torch

from attention_backend import (
    AttentionBackend,
    AttentionBackendError,
    AttentionMetadataState,
    AttentionSpec,
    PackedKV,
    selection,
)
from attention_backend.kv_cache import ContiguousKVCache
from attention_backend.sdpa import SDPABackend
from visual_gen import Attention, WanTransformer
from visual_gen.models.wan import WanConfig
from visual_gen.modules.block_causal import ChunkWindow, diffusion_forcing_mask
from visual_gen.modules.rope import RotaryTable, apply_rotary

HEADS, HEAD_DIM, HIDDEN = 3, 12, 30


def dense_attention(q, k, v):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT / HEAD_DIM**0.5).softmax(-1) @ v).transpose(1, 2)


def ragged(rows, lens, padded_len):
    """make_cross_kv's arguments from the real rows of all sequences and one pad row [sum(lens) + 1, hidden]."""
    *real, pad = rows.split([*lens, 1])
    return real, padded_len, pad


def rms(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@torch.no_grad()
def test_self_attention_is_projection_norm_rotation_attention_projection():
    torch.manual_seed(0)
    attn = Attention(HIDDEN, HEADS, HEAD_DIM, role="self")
    attn.qk_norm_weight.uniform_(0.5, 1.5)
    rotary = RotaryTable(HEAD_DIM, 8).grid(2, 3, 2, torch.device("cpu"))
    x = torch.randn(2, 12, HIDDEN)
    q, k, v = (x.double() @ attn.to_qkv.weight.double().T + attn.to_qkv.bias.double()).chunk(3, -1)
    q, k = rms(q, attn.qk_norm_weight[0]), rms(k, attn.qk_norm_weight[1])
    q, k, v = (t.unflatten(-1, (HEADS, HEAD_DIM)) for t in (q, k, v))
    turned = []
    for t in (q, k):
        even, odd = t[..., 0::2], t[..., 1::2]
        cos, sin = rotary.real.double(), rotary.imag.double()
        turned.append(torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2))
    expected = dense_attention(*turned, v).flatten(2) @ attn.to_out.weight.double().T + attn.to_out.bias.double()
    torch.testing.assert_close(attn(x, rotary=rotary).double(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("lens", [(4, 9), (9, 9), (0, 5), (1, 1)])
def test_cross_attention_modes(lens):
    torch.manual_seed(1)
    x, rows = torch.randn(2, 7, HIDDEN), torch.randn(sum(lens) + 1, HIDDEN)
    sites = {m: Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv=m) for m in
             ("padded", "packed", "packed_pad_exact")}  # fmt: skip
    for site in sites.values():
        site.load_state_dict(sites["padded"].state_dict())
    out = {m: s(x, s.make_cross_kv(*ragged(rows, lens, 9))) for m, s in sites.items()}
    torch.testing.assert_close(out["packed_pad_exact"], out["padded"], rtol=0, atol=1e-5)
    padded = sites["padded"]
    k, v = padded.project_kv(rows)
    starts = (0, lens[0])
    for b, n in enumerate(lens):
        real = slice(starts[b], starts[b] + n)
        key = torch.cat([k[real], k[-1:].expand(9 - n, -1, -1)])[None]
        value = torch.cat([v[real], v[-1:].expand(9 - n, -1, -1)])[None]
        q = padded.project_q(x[b : b + 1])
        expected = padded.to_out(dense_attention(q, key, value).float().flatten(2))
        torch.testing.assert_close(out["padded"][b : b + 1], expected, rtol=0, atol=1e-5)


class Repeating(SDPABackend):
    """Counts a repeated last key by writing it out; keeps what it was called with."""

    name = "repeating"

    def __init__(self, spec):
        super().__init__(spec)
        self.calls = []

    @classmethod
    def supports_repeated_last_key(cls):
        return True

    def attend(self, q, k, v, metadata, *, causal, return_lse):
        repeats_to = getattr(metadata, "last_key_repeats_to", None)
        self.calls.append((type(metadata).__name__, repeats_to, return_lse))
        if repeats_to is not None:
            rows = [x.split(metadata.kv_lens) for x in (k, v)]
            k, v = (torch.stack([torch.cat([r, r[-1:].expand(repeats_to - len(r), -1, -1)]) for r in x]) for x in rows)
            metadata = None
        return super().attend(q, k, v, metadata, causal=causal, return_lse=return_lse)


@torch.no_grad()
@pytest.mark.parametrize(
    ("lens", "rows", "call", "signature"),
    [
        ((300, 126), 428, ("PackedKV", 512, False), ("packed_pad", "repeated_key", "packed", (3,), 512, None, 512)),
        ((120, 0), 122, ("PackedKV", 512, False), ("packed_pad", "repeated_key", "packed", (3,), 512, None, 512)),
        ((512, 126), 639, ("PackedKV", 512, False), ("packed_pad", "repeated_key", "packed", (3,), 512, None, 512)),
        (
            (*(512,) * 7, 126), 7 * 512 + 126, ("PackedKV", None, True),
            ("packed_pad", "merge", "packed", (9,), 512, None, None),
        ),
        ((500, 400), 1024, ("NoneType", None, False), ("dense", 2, 512)),
        ((512, 512), 1024, ("NoneType", None, False), ("dense", 2, 512)),
    ],
)  # fmt: skip
def test_pad_exact_takes_the_formulation_of_the_layout_where_the_backend_has_both(lens, rows, call, signature):
    torch.manual_seed(1)
    x, text = torch.randn(len(lens), 7, HIDDEN), torch.randn(sum(lens) + 1, HIDDEN)
    padded = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    backend = Repeating(padded.spec())
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv="packed_pad_exact", backend=backend)
    site.load_state_dict(padded.state_dict())
    kv = site.make_cross_kv(*ragged(text, lens, 512))
    expected = padded(x, padded.make_cross_kv(*ragged(text, lens, 512)))
    torch.testing.assert_close(site(x, kv), expected, rtol=0, atol=1e-5)
    assert kv.k.flatten(0, -3).shape[0] == kv.v.flatten(0, -3).shape[0] == rows
    assert backend.calls == [call]
    assert kv.formulation == (signature[1] if signature[0] == "packed_pad" else "padded")
    assert site.attention_metadata_state.signature() == (("cross_text", signature),)


@torch.no_grad()
def test_pack_ragged_kv_is_the_same_with_and_without_the_state():
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    k, v = torch.randn(3, 6, HEADS, HEAD_DIM), torch.randn(3, 6, HEADS, HEAD_DIM)
    state = AttentionMetadataState()
    lens = [2, 6, 0]
    with_state = site.pack_ragged_kv(k, v, lens, state)
    without = site.pack_ragged_kv(k, v, lens)
    for a, b in zip(with_state[:2], without[:2], strict=True):
        assert a.shape == (8, HEADS, HEAD_DIM) and torch.equal(a, b)
    assert torch.equal(with_state[0], torch.cat([k[0, :2], k[1]]))
    assert type(with_state[2]) is PackedKV
    assert with_state[2].cu_seqlens_kv.tolist() == without[2].cu_seqlens_kv.tolist() == [0, 2, 8, 8]
    lens[0] = 1  # the caller's list changes: another layout, never a stale entry
    assert site.pack_ragged_kv(k, v, lens, state)[2].cu_seqlens_kv.tolist() == [0, 1, 7, 7]
    assert (state.builds, state.hits) == (2, 0)
    assert site.pack_ragged_kv(k, v, [2, 6, 0], state)[2] is with_state[2]
    assert (state.builds, state.hits, state.device_copies) == (2, 1, 2)


@torch.no_grad()
def test_a_mask_that_is_no_prefix_keeps_exactly_the_marked_rows():
    torch.manual_seed(2)
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    q, k, v = (torch.randn(3, n, HEADS, HEAD_DIM) for n in (5, 4, 4))
    mask, state = [[1, 0, 1, 1], [0, 0, 0, 0], [False, False, True, False]], AttentionMetadataState()
    keys, values, metadata = site.pack_ragged_kv(k, v, attention_metadata_state=state, kv_mask=mask)
    assert type(metadata) is PackedKV and metadata.kv_lens == (3, 0, 1) and metadata.max_seqlen_kv == 4
    assert torch.equal(keys, torch.cat([k[0, [0, 2, 3]], k[2, [2]]]))
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1)) / HEAD_DIM**0.5
    hidden = ~torch.tensor(mask, dtype=torch.bool)[:, None, None]
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0) @ v.double().transpose(1, 2)
    out = site.backend.forward(q, keys, values, metadata)
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=0, atol=1e-5)

    again = site.pack_ragged_kv(k, v, None, state, kv_mask=torch.tensor(mask).bool())
    assert again[2] is metadata and (state.builds, state.device_copies) == (1, 1)
    mask[0] = [1, 1, 0, 1]  # changed in place: another layout
    assert torch.equal(site.pack_ragged_kv(k, v, None, state, kv_mask=mask)[0][:3], k[0, [0, 1, 3]])
    prefix = site.pack_ragged_kv(k, v, kv_mask=[[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    for a, b in zip(prefix[:2], site.pack_ragged_kv(k, v, [2, 4, 0])[:2], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (None, "either kv_lens or kv_mask"),
        ([1, 0, 1, 1], r"kv_mask is \[1, 0, 1, 1\]; it must be a row of bools for each sequence"),
        ([[1, 0, 1]] * 2, r"2 rows of \[3\] entries; expected 2 rows of 4"),
        ([[1, 0, 1, 1]], "1 rows of .*expected 2 rows of 4"),
        ([[1, 0, 1, 1], [1, 0]], r"2 rows of \[2, 4\] entries"),
        ([[1, 0, 1, 2], [1, 0, 1, 1]], r"kv_mask\[0\]\[3\] is 2"),
        ([[1, 0, 1, 1], [1, 0.5, 1, 1]], r"kv_mask\[1\]\[1\] is 0.5"),
        (torch.ones(2, 4), r"kv_mask\[0\]\[0\] is 1.0; a mask's entries must be bools"),
        (torch.ones(2, 4, dtype=torch.bool, device="meta"), r"tensor on meta; .*known on the host.*kv_mask.cpu\(\)"),
    ],
)
def test_masks_that_cannot_be_read_are_refused_with_the_way_out(mask, message):
    site, state = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text"), AttentionMetadataState()
    k = torch.randn(2, 4, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=message):
        site.pack_ragged_kv(k, k, None, state, kv_mask=mask)
    assert state.builds == 0


@pytest.mark.gpu
@torch.no_grad()
def test_a_mask_on_the_host_waits_for_nothing_and_one_on_the_device_is_refused():
    site = Attention(256, 2, 128, role="cross_text").to("cuda", torch.bfloat16)
    q, k, v = (torch.randn(2, n, 2, 128, device="cuda", dtype=torch.bfloat16) for n in (64, 4, 4))
    state = AttentionMetadataState()

    def attend(mask):
        return site.backend.forward(q, *site.pack_ragged_kv(k, v, None, state, kv_mask=mask))

    attend([[1, 1, 1, 1], [1, 0, 0, 0]])  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attend([[1, 0, 1, 1], [0, 1, 0, 0]])
        with pytest.raises(ValueError, match=r"kv_mask is a tensor on cuda:0; .*before the steps, with kv_mask.cpu"):
            attend(torch.ones(2, 4, dtype=torch.bool, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows = [0, 2, 3]
    scores = torch.einsum("shd,lhd->hsl", q[0].double(), k[0, rows].double()) * 128**-0.5
    expected = torch.einsum("hsl,lhd->shd", scores.softmax(-1), v[0, rows].double())
    torch.testing.assert_close(out[0].double(), expected, atol=2e-2, rtol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_sequences_that_share_rows_share_their_projection(mode):
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv=mode)
    rows, pad = [torch.randn(n, HIDDEN) for n in (5, 2, 9)], torch.randn(1, HIDDEN)
    index, projected = (1, 0, 1, 1), []
    site.to_kv.register_forward_hook(lambda _, args, __: projected.append(len(args[0])))
    shared = site.make_cross_kv(rows, 9, pad, index=index)
    assert projected == [2, 5] + [1] * (mode != "packed")
    each = site.make_cross_kv([rows[i] for i in index], 9, pad)
    assert torch.equal(shared.k, each.k) and torch.equal(shared.v, each.v)
    for bad in ((0, 3), (-1,), ()):
        with pytest.raises(ValueError, match="index"):
            site.make_cross_kv(rows, 9, pad, index=bad)


def test_pack_ragged_kv_refuses_what_it_cannot_pack():
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    k = torch.randn(2, 6, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"kv_lens\[0\] is 7; it must be between 0 and 6"):
        site.pack_ragged_kv(k, k, [7, 1])
    with pytest.raises(ValueError, match="1 lengths for k, v of batch 2"):
        site.pack_ragged_kv(k, k, [3])
    with pytest.raises(ValueError, match="must be host ints.*tolist"):
        site.pack_ragged_kv(k, k, torch.tensor([3, 3]))


def test_varlen_is_read_from_the_backend_as_wrapped():
    """A wrapper may take packing away; the module asks the instance that it holds, not the class it was named after."""

    class Wrapper(AttentionBackend):
        name = "wrapper"

        def __init__(self, inner):
            self.inner, self.spec = inner, inner.spec

        def supports_varlen(self):
            return self.inner.supports_varlen() and self.spec.num_heads % 2 == 0  # cannot split 3 heads in two

        def attend(self, *args, **kwargs):
            return self.inner.attend(*args, **kwargs)

    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    assert site.backend.supports_varlen()
    wrapped = Wrapper(site.backend)
    site.backend = wrapped
    k = torch.randn(1, 2, HEADS, HEAD_DIM)
    with pytest.raises(AttentionBackendError, match="wrapper cannot read packed K/V"):
        site.pack_ragged_kv(k, k, [1])
    with pytest.raises(AttentionBackendError, match="needs 'varlen' and wrapper has no support"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv="packed", backend=wrapped)


def test_a_named_backend_is_chosen_again_when_the_module_is_cast():
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="self")
    first = site.backend
    site.to(torch.bfloat16)
    assert site.backend is not first and site.backend.spec.dtype == torch.bfloat16
    x = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16)
    assert site(x).dtype == torch.bfloat16


@pytest.fixture
def fast_without_gradients(monkeypatch):
    """As on a GPU: the first backend in auto's order is there and is inference-only."""

    class Fast(SDPABackend):
        name = "flash_attn4"

        @classmethod
        def supports_grad(cls):
            return False

    monkeypatch.setitem(selection._classes, "flash_attn4", Fast)


def test_auto_takes_a_backend_that_trains_where_the_site_needs_gradients(fast_without_gradients):
    fast = Attention(HIDDEN, HEADS, HEAD_DIM, role="self")
    assert fast.backend.selection.name == "flash_attn4"
    x = torch.randn(1, 5, HIDDEN, requires_grad=True)
    with pytest.raises(ValueError, match="inference-only"):
        fast(x)
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="self", needs={"grad"})
    assert site.backend.selection.name == "sdpa"
    site(x).square().sum().backward()
    assert x.grad.abs().sum() > 0 and site.to_qkv.weight.grad.abs().sum() > 0


def test_a_whole_model_trains_where_it_is_made_trainable(fast_without_gradients):
    config = WanConfig(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16,
        ffn_dim=40, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    names = [{c.name for c in WanTransformer(config, trainable=t).attention_choices.values()} for t in (False, True)]
    assert names == [{"flash_attn4"}, {"sdpa"}]
    model = WanTransformer(config, trainable=True)
    model(torch.randn(1, 4, 2, 4, 4), torch.tensor([5.0]), torch.randn(1, 3, 10)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_work_after_inference_on_the_same_grid_and_layout():
    config = WanConfig(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16,
        ffn_dim=40, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    for mode in ("padded", "packed", "packed_pad_exact"):
        model = WanTransformer(config, attention={"cross_kv": mode})
        inputs = (torch.randn(2, 4, 2, 4, 4), torch.tensor([5.0, 7.0]), torch.randn(2, 6, 10))
        with torch.inference_mode():
            model(*inputs, text_lens=(3, 6))
        model(*inputs, text_lens=(3, 6)).sum().backward()
        assert model.blocks[0].self_attn.to_qkv.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_arguments_that_a_site_cannot_use_are_refused():
    x, rows = torch.randn(1, 4, HIDDEN), [torch.randn(2, HIDDEN)]
    text = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text")
    kv = text.make_cross_kv(rows, 2)
    with pytest.raises(ValueError, match="leave kv out"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="self")(x, kv)
    cache = ContiguousKVCache(1, 1, 2, 4, HEADS, HEAD_DIM, torch.float32, "cpu")
    layer, mask = cache.batch(cache.begin(1)).layer(0), diffusion_forcing_mask(ChunkWindow(1), 1, 4, "cpu")
    with pytest.raises(ValueError, match="set cached = CachedAttention"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="self")(x, cache=layer)
    with pytest.raises(ValueError, match="both say what is visible"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="self")(x, cache=layer, block_mask=mask)
    for given in ({"cache": layer}, {"block_mask": mask}):
        with pytest.raises(ValueError, match="a 'cross_text' site sees all"):
            text(x, kv, **given)
    with pytest.raises(ValueError, match="leave rotary out"):
        text(x, kv, rotary=torch.ones(4, 1, 6, dtype=torch.complex64))
    with pytest.raises(ValueError, match="kv is a NoneType; it must be a CrossKV"):
        text(x)
    with pytest.raises(ValueError, match="no Q of its own"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_image")(x, kv)
    with pytest.raises(ValueError, match=r"lengths of rows\[0\] is 2; it must be between 0 and 1"):
        text.make_cross_kv(rows, 1)
    with pytest.raises(ValueError, match="give pad_row"):
        text.make_cross_kv(rows, 3)
    with pytest.raises(ValueError, match=r"k has shape \(2, .* v \(3"):
        text.pack_ragged_kv(torch.zeros(2, 4, HEADS, HEAD_DIM), torch.zeros(3, 4, HEADS, HEAD_DIM), [1, 1])


def test_a_backend_given_as_an_instance_must_fit_the_site():
    class NoLSE(SDPABackend):
        name = "no_lse"

        @classmethod
        def supports_lse(cls):
            return False

    spec = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text").spec()
    with pytest.raises(AttentionBackendError, match="needs 'lse' and no_lse has no support"):
        Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv="packed_pad_exact", backend=NoLSE(spec))
    with pytest.raises(AttentionBackendError, match=r"built for .*\(3, 3, 12\); this site has \(2, 2, 15\)"):
        Attention(HIDDEN, 2, 15, role="cross_text", backend=SDPABackend(spec))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
@pytest.mark.parametrize("lens", [(4, 9), (9, 9)])
def test_keys_and_values_hold_no_more_memory_than_their_rows(mode, lens):
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv=mode)
    kv = site.make_cross_kv(*ragged(torch.randn(sum(lens) + 1, HIDDEN), lens, 9))
    for x in (kv.k, kv.v, kv.k_pad, kv.v_pad):
        assert x is None or x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": "cross"}, "role is 'cross'"),
        ({"role": "self", "cross_kv": "dense"}, "cross_kv is 'dense'"),
        ({"role": "self", "cross_kv": "packed"}, "cross_kv is 'packed' at a 'self' site"),
        ({"role": "self", "kv_size": 8}, "kv_size is 8 at a 'self' site"),
        ({"role": "self", "needs": {"speed"}}, "needs has .'speed'."),
        ({"role": "self", "qk_norm": "layer"}, "qk_norm is 'layer'"),
        ({"role": "self", "backend": "flash_attn_4"}, "did you mean 'flash_attn4'"),
        ({"role": "x", "backend": SDPABackend(AttentionSpec("self", 3, 12, torch.float32, "cpu"))}, "role is 'x'"),
    ],
)
def test_unknown_settings_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Attention(HIDDEN, HEADS, HEAD_DIM, **arguments)


def test_rotary_table_turns_each_axis_by_its_own_position():
    table = RotaryTable(20, 64)
    grid = table.grid(3, 4, 5, torch.device("cpu"))
    assert grid.shape == (60, 1, 10)
    token = (2 * 4 + 3) * 5 + 4  # frame 2, row 3, column 4
    temporal = [2 * 10000 ** (-2 * i / 8) for i in range(4)]
    spatial = [[p * 10000 ** (-2 * i / 6) for i in range(3)] for p in (3, 4)]
    expected = torch.tensor(temporal + spatial[0] + spatial[1])
    torch.testing.assert_close(grid[token, 0], torch.polar(torch.ones(10), expected), rtol=0, atol=1e-6)
    assert table.grid(3, 4, 5, torch.device("cpu")) is grid
    x = torch.randn(1, 60, 2, 20)
    torch.testing.assert_close(apply_rotary(x.clone(), grid).norm(dim=-1), x.norm(dim=-1))


def test_rotary_of_frames_is_the_grids_at_their_absolute_place():
    table, cpu = RotaryTable(20, 12), torch.device("cpu")
    whole = table.grid(12, 4, 5, cpu).unflatten(0, (12, 20))
    runs = [(3, 2), (0, 1), (10, 2)]
    found = table.frames(runs, 4, 5, cpu)
    assert torch.equal(found, torch.cat([whole[first : first + count] for first, count in runs]))
    assert table.frames(runs, 4, 5, cpu) is found
    for first in range(30):  # more than it keeps
        assert torch.equal(table.frames([(first % 12, 1)], 4, 5, cpu), whole[first % 12 :][:1])
    for run in ((11, 2), (-1, 2)):
        with pytest.raises(ValueError, match="do not all lie in the rotary table of rope_max_seq_len 12"):
            table.frames([(0, 1), run], 4, 5, cpu)


def test_an_extended_rotary_table_has_the_bits_of_a_longer_one():
    table, longer, cpu = RotaryTable(20, 12), RotaryTable(20, 5000), torch.device("cpu")
    assert torch.equal(table.frames([(10, 2)], 4, 5, cpu), longer.frames([(10, 2)], 4, 5, cpu))
    table.extend_frames(5000)
    for runs in ([(10, 3)], [(0, 1), (4997, 3)]):
        assert torch.equal(table.frames(runs, 4, 5, cpu), longer.frames(runs, 4, 5, cpu))
    assert torch.equal(table.grid(30, 4, 5, cpu), longer.grid(30, 4, 5, cpu))
    table.extend_frames(100)
    assert table.max_frames == 5000, "it is never made shorter, as other streams may be there"
    with pytest.raises(ValueError, match="frames 4999 to 5000 .* rope_max_seq_len 5000: .*extend the table"):
        table.frames([(4999, 2)], 4, 5, cpu)
    with pytest.raises(ValueError, match="height is 13 tokens; the rotary table ends at rope_max_seq_len 12"):
        table.grid(1, 13, 5, cpu)


@pytest.mark.parametrize("per_frame", [False, True])
def test_rotary_is_the_same_with_and_without_complex_numbers(per_frame):
    table, x = RotaryTable(20, 12), torch.randn(3, 20, 2, 2, 20)
    rotary = table.frames([(5, 3)], 4, 5, torch.device("cpu"))
    rotary = rotary if per_frame else rotary[0]
    torch._dynamo.reset()
    compiled = torch.compile(apply_rotary, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, rotary), apply_rotary(x, rotary), rtol=0, atol=1e-6)
    parts = torch.view_as_real(rotary)
    torch.testing.assert_close(apply_rotary(x, parts), apply_rotary(x, rotary), rtol=0, atol=1e-6)
    one = apply_rotary(x[2:], rotary[2] if per_frame else rotary)
    torch.testing.assert_close(apply_rotary(x, rotary)[2:], one, rtol=0, atol=0)


@pytest.mark.parametrize("rotary", [torch.ones(5, 1, 6), (torch.ones(5, 1, 6), torch.zeros(5, 1, 6))], ids=type)
def test_a_rotary_that_is_not_complex_is_refused(rotary):
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="self")
    site.to_qkv = NoProjection()
    with pytest.raises(ValueError, match="rotary is (torch.float32 of shape .*|a tuple); it must be complex"):
        site(torch.zeros(1, 5, HIDDEN), rotary=rotary)


class NoProjection(torch.nn.Module):
    in_features = HIDDEN

    def forward(self, rows):
        raise AssertionError("rows were projected before they were checked")


GOOD, PAD = torch.zeros(3, HIDDEN), torch.zeros(1, HIDDEN)


@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
@pytest.mark.parametrize(("rows", "pad_row", "said"), [
    ([GOOD, GOOD[:, :-1]], PAD, r"rows\[1\] has shape \(3, 29\); this site takes \[n, 30\]"),
    ([GOOD[None]], PAD, r"rows\[0\] has shape \(1, 3, 30\)"),
    ([GOOD[0]], PAD, r"rows\[0\] has shape \(30,\)"),
    ([GOOD, [[0.0] * HIDDEN]], PAD, r"rows\[1\] is a list"),
    ([GOOD], PAD[0], r"pad_row has shape \(30,\); this site takes \[1, 30\]"),
    ([GOOD], PAD[None], r"pad_row has shape \(1, 1, 30\)"),
    ([GOOD], GOOD[:2], r"pad_row has shape \(2, 30\)"),
    ([GOOD], PAD[:, 1:], r"pad_row has shape \(1, 29\)"),
    ([GOOD], [0.0] * HIDDEN, "pad_row is a list"),
    ([GOOD] * 9, GOOD, "pad_row has shape"),
])  # fmt: skip
def test_rows_that_do_not_fit_are_refused_before_any_work(mode, rows, pad_row, said):
    site = Attention(HIDDEN, HEADS, HEAD_DIM, role="cross_text", cross_kv=mode)
    site.to_kv = NoProjection()
    for padded_len in (3, 5):
        with pytest.raises(ValueError, match=said):
            site.make_cross_kv(rows, padded_len, pad_row)


def test_a_site_says_what_it_takes_as_keys_and_values():
    text, own = (Attention(HIDDEN, HEADS, HEAD_DIM, role=role) for role in ("cross_text", "self"))
    for kv, kind in ((GOOD, "Tensor"), (None, "NoneType"), ((GOOD, GOOD), "tuple")):
        with pytest.raises(ValueError, match=f"kv is a {kind}; it must be a CrossKV, as make_cross_kv makes"):
            text(GOOD[None], kv)
        with pytest.raises(ValueError, match=f"kv is a {kind}; it must be a CrossKV"):
            text.attend(torch.zeros(1, 3, HEADS, HEAD_DIM), kv)
    with pytest.raises(ValueError, match="a 'self' site attends to its own rows"):
        own.make_cross_kv([GOOD], 3)
