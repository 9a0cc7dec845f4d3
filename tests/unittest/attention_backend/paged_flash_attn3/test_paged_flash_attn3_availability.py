"""Paged FA3 has several builds: which is taken, what keeps one from being taken, and what is read of a signature."""

import importlib.util
import inspect
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from attention_backend import AttentionSpec, backend_classes, kernel_probe, select_backend
from attention_backend import paged_flash_attn3_builds as builds

FA3 = backend_classes()["paged_flash_attn3"]


@pytest.fixture
def modules(stand_in):
    """The modules of the two builds that are Python functions."""
    return {
        "flash_attn_interface": module_of(stand_in("upstream")),
        "sgl_kernel.flash_attn": module_of(stand_in("sgl")),
    }


def module_of(build):
    functions = {"flash_attn_varlen_func": build.varlen, "flash_attn_with_kvcache": build.cache}
    if build.dense is not None:
        functions["flash_attn_func"] = build.dense
    module = types.ModuleType(build.name)
    vars(module).update({name: function._function for name, function in functions.items()})
    return module


@pytest.fixture
def installed(monkeypatch, operator):
    """installed({module: a module or an exception}, ...): those packages and no others are here.

    vllm_folder: where vllm is installed; loading its extension raises `loading`, or registers the stand-in operator.
    """

    def forget():
        kernel_probe.import_problem.cache_clear()
        builds.find_build.cache_clear()

    def set_packages(packages, vllm_folder=None, loading=None):
        def import_module(name):
            if name not in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
            if isinstance(packages[name], Exception):
                raise packages[name]
            return packages[name]

        def find_spec(name):
            if vllm_folder is None:
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(vllm_folder)]
            return spec

        def load_library(path):
            loaded.append(path)
            if loading is not None:
                raise loading

        loaded = []
        monkeypatch.setattr(kernel_probe.importlib, "import_module", import_module)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(torch.ops, "load_library", load_library)
        monkeypatch.setattr(builds, "VLLM_NAMESPACE", operator.namespace)
        forget()
        return loaded

    yield set_packages
    forget()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (9, 0))


def test_nothing_installed(installed):
    installed({})
    reason = FA3.unavailable_reason()
    assert reason.startswith("none of flash_attn_interface, vllm, vllm_fa3, sgl_kernel is installed; pip install vllm")
    assert FA3.kernels_from() is None


def test_a_build_whose_import_fails_is_named_with_its_cause(installed):
    installed({"sgl_kernel.flash_attn": AttributeError("no attribute 'fwd'")})
    reason = FA3.unavailable_reason()
    assert reason.startswith("importing sgl_kernel.flash_attn fails: AttributeError: no attribute 'fwd'; pip install")


@pytest.mark.parametrize(
    "module, name",
    [
        ("flash_attn_interface", "flash_attn_interface"),
        ("vllm_fa3._vllm_fa3_C", "vllm_fa3"),
        ("sgl_kernel.flash_attn", "sgl_kernel.flash_attn"),
    ],
)
def test_any_build_will_do_and_selection_says_which_it_is(installed, hopper, modules, module, name):
    others = {other: ImportError("broken") for other in ("flash_attn_interface", "sgl_kernel.flash_attn")}
    installed(others | {module: modules.get(module, types.ModuleType(module))})
    assert FA3.unavailable_reason() is None and FA3.kernels_from() == name
    backend = select_backend("paged_flash_attn3", AttentionSpec("self", 8, 128, torch.bfloat16, "cuda:0"))
    assert backend.selection.why == f"named in the configuration; kernels from {name}"


def test_the_build_in_vllm_is_loaded_without_importing_vllm(installed, hopper, tmp_path):
    (tmp_path / "vllm_flash_attn").mkdir()
    installed({}, vllm_folder=tmp_path)
    assert FA3.unavailable_reason().startswith("vllm is here without its vllm_flash_attn/_vllm_fa3_C; pip install")
    extension = tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
    extension.touch()
    loaded = installed({"vllm": RuntimeError("imported")}, vllm_folder=tmp_path)
    assert FA3.unavailable_reason() is None and FA3.kernels_from() == "vllm" and loaded == [str(extension)]
    installed({}, vllm_folder=tmp_path, loading=OSError("undefined symbol"))
    assert "loading vllm's _vllm_fa3_C.abi3.so fails: OSError: undefined symbol" in FA3.unavailable_reason()


def test_an_extension_that_registers_no_operator(installed, monkeypatch):
    installed({"vllm_fa3._vllm_fa3_C": types.ModuleType("_vllm_fa3_C")})
    monkeypatch.setattr(builds, "VLLM_NAMESPACE", "fa3_nobody")
    assert FA3.unavailable_reason().startswith("vllm_fa3 registers no operator torch.ops.fa3_nobody.fwd")


def test_builds_are_looked_for_once_and_upstreams_comes_first(installed, hopper, modules):
    installed(modules | {"vllm_fa3._vllm_fa3_C": types.ModuleType("_vllm_fa3_C")})
    assert FA3.kernels_from() == "flash_attn_interface"
    assert builds.find_build()[0] is builds.find_build()[0]


def test_it_needs_a_hopper_card(installed, monkeypatch, modules):
    installed(modules)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert FA3.unavailable_reason() == "no CUDA device; it needs a CUDA device of compute capability 9.x"


def without(function, *names):
    """The same signature less some arguments."""
    signature = inspect.signature(function)
    kept = [p for p in signature.parameters.values() if p.name not in names]

    def call(**given):
        return function(**given)

    call.__signature__ = signature.replace(parameters=kept)
    return call


@pytest.mark.parametrize("name", ["seqused_k", "cu_seqlens_k", "causal", "num_splits", "softmax_scale"])
def test_a_build_that_lacks_what_is_needed_is_passed_over_with_the_arguments_name(installed, hopper, modules, name):
    upstream = modules["flash_attn_interface"]
    upstream.flash_attn_varlen_func = without(upstream.flash_attn_varlen_func, name)
    installed({"flash_attn_interface": upstream})
    assert f"flash_attn_interface.flash_attn_varlen_func has no argument {name}" in FA3.unavailable_reason().replace(
        "is_causal or ", ""
    )
    installed(modules)
    assert FA3.unavailable_reason() is None and FA3.kernels_from() == "sgl_kernel.flash_attn"


@pytest.mark.parametrize(
    "name, called", [("page_table", "page_table or block_table"), ("cache_seqlens", "seqused_k or cache_seqlens")]
)
def test_a_build_without_a_paged_path_is_passed_over(installed, modules, name, called):
    upstream = modules["flash_attn_interface"]
    upstream.flash_attn_with_kvcache = without(upstream.flash_attn_with_kvcache, name)
    installed({"flash_attn_interface": upstream})
    expected = f"flash_attn_interface.flash_attn_with_kvcache has no argument {called}"
    assert FA3.unavailable_reason().startswith(expected)
    del upstream.flash_attn_with_kvcache
    installed({"flash_attn_interface": upstream})
    assert "flash_attn_interface has no function flash_attn_with_kvcache" in FA3.unavailable_reason()


def test_an_argument_that_must_be_given_and_is_not_known_is_named():
    with pytest.raises(builds.BuildError, match="f asks for an argument dropout_p, which is not known"):
        builds.KernelFunction(lambda q, k, v, dropout_p, rng=None: None, "f", ("q", "k", "v"))


def test_names_and_order_are_read_and_new_options_keep_their_defaults():
    def function(v_cache, k_cache, *, q, block_table, k=None, novelty="its own", window_size=(None, None), **more):
        assert (k, novelty, window_size, more) == (None, "its own", (-1, -1), {})
        return q, k_cache, v_cache, block_table

    call = builds.KernelFunction(function, "f", ("q", "k", "v", "page_table"))
    assert call(q="q", k="K", v="V", page_table="T", return_lse=True) == ("q", "K", "V", "T")
    assert call(q="q", k="K", v="V", return_lse=True)[-1] is None
    assert not call.takes("return_lse") and not call.takes("max_seqlen_k")


def test_an_older_build_that_always_returns_the_lse(make_case, check, stand_in, backend_for):
    build = stand_in("upstream")
    function = without(build.varlen._function, "return_attn_probs")
    build.varlen._function = lambda **given: function(**given, return_attn_probs=True)
    build.varlen._names.pop("return_lse")
    case = make_case("packed", [6, 6], [3, 0], heads=2)
    check(case, backend=backend_for(case))


@pytest.mark.parametrize("head_dim, ok", [(8, True), (72, True), (100, False), (256, True), (320, False)])
def test_limits_of_the_spec(hopper, head_dim, ok):
    reasons = FA3.unsupported_reasons(AttentionSpec("self", 8, head_dim, torch.bfloat16, "cuda:0"))
    assert (reasons == []) if ok else f"head_dim is {head_dim}; it takes 8 to 256 in steps of 8" in reasons[0]
    reasons = FA3.unsupported_reasons(AttentionSpec("self", 8, 64, torch.float32, "cuda:0", needs={"grad"}))
    assert len(reasons) == 2 and "grad" in reasons[0] and "torch.float32" in reasons[1]


def test_what_it_supports():
    assert FA3.supports_varlen() and FA3.supports_padding_mask() and FA3.supports_lse() and FA3.supports_causal()
    assert FA3.supports_paged_kv() and FA3.supports_extent_kv()
    assert not FA3.supports_grad() and not FA3.supports_repeated_last_key()
