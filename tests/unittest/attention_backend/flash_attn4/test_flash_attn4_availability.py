"""FA4 is in the registry from the start and says what stands in its way; packages are stubs, devices are made up."""

import importlib
import sys
import types

import pytest
import torch

from attention_backend import (
    AttentionBackendError,
    AttentionSpec,
    backend_classes,
    kernel_probe,
    select_backend,
)

FA4 = backend_classes()["flash_attn4"]


@pytest.fixture(autouse=True)
def probe_anew():
    kernel_probe.import_problem.cache_clear()
    yield
    kernel_probe.import_problem.cache_clear()


@pytest.fixture
def importing(monkeypatch):
    """importing(outcome): what `import flash_attn.cute` does from here on; returns the list of tries."""

    def set_outcome(outcome):
        tries = []

        def import_module(name):
            tries.append(name)
            if isinstance(outcome, BaseException):
                raise outcome
            return types.ModuleType(name)

        monkeypatch.setattr(kernel_probe.importlib, "import_module", import_module)
        return tries

    return set_outcome


@pytest.fixture
def devices(monkeypatch):
    def set_devices(*capabilities):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[getattr(i, "index", i)])

    return set_devices


def spec(head_dim=128, dtype=torch.bfloat16, device="cuda:0", **fields):
    return AttentionSpec("self", 8, head_dim, dtype, device, **fields)


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn.cute"])
def test_a_missing_package_is_named_with_the_command(importing, name):
    importing(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert FA4.unavailable_reason() == "flash_attn.cute is not installed; pip install 'visual-gen[fa4]'"


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("module 'cutlass.cute' has no attribute 'arch'"),
        ImportError("undefined symbol: _ZN3c10"),
        TypeError("unexpected keyword"),
        OSError("libcudart.so.13: cannot open shared object file"),
        ModuleNotFoundError("No module named 'triton'", name="triton"),
    ],
)
def test_an_import_that_fails_in_any_way_is_a_reason_with_its_cause(importing, error):
    importing(error)
    reason = FA4.unavailable_reason()
    assert f"importing flash_attn.cute fails: {type(error).__name__}: {error}" in reason
    assert "pip install 'visual-gen[fa4]'" in reason
    with pytest.raises(AttentionBackendError) as raised:
        select_backend("flash_attn4", spec())
    assert str(error) in str(raised.value) and "flash_attn4" in str(raised.value)
    assert select_backend("auto", AttentionSpec("self", 2, 16, torch.float32, "cpu")).name == "sdpa"


def test_a_real_package_on_the_path_that_raises_is_reported(tmp_path, monkeypatch):
    package = tmp_path / "flash_attn"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cute" / "__init__.py").write_text("import math\nmath.no_such_function\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "AttributeError: module 'math' has no attribute 'no_such_function'" in FA4.unavailable_reason()
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_the_package_is_tried_once_a_process(importing):
    tries = importing(ImportError("slow to fail"))
    for _ in range(3):
        FA4.unavailable_reason()
    assert tries == ["flash_attn.cute"]


def test_importing_the_kernel_layer_imports_no_kernel_package():
    import subprocess

    code = "import sys, attention_backend; print([m for m in ('flash_attn', 'vllm', 'sgl_kernel') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_devices_are_named_with_what_is_needed(importing, devices):
    importing(None)
    devices()
    assert FA4.unavailable_reason() == ("no CUDA device; it needs a CUDA device of compute capability 9.x or 10.x")
    devices((8, 9), (12, 0))
    assert FA4.unavailable_reason().startswith("the devices are of compute capability 8.9, 12.0; it needs")
    devices((8, 0), (9, 0))
    assert FA4.unavailable_reason() is None


def test_the_dtype_and_device_of_the_spec_are_checked(devices):
    devices((9, 0), (8, 9))
    assert FA4.unsupported_reasons(spec()) == []
    assert FA4.unsupported_reasons(spec(dtype=torch.float32)) == [
        "dtype is torch.float32; it takes torch.bfloat16 or torch.float16"
    ]
    assert FA4.unsupported_reasons(spec(device="cpu")) == ["device is cpu; it needs a CUDA device"]
    (reason,) = FA4.unsupported_reasons(spec(device="cuda:1"))
    assert "cuda:1 is of compute capability 8.9" in reason


@pytest.mark.parametrize(
    "capability, head_dim, ok",
    [
        ((9, 0), 8, True),
        ((9, 0), 72, True),
        ((9, 0), 80, True),
        ((9, 0), 100, False),
        ((9, 0), 256, True),
        ((9, 0), 320, False),
        ((10, 0), 128, True),
        ((10, 0), 136, False),
        ((10, 0), 192, False),
        ((10, 0), 256, True),
    ],
)
def test_head_dims_have_the_limits_of_the_card(devices, capability, head_dim, ok):
    devices(capability)
    reasons = FA4.unsupported_reasons(spec(head_dim))
    assert (reasons == []) if ok else f"head_dim is {head_dim}; it takes 8 to " in reasons[0]


def test_capabilities_of_the_family():
    assert FA4.supports_varlen() and FA4.supports_padding_mask() and FA4.supports_paged_kv()
    assert FA4.supports_lse() and FA4.supports_causal() and not FA4.supports_grad()
