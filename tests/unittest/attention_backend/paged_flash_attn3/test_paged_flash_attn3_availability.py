"""Paged FA3 has several builds; the reason names what was looked for and what failed."""

import importlib.util
import types
from importlib.machinery import ModuleSpec

import pytest
import torch

from attention_backend import AttentionSpec, backend_classes, kernel_probe, paged_flash_attn3

FA3 = backend_classes()["paged_flash_attn3"]


@pytest.fixture
def installed(monkeypatch):
    """installed({module: None or an exception}): those packages and no others are here."""
    kernel_probe.import_problem.cache_clear()

    def set_packages(packages, vllm_folder=None):
        def import_module(name):
            if name not in packages:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
            if packages[name] is not None:
                raise packages[name]
            return types.ModuleType(name)

        def find_spec(name):
            if vllm_folder is None:
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(vllm_folder)]
            return spec

        monkeypatch.setattr(kernel_probe.importlib, "import_module", import_module)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)

    yield set_packages
    kernel_probe.import_problem.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i=0: (9, 0))


def test_nothing_installed(installed):
    installed({})
    reason = FA3.unavailable_reason()
    assert "none of vllm, flash_attn_interface, vllm_fa3._vllm_fa3_C, sgl_kernel.flash_attn is installed" in reason
    assert "pip install vllm" in reason
    assert reason.startswith("this version has no kernel path"), "installing one would not help"


def test_a_build_whose_import_fails_is_named_with_its_cause(installed):
    installed({"sgl_kernel.flash_attn": AttributeError("no attribute 'fwd'")})
    reason = FA3.unavailable_reason()
    assert "importing sgl_kernel.flash_attn fails: AttributeError: no attribute 'fwd'" in reason
    assert "pip install" in reason


@pytest.mark.parametrize("module", paged_flash_attn3.MODULES)
def test_any_build_will_do(installed, hopper, module):
    others = {name: ImportError("broken") for name in paged_flash_attn3.MODULES}
    installed(others | {module: None})
    assert "no kernel path" in FA3.unavailable_reason()


def test_the_build_in_vllm_is_found_without_importing_vllm(installed, hopper, tmp_path):
    (tmp_path / "vllm_flash_attn").mkdir()
    installed({}, vllm_folder=tmp_path)
    assert "is installed" in FA3.unavailable_reason(), "vllm without the extension has no kernels"
    (tmp_path / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so").touch()
    assert "no kernel path" in FA3.unavailable_reason()


def test_it_needs_a_hopper_card(installed, monkeypatch):
    installed({"flash_attn_interface": None})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = FA3.unavailable_reason()
    assert reason.endswith("(no CUDA device; it needs a CUDA device of compute capability 9.x)")


@pytest.mark.parametrize("head_dim, ok", [(8, True), (72, True), (100, False), (256, True), (320, False)])
def test_limits_of_the_spec(hopper, head_dim, ok):
    reasons = FA3.unsupported_reasons(AttentionSpec("self", 8, head_dim, torch.bfloat16, "cuda:0"))
    assert (reasons == []) if ok else f"head_dim is {head_dim}; it takes 8 to 256 in steps of 8" in reasons[0]
    reasons = FA3.unsupported_reasons(AttentionSpec("self", 8, 64, torch.float32, "cuda:0", needs={"grad"}))
    assert len(reasons) == 2 and "grad" in reasons[0] and "torch.float32" in reasons[1]
