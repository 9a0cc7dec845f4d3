"""The dense fp64 oracle, and one factory for every form in which keys, lengths and pages can be handed to a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import pytest
import torch

from attention_backend import AttentionSpec, ExtentKV, PackedKV, PaddedKV, PagedKV, select_backend


def dense_attention(q, k, v, scale: float, causal: bool = False):
    """q [Sq, H, D], k and v [Skv, Hkv, D] in any dtype; returns out [Sq, H, D] and lse [H, Sq] in fp64."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = scale * (q @ k.transpose(1, 2))
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~visible.tril(k.shape[1] - q.shape[1]), -torch.inf)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)  # a row that sees nothing is 0 / 0
    return (weights @ v).transpose(0, 1), torch.logsumexp(scores, dim=-1)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of tiny calls: handing each to several threads costs more than it gains."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def oracle():
    return dense_attention


@dataclass
class Case:
    """One call, and the same thing sequence by sequence."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    metadata: PaddedKV | PackedKV | PagedKV | ExtentKV | None
    sequences: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(repr=False)

    def split(self, out, lse=None):
        """Per sequence: out [Sq, H, D], or also lse [H, Sq]."""
        if self.q.ndim == 4:
            outs, lses = list(out), None if lse is None else list(lse)
        else:
            lens = [len(q) for q, _, _ in self.sequences]
            outs, lses = out.split(lens), None if lse is None else lse.split(lens, dim=1)
        return outs if lse is None else list(zip(outs, lses, strict=True))

    def alone(self, b: int) -> Case:
        """Sequence b as a call of its own, over the same slots. Host lengths must be known."""
        m, one, k, v = self.metadata, slice(b, b + 1), self.k, self.v
        fields = {"kv_lens": m.kv_lens[one], "max_seqlen_kv": m.max_seqlen_kv}
        if self.q.ndim == 3:
            q = self.q.split(m.q_lens)[b]
            fields |= {"cu_seqlens_q": _starts(m.q_lens[one], q.device)}
            fields |= {"max_seqlen_q": m.max_seqlen_q, "q_lens": m.q_lens[one]}
        else:
            q = self.q[one]
        if isinstance(m, PackedKV):
            k, v = (x.split([*m.kv_lens, len(x) - sum(m.kv_lens)])[b] for x in (k, v))
            fields |= {"cu_seqlens_kv": _starts(m.kv_lens[one], q.device)}
            fields |= {} if m.seqused_kv is None else {"seqused_kv": m.seqused_kv[one].clone()}
        else:
            fields |= {"seqused_kv": m.seqused_kv[one].clone()}
        if isinstance(m, ExtentKV):
            fields |= {"starts_kv": m.starts_kv[[b, -1]], "starts": m.starts[one]}
        elif isinstance(m, PaddedKV):
            k, v = k[one], v[one]
        elif isinstance(m, PagedKV):
            fields |= {"block_table": m.block_table[one], "block_size": m.block_size}
        return Case(q, k, v, type(m)(**fields), self.sequences[one])

    def backend(self, *, name="sdpa", scale=None, **needs):
        spec = AttentionSpec(
            "self",
            self.q.shape[-2],
            self.q.shape[-1],
            self.q.dtype,
            self.q.device,
            num_kv_heads=self.k.shape[-2],
            softmax_scale=scale,
            **needs,
        )
        return select_backend(name, spec)


def _int32(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def _starts(lens, device):
    return _int32([0, *accumulate(lens)], device)


@pytest.fixture(scope="session")
def make_case():
    """make_case(form, q_lens, kv_lens, ...): form "dense", "padded", "packed", "paged", "extent"; "_q" packs Q too.

    Extents lie in another order than their sequences, with `padding` rows between them and behind the last.
    host_lens=False leaves the lengths to the device tensors. Every slot that belongs to no sequence holds `poison`.
    """

    def make(
        form,
        q_lens,
        kv_lens,
        *,
        heads=3,
        kv_heads=None,
        head_dim=16,
        dtype=torch.float32,
        device="cpu",
        host_lens=True,
        poison=float("nan"),
        block_size=8,
        padding=3,
        seed=0,
    ) -> Case:
        gen = torch.Generator().manual_seed(seed)
        kv_heads = kv_heads or heads

        def rand(*shape):
            return torch.randn(*shape, generator=gen).to(device, dtype)

        sequences = [
            (rand(m, heads, head_dim), rand(n, kv_heads, head_dim), rand(n, kv_heads, head_dim))
            for m, n in zip(q_lens, kv_lens, strict=True)
        ]
        qs, ks, vs = (list(parts) for parts in zip(*sequences, strict=True))
        q = torch.cat(qs) if form.endswith("_q") else torch.stack(qs)
        q_side = {}
        if form.endswith("_q"):
            q_side = {
                "cu_seqlens_q": _starts(q_lens, device),
                "max_seqlen_q": max(q_lens),
                "q_lens": tuple(q_lens) if host_lens else None,
            }
        known = tuple(kv_lens) if host_lens else None
        longest = max(kv_lens)

        if form == "dense":
            return Case(q, torch.stack(ks), torch.stack(vs), None, sequences)
        if form == "padded":
            shape = (len(kv_lens), longest + padding, kv_heads, head_dim)
            k, v = (torch.full(shape, poison, dtype=dtype, device=device) for _ in "kv")
            for b, n in enumerate(kv_lens):
                k[b, :n], v[b, :n] = ks[b], vs[b]
            bound = longest + padding
            return Case(q, k, v, PaddedKV(_int32(kv_lens, device), bound, known), sequences)
        if form.startswith("packed"):
            tail = torch.full((padding, kv_heads, head_dim), poison, dtype=dtype, device=device)
            # Lengths as AttentionMetadataState gives them, and none as with a KV cache's packed Q.
            used = {} if q_side else {"seqused_kv": _int32(kv_lens, device)}
            metadata = PackedKV(_starts(kv_lens, device), longest, known, **q_side, **used)
            return Case(q, torch.cat([*ks, tail]), torch.cat([*vs, tail]), metadata, sequences)

        if form.startswith("extent"):
            starts, rows = [0] * len(kv_lens), 1  # unaligned
            for b in torch.randperm(len(kv_lens), generator=gen).tolist():
                starts[b], rows = rows, rows + kv_lens[b] + padding
            k, v = (torch.full((rows, kv_heads, head_dim), poison, dtype=dtype, device=device) for _ in "kv")
            for b, start in enumerate(starts):
                k[start : start + kv_lens[b]], v[start : start + kv_lens[b]] = ks[b], vs[b]
            metadata = ExtentKV(
                _int32([*starts, rows], device),
                _int32(kv_lens, device),
                longest,
                starts=tuple(starts) if host_lens else None,
                kv_lens=known,
                **q_side,
            )
            return Case(q, k, v, metadata, sequences)

        assert form.startswith("paged"), form
        blocks = [-(-n // block_size) for n in kv_lens]
        width = max(1, max(blocks)) + 1
        order = (torch.randperm(sum(blocks), generator=gen) + 1).tolist()  # block 0 is the null block
        shape = (sum(blocks) + 1, block_size, kv_heads, head_dim)
        k, v = (torch.full(shape, poison, dtype=dtype, device=device) for _ in "kv")
        table = torch.zeros(len(kv_lens), width, dtype=torch.int32)
        for b, n in enumerate(kv_lens):
            for i in range(blocks[b]):
                table[b, i] = block = order.pop()
                rows = slice(i * block_size, min(n, (i + 1) * block_size))
                k[block, : rows.stop - rows.start], v[block, : rows.stop - rows.start] = ks[b][rows], vs[b][rows]
        metadata = PagedKV(
            table.to(device), _int32(kv_lens, device), block_size, width * block_size, kv_lens=known, **q_side
        )
        return Case(q, k, v, metadata, sequences)

    return make


@pytest.fixture(scope="session")
def check(oracle):
    """Runs a case through a backend and compares every sequence with the oracle; returns (out, lse)."""

    def run(case, *, causal=False, scale=None, tolerance=1e-5, backend=None):
        backend = backend or case.backend(scale=scale)
        scale = case.q.shape[-1] ** -0.5 if scale is None else scale
        out, lse = backend.forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=True)
        alone = backend.forward(case.q, case.k, case.v, case.metadata, causal=causal)
        assert out.shape == alone.shape == case.q.shape
        assert out.dtype == alone.dtype == case.q.dtype
        assert lse.dtype == torch.promote_types(case.q.dtype, torch.float32)
        for b, ((q, k, v), (out_b, lse_b), alone_b) in enumerate(
            zip(case.sequences, case.split(out, lse), case.split(alone), strict=True)
        ):
            expected, expected_lse = oracle(q, k, v, scale, causal)
            for what, got in (("with LSE", out_b), ("without LSE", alone_b)):
                error = (got.double() - expected).abs().max().item() if got.numel() else 0.0
                assert error <= tolerance, f"sequence {b} {what}: off by {error}"
            torch.testing.assert_close(lse_b.double(), expected_lse, atol=tolerance, rtol=0)
        return out, lse

    return run


@pytest.fixture(scope="session")
def make_gpu_case(make_case):
    """A case whose slots beyond the lengths hold 1e4 unless said otherwise, in K and in V."""

    def make(form, q_lens, kv_lens, *, block_size=0, **options):
        paged = {"block_size": block_size} if block_size else {}
        options = {"heads": 4, "head_dim": 128, "dtype": torch.bfloat16, "poison": 1e4} | options
        return make_case(form, q_lens, kv_lens, device="cuda", **paged, **options)

    return make


def plain_low_precision(q, k, v, scale: float, causal: bool = False):
    """dense_attention with every step rounded to the inputs' dtype; returns out alone."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = scale * (q @ k.transpose(1, 2))
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~visible, -torch.inf)
    return (torch.softmax(scores, dim=-1).nan_to_num(0.0) @ v).transpose(0, 1)


@pytest.fixture(scope="session")
def check_sequence(oracle):
    """One sequence: at most twice the error of the plain computation in its dtype, or one rounding of the result."""

    def run(what, q, k, v, scale, causal, out, lse=None):
        expected, expected_lse = oracle(q, k, v, scale, causal)
        if lse is not None:
            torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=0, msg=lambda m: f"{what} LSE: {m}")
        if out.numel() == 0:
            return
        limit = 2 * (plain_low_precision(q, k, v, scale, causal) - expected).abs().max().item()
        limit = max(limit, torch.finfo(out.dtype).eps / 2 * expected.abs().max().item())
        error = (out.double() - expected).abs().max().item()
        assert error <= limit, f"{what}: off by {error}, limit {limit}"  # false for NaN too

    return run


@pytest.fixture(scope="session")
def check_gpu_case(check_sequence):
    """Runs a case through the named kernel and compares every sequence with the oracle; returns (out, lse)."""

    def run(name, case, *, causal=False, scale=None, return_lse=True):
        backend = case.backend(name=name, scale=scale)
        result = backend.forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=return_lse)
        out, lse = result if return_lse else (result, None)
        assert out.shape == case.q.shape and out.dtype == case.q.dtype and out.is_contiguous()
        parts = case.split(out, lse) if return_lse else [(part, None) for part in case.split(out)]
        for b, ((q, k, v), (out_b, lse_b)) in enumerate(zip(case.sequences, parts, strict=True)):
            check_sequence(f"sequence {b} of {len(k)} keys", q, k, v, backend.spec.softmax_scale, causal, out_b, lse_b)
        return out, lse

    return run
