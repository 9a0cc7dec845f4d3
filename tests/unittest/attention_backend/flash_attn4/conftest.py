"""A stand-in for the kernel package on the CPU."""

import pytest
import torch

from attention_backend import flash_attn4_ops as ops


class Kernel:
    """flash_attn.cute's two functions with the arguments that the project uses; keeps each call's arguments."""

    def __init__(self, dense):
        self.calls, self.dense, self.result = [], dense, lambda out, lse: (out, lse)

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, num_splits, return_lse):
        self.calls.append(dict(locals()))
        pairs = list(zip(q, k, v, strict=True))
        return self._answer(q, pairs, softmax_scale, causal, return_lse)

    def flash_attn_varlen_func(
        self,
        q,
        k,
        v,
        *,
        softmax_scale,
        causal,
        num_splits,
        return_lse,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        seqused_k=None,
        page_table=None,
        score_mod=None,
    ):
        self.calls.append(dict(locals()))
        qs = list(q) if cu_seqlens_q is None else q.split(cu_seqlens_q.diff().tolist())
        if cu_seqlens_k is not None and seqused_k is not None:
            lens, starts = seqused_k.tolist(), cu_seqlens_k[:-1].tolist()
            ks, vs = ([x[start : start + n] for start, n in zip(starts, lens, strict=True)] for x in (k, v))
        elif cu_seqlens_k is not None:
            lens = cu_seqlens_k.diff().tolist()
            ks, vs = (x[: sum(lens)].split(lens) for x in (k, v))
        else:
            lens = seqused_k.tolist()
            if page_table is not None:
                k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
            ks, vs = ([x[b, :n] for b, n in enumerate(lens)] for x in (k, v))
        assert max(lens) <= max_seqlen_k
        if score_mod is not None:
            ks, vs = ([score_mod(x) for x in xs] for xs in (ks, vs))
        return self._answer(q, list(zip(qs, ks, vs, strict=True)), softmax_scale, causal, return_lse)

    def _answer(self, q, pairs, softmax_scale, causal, return_lse):
        join = torch.stack if q.ndim == 4 else torch.cat
        outs, lses = zip(*(self.dense(*pair, softmax_scale, causal) for pair in pairs), strict=True)
        lse = (torch.stack(lses) if q.ndim == 4 else torch.cat(lses, dim=1)).float().contiguous()
        return self.result(join(outs).to(q.dtype).contiguous(), lse if return_lse else None)


class StandInModifiers:
    """What a modifier does to scores, done to the rows of K and V that the stand-in kernel attends to."""

    @staticmethod
    def repeated_last_key(repeats_to):
        return lambda rows: torch.cat([rows, rows[-1:].expand(repeats_to - len(rows), *rows.shape[1:])])


@pytest.fixture
def kernel(monkeypatch, oracle):
    stand_in = Kernel(oracle)
    monkeypatch.setattr(ops, "kernel_package", lambda: stand_in)
    monkeypatch.setattr(ops, "score_modifiers", lambda: StandInModifiers)
    return stand_in
