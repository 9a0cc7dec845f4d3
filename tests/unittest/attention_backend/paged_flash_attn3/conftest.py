"""Stand-ins on the CPU for the three builds of FlashAttention-3, with the signatures, returns and refusals of each.

Names, order and defaults are those of upstream's hopper/flash_attn_interface.py, of sgl_kernel/flash_attn.py and of the
schema that vLLM's extension registers; the values are dense attention's.
"""

import types

import pytest
import torch

from attention_backend import AttentionSpec
from attention_backend import paged_flash_attn3_builds as builds
from attention_backend import paged_flash_attn3_ops as ops
from attention_backend.paged_flash_attn3 import PagedFlashAttention3Backend

VLLM_SCHEMA = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


class Kernel:
    """The kernel behind all builds; keeps each call's arguments."""

    def __init__(self, dense):
        self.calls, self.dense = [], dense

    def __call__(
        self,
        q,
        k,
        v,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        seqused_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        window=(-1, -1),
        softcap=0.0,
        num_splits=0,
    ):
        call = {name: value for name, value in locals().items() if name != "self"}
        self.calls.append(call)
        assert window == (-1, -1) and softcap == 0.0 and num_splits == 1
        assert all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (q, k, v))
        for lens in (cu_seqlens_q, cu_seqlens_k, seqused_k, page_table):
            assert lens is None or (lens.dtype == torch.int32 and lens.is_contiguous())
        assert cu_seqlens_q is None or max_seqlen_q is not None
        assert cu_seqlens_k is None or (max_seqlen_k is not None and page_table is None)
        qs = list(q) if cu_seqlens_q is None else q[: cu_seqlens_q[-1]].split(cu_seqlens_q.diff().tolist())
        if cu_seqlens_k is not None:
            starts = cu_seqlens_k[:-1].tolist()
            lens = (cu_seqlens_k.diff() if seqused_k is None else seqused_k).tolist()
            ks, vs = ([x[start : start + n] for start, n in zip(starts, lens, strict=True)] for x in (k, v))
            assert max(lens) <= max_seqlen_k
        else:
            if page_table is not None:
                k, v = (x[page_table.long()].flatten(1, 2) for x in (k, v))
            lens = [k.shape[1]] * len(k) if seqused_k is None else seqused_k.tolist()
            ks, vs = ([x[b, :n] for b, n in enumerate(lens)] for x in (k, v))
        outs, lses = zip(*(self.dense(*s, softmax_scale, causal) for s in zip(qs, ks, vs, strict=True)), strict=True)
        out = torch.stack(outs) if q.ndim == 4 else torch.cat(outs)
        lse = torch.stack(lses) if q.ndim == 4 else torch.cat(lses, dim=1)
        if k.numel() == 0:
            lse = torch.full_like(lse, torch.inf)
        return out.to(q.dtype).contiguous(), lse.float().contiguous()


def upstream(kernel):
    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        out, lse = kernel(q, k, v, softmax_scale=softmax_scale, causal=causal, window=window_size,
                          softcap=softcap, num_splits=num_splits)  # fmt: skip
        return (out, lse) if return_attn_probs else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        out, lse = kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, None,
                          softmax_scale, causal, window_size, softcap, num_splits)  # fmt: skip
        return (out, lse) if return_attn_probs else out

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        assert k is None and v is None, "rows to append"
        out, lse = kernel(q, k_cache, v_cache, cu_seqlens_q, None, cache_seqlens, max_seqlen_q, None, page_table,
                          softmax_scale, causal, window_size, softcap, num_splits)  # fmt: skip
        return (out, lse, None, None) if return_softmax_lse else out

    module = types.ModuleType("flash_attn_interface")
    vars(module).update({f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)})
    return module


def sgl(kernel):
    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None, seqused_k=None,
        page_table=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False, sinks=None, score_mod=None, aux_tensors=None, ver=3,
    ):  # fmt: skip
        assert ver == 3
        out, lse = kernel(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, page_table,
                          softmax_scale, causal, window_size, softcap, num_splits)  # fmt: skip
        return (out, lse, None, None) if return_softmax_lse else out

    module = types.ModuleType("sgl_kernel.flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.flash_attn_with_kvcache = upstream(kernel).flash_attn_with_kvcache
    return module


class Operator:
    """vLLM's operator in a namespace of this process's own: the real one may be here too."""

    namespace = "fa3_stand_in"
    kernel = None

    def __init__(self):
        self.library = torch.library.Library(self.namespace, "DEF")  # noqa: TOR901
        self.library.define(VLLM_SCHEMA)
        self.library.impl("fwd", self.fwd, "CPU")

    def fwd(
        self, q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
        q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
        is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank,
        cp_tot_seqused_k,
    ):  # fmt: skip
        assert (cp_world_size, cp_rank, sm_margin) == (1, 0, 0)
        assert any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_k)), "compiled for varlen calls only"
        if page_table is None and cu_seqlens_k is None:
            assert max_seqlen_k in (None, k.shape[1]), "k must have max_seqlen_k rows"
        unused = (k_new, v_new, q_v, out, cu_seqlens_k_new, seqused_q, kv_batch_idx, leftpad_k, rotary_cos, s_aux)
        assert all(x is None for x in unused)
        window = (window_size_left, window_size_right)
        out, lse = self.kernel(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k, page_table, softmax_scale,
            is_causal, window, softcap, num_splits,
        )  # fmt: skip
        return [out, lse, q.new_empty(0), q.new_empty(0)]


@pytest.fixture(scope="session")
def operator():
    return Operator()


@pytest.fixture
def kernel(oracle):
    return Kernel(oracle)


@pytest.fixture
def stand_in(monkeypatch, kernel, operator):
    """stand_in("upstream" | "vllm" | "sgl"): that build is the one here."""

    def take(name):
        operator.kernel = kernel
        if name == "vllm":
            build = builds.from_operator(operator.namespace, "vllm")
        else:
            module = {"upstream": upstream, "sgl": sgl}[name](kernel)
            build = builds.from_functions(module, module.__name__)
        monkeypatch.setattr(ops, "find_build", lambda: (build, None))
        return build

    return take


@pytest.fixture(params=["upstream", "vllm", "sgl"])
def build(request, stand_in):
    return stand_in(request.param)


class OnCPU(PagedFlashAttention3Backend):
    """The backend as it is, without what it says of devices and dtypes."""

    unavailable_reason = classmethod(lambda cls: None)
    unsupported_reasons = classmethod(lambda cls, spec: [])


@pytest.fixture
def backend_for():
    def make(case, scale=None):
        heads, head_dim = case.q.shape[-2:]
        spec = AttentionSpec(
            "self", heads, head_dim, case.q.dtype, "cpu", num_kv_heads=case.k.shape[-2], softmax_scale=scale
        )
        return OnCPU(spec)

    return make
