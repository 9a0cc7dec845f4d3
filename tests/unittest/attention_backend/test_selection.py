"""Names to backends: a named one runs or raises with every reason, only "auto" goes on to the next."""

import logging

import pytest
import torch

from attention_backend import (
    AUTO_ORDER,
    CAPABILITIES,
    AttentionBackend,
    AttentionBackendError,
    AttentionSpec,
    available_backends,
    backend_classes,
    register_backend,
    select_backend,
    selection,
)

SPEC = AttentionSpec("self", 2, 16, torch.float32, "cpu")


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """Backends that a test registers are gone after it; entry points are read anew."""
    monkeypatch.setattr(selection, "_classes", dict(selection._classes))
    monkeypatch.setattr(selection, "_broken_entry_points", {})
    monkeypatch.setattr(selection, "_entry_points_read", True)


class Custom(AttentionBackend):
    name = "custom"

    def attend(self, q, k, v, metadata, *, causal, return_lse):
        return q


class EntryPoint:
    name, value = "foreign", "foreign_package:Backend"

    def __init__(self, load):
        self.load = load


def use_entry_points(monkeypatch, *points):
    monkeypatch.setattr(selection, "entry_points", lambda group: points if group == selection.ENTRY_POINT_GROUP else ())
    monkeypatch.setattr(selection, "_entry_points_read", False)


def test_all_kernel_families_are_registered_and_say_why_they_are_not_here():
    reasons = available_backends()
    assert reasons["sdpa"] is None
    if not torch.cuda.is_available():
        assert reasons["flash_attn4"] and reasons["paged_flash_attn3"]
    assert set(AUTO_ORDER) <= set(backend_classes())


@pytest.mark.parametrize("name", ["FA9", "", "Auto", "SDPA!", "flash"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(name):
    with pytest.raises(AttentionBackendError) as error:
        select_backend(name, SPEC)
    for known in ("auto", "flash_attn4", "paged_flash_attn3", "sdpa", repr(name)):
        assert known in str(error.value)


@pytest.mark.parametrize(
    "name, near", [("flash_attn_4", "flash_attn4"), ("sdp", "sdpa"), ("paged_fa3", "paged_flash_attn3")]
)
def test_a_near_match_is_offered(name, near):
    with pytest.raises(AttentionBackendError, match=f"did you mean '{near}'"):
        select_backend(name, SPEC)


def test_a_named_backend_that_cannot_serve_lists_every_reason_and_what_would():
    spec = AttentionSpec("cross_text", 2, 20, torch.float32, "cpu", needs={"grad"})
    with pytest.raises(AttentionBackendError) as error:
        select_backend("flash_attn4", spec)
    for part in (
        selection.FlashAttention4Backend.unavailable_reason(),
        "no support for grad",
        "dtype is torch.float32",
        "device is cpu",
        "head_dim is 20; it takes 8 to 256 in steps of 8",
        "These would serve: auto, sdpa",
    ):
        assert part in str(error.value)


def test_auto_takes_the_first_that_can_and_says_why_it_passed_over_the_others(caplog):
    with caplog.at_level(logging.INFO, logger="attention_backend.selection"):
        backend = select_backend("auto", SPEC)
    assert backend.selection.name == backend.name == "sdpa"
    for name in ("flash_attn4: ", "paged_flash_attn3: "):
        assert name + "dtype is torch.float32" in backend.selection.why
    said = [record for record in caplog.records if record.name == "attention_backend.selection"]
    assert len(said) == 1 and backend.selection.why in said[0].getMessage()


def test_auto_follows_the_documented_order(monkeypatch):
    monkeypatch.setattr(selection.PagedFlashAttention3Backend, "unavailable_reason", classmethod(lambda cls: None))
    spec = AttentionSpec("self", 2, 64, torch.bfloat16, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_backend("auto", spec).name == "paged_flash_attn3"
    assert select_backend("auto", SPEC).name == "sdpa"  # fp32 on a CPU


@pytest.mark.parametrize("role, needs, name", [
    ("self", {"extent_kv"}, "paged_flash_attn3"), ("self", {"paged_kv"}, "paged_flash_attn3"),
    ("self", (), "flash_attn4"), ("cross_text", {"extent_kv"}, "flash_attn4"),
])  # fmt: skip
def test_auto_prefers_flash_attention_3_for_reading_a_cache(monkeypatch, role, needs, name):
    for cls in (selection.PagedFlashAttention3Backend, selection.FlashAttention4Backend):
        monkeypatch.setattr(cls, "unavailable_reason", classmethod(lambda cls: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    spec = AttentionSpec(role, 2, 64, torch.bfloat16, "cuda", needs=needs)
    assert select_backend("auto", spec).name == name


def test_auto_imports_no_kernel_package_for_what_it_could_not_serve(monkeypatch):
    """Importing FA4 costs seconds and hundreds of megabytes, which a run on a CPU must not pay."""

    def probed(cls):
        raise AssertionError(f"{cls.name} was asked whether it is installed")

    for cls in (selection.FlashAttention4Backend, selection.PagedFlashAttention3Backend):
        monkeypatch.setattr(cls, "unavailable_reason", classmethod(probed))
    assert select_backend("auto", SPEC).name == "sdpa"


def test_auto_is_an_error_if_none_can_serve():
    with pytest.raises(
        AttentionBackendError, match="no backend can serve self attention on cpu: flash_attn4: .*sdpa: dtype"
    ):
        select_backend("auto", AttentionSpec("self", 2, 16, torch.int8, "cpu"))


def test_a_named_selection_says_that_it_was_named():
    assert select_backend("sdpa", SPEC).selection.why == "named in the configuration"


def test_a_registered_backend_is_used_by_name_and_never_by_auto():
    assert register_backend(Custom) is Custom
    assert select_backend("custom", SPEC).name == "custom"
    assert select_backend("auto", SPEC).name == "sdpa"
    assert available_backends()["custom"] is None


def test_a_name_belongs_to_one_class():
    register_backend(Custom)
    register_backend(Custom)  # a module imported twice

    class Other(Custom):
        pass

    with pytest.raises(ValueError, match="backend name 'custom' already belongs to .*Custom"):
        register_backend(Other)
    for bad in ("auto", "", None):
        Other.name = bad
        with pytest.raises(ValueError, match="a backend needs a name of its own"):
            register_backend(Other)


@pytest.mark.parametrize("capabilities, said", [
    ({"varlen", "lsee"}, r"Custom.capabilities has 'lsee' \(did you mean 'lse'\?\); known are causal, extent_kv, grad"),
    ({"Padding mask"}, "'Padding mask' .did you mean 'padding_mask'"),
    ({3}, "has 3; known are"),
    ("lse", "capabilities is 'lse'; it must be a set of names"),
    (["lse"], r"capabilities is \['lse'\]; it must be a set"),
    (None, "capabilities is None; it must be a set"),
])  # fmt: skip
def test_capabilities_that_nobody_asks_for_are_refused(monkeypatch, capabilities, said):
    monkeypatch.setattr(Custom, "capabilities", capabilities)
    with pytest.raises(ValueError, match=said):
        register_backend(Custom)
    assert "custom" not in backend_classes()


def test_every_capability_is_asked_through_a_method_of_its_name(monkeypatch):
    for name in CAPABILITIES:
        monkeypatch.setattr(Custom, "capabilities", {name})
        register_backend(Custom)
        able = {other for other in dir(AttentionBackend) if other.startswith("supports_") and getattr(Custom, other)()}
        assert able == {f"supports_{name}"}


def test_an_entry_point_adds_a_backend(monkeypatch):
    use_entry_points(monkeypatch, EntryPoint(lambda: Custom))
    assert select_backend("custom", SPEC).name == "custom"


def test_a_broken_entry_point_takes_no_other_along_and_is_reported(monkeypatch):
    def load():
        raise AttributeError("module 'cutlass' has no attribute 'utils'")

    use_entry_points(monkeypatch, EntryPoint(load))
    assert select_backend("sdpa", SPEC).name == "sdpa"
    assert "AttributeError: module 'cutlass'" in available_backends()["foreign"]
    with pytest.raises(AttentionBackendError, match="'foreign': entry point foreign_package:Backend failed: Attribute"):
        select_backend("foreign", SPEC)


def test_a_broken_entry_point_cannot_hide_a_backend_that_is_there(monkeypatch):
    def load():
        raise ImportError("gone")

    broken = EntryPoint(load)
    broken.name = "sdpa"
    use_entry_points(monkeypatch, broken)
    assert select_backend("sdpa", SPEC).name == "sdpa"
    assert available_backends()["sdpa"] is None


def test_a_probe_that_crashes_is_a_reason_against_its_own_backend_alone():
    class Crashing(Custom):
        name = "crashing"

        @classmethod
        def unavailable_reason(cls):
            raise OSError("driver gone")

    register_backend(Crashing)
    reasons = available_backends()
    assert "OSError: driver gone" in reasons["crashing"] and reasons["sdpa"] is None
    with pytest.raises(AttentionBackendError, match="OSError: driver gone.*would serve: auto, sdpa"):
        select_backend("crashing", SPEC)


def test_what_is_no_backend_is_refused():
    with pytest.raises(ValueError, match="no subclass of AttentionBackend"):
        register_backend(dict)
    with pytest.raises(AttentionBackendError, match="the backend's name is None"):
        select_backend(None, SPEC)
