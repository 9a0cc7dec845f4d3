"""Names to backend classes. A named backend runs or raises; only "auto" chooses, in auto_order, and says why."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points

from attention_backend.flash_attn4 import FlashAttention4Backend
from attention_backend.interface import CAPABILITIES, AttentionBackend, AttentionBackendError, AttentionSpec
from attention_backend.paged_flash_attn3 import PagedFlashAttention3Backend
from attention_backend.sdpa import SDPABackend

logger = logging.getLogger(__name__)

AUTO_ORDER = ("flash_attn4", "paged_flash_attn3", "sdpa")
# On an H200, FlashAttention-3 reads a KV cache in place 1 to 15 % faster than FlashAttention-4, in every layout tried.
AUTO_ORDER_OF_CACHES = ("paged_flash_attn3", "flash_attn4", "sdpa")
ENTRY_POINT_GROUP = "attention_backend.backends"

_classes: dict[str, type[AttentionBackend]] = {}
_broken_entry_points: dict[str, str] = {}
_entry_points_read = False


@dataclass(frozen=True)
class Selection:
    """Which backend serves a site, and why: the reasons against each backend that "auto" passed over."""

    name: str
    why: str


def register_backend(cls: type[AttentionBackend]) -> type[AttentionBackend]:
    """Adds a backend class under `cls.name`; usable as a decorator. "auto" does not consider it: name it to use it.

    Raises ValueError if the name is missing, is "auto", or belongs to another class, and if `cls.capabilities` is no
    set of names of CAPABILITIES.
    """
    if not (isinstance(cls, type) and issubclass(cls, AttentionBackend)):
        raise ValueError(f"{cls!r} is no subclass of AttentionBackend; only those can be registered")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name == "auto":
        raise ValueError(f"{cls.__name__}.name is {name!r}; a backend needs a name of its own other than 'auto'")
    _check_capability_names(cls)
    known = _classes.get(name)
    # A module imported twice (a reload) registers the same class again; another class under the name is a mistake.
    if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"backend name {name!r} already belongs to {known.__module__}.{known.__qualname__}")
    _classes[name] = cls
    return cls


def _check_capability_names(cls: type[AttentionBackend]) -> None:
    found = cls.capabilities
    # A bare text would answer for every text within it: "lse" in "false".
    if not isinstance(found, set | frozenset):
        raise ValueError(f"{cls.__name__}.capabilities is {found!r}; it must be a set of names, such as {{'lse'}}")
    for name in sorted(found - CAPABILITIES, key=str):
        raise ValueError(
            f"{cls.__name__}.capabilities has {name!r}{_did_you_mean(name, CAPABILITIES)}; known are "
            f"{', '.join(sorted(CAPABILITIES))}"
        )


def _did_you_mean(name: object, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), sorted(known), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


def backend_classes() -> dict[str, type[AttentionBackend]]:
    """All registered classes by name, those of installed entry points included."""
    global _entry_points_read
    if not _entry_points_read:
        _entry_points_read = True
        for point in entry_points(group=ENTRY_POINT_GROUP):
            try:
                register_backend(point.load())
            except Exception as error:  # a foreign package may fail in any way; it must not take the others along
                _broken_entry_points[point.name] = f"entry point {point.value} failed: {type(error).__name__}: {error}"
                logger.warning("attention backend %s: %s", point.name, _broken_entry_points[point.name])
    return dict(_classes)


def broken_entry_points() -> dict[str, str]:
    """What went wrong with each installed entry point that gave no backend, by its name."""
    backend_classes()
    return dict(_broken_entry_points)


def available_backends() -> dict[str, str | None]:
    """For each known name: None if it can run on this machine, else why not and how to get it."""
    reasons = {name: _unavailable(cls) for name, cls in backend_classes().items()}
    return broken_entry_points() | reasons


def check_backend_name(name: str) -> None:
    """Raises AttentionBackendError unless `name` is "auto" or a backend that is registered, be it available or not."""
    classes = backend_classes()
    if not isinstance(name, str):
        raise AttentionBackendError(f"the backend's name is {name!r}; it must be 'auto' or one of {sorted(classes)}")
    if name == "auto" or name in classes:
        return
    if name in _broken_entry_points:
        raise AttentionBackendError(f"backend {name!r}: {_broken_entry_points[name]}")
    raise AttentionBackendError(
        f"no attention backend {name!r}{_did_you_mean(name, classes)}; known: auto, {', '.join(sorted(classes))}"
    )


def select_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """A backend for one site; its `selection` says what was taken and why.

    name: a registered name, which serves `spec` or raises AttentionBackendError with every reason and what would
    serve, or "auto", which takes the first of auto_order(spec) that can.
    """
    check_backend_name(name)
    classes = backend_classes()
    if name == "auto":
        return _select_auto(classes, spec)
    reasons = _reasons_against(classes[name], spec)
    if reasons:
        serving = [other for other, cls in classes.items() if other != name and not _reasons_against(cls, spec)]
        raise AttentionBackendError(
            f"backend {name!r} cannot serve {spec.role} attention (heads {spec.num_heads}/{spec.num_kv_heads}, "
            f"head_dim {spec.head_dim}, {spec.dtype}, {spec.device}): {'; '.join(reasons)}. "
            f"These would serve: {', '.join(['auto', *serving]) if serving else 'none'}"
        )
    return _build(classes[name], spec, "named in the configuration")


def auto_order(spec: AttentionSpec) -> tuple[str, ...]:
    """What "auto" tries for `spec`, first to last: AUTO_ORDER, or for self-attention to a KV cache another order."""
    reads_cache = spec.role == "self" and spec.needs & {"extent_kv", "paged_kv"}
    return AUTO_ORDER_OF_CACHES if reads_cache else AUTO_ORDER


def _select_auto(classes: dict[str, type[AttentionBackend]], spec: AttentionSpec) -> AttentionBackend:
    passed_over: list[str] = []
    for name in auto_order(spec):
        # What the spec alone rules out is not asked whether it is here: that can import seconds of kernel package.
        reasons = classes[name].unsupported_reasons(spec) or _reasons_against(classes[name], spec)
        if not reasons:
            why = "auto" + (f", passing over {' | '.join(passed_over)}" if passed_over else ": first in order")
            return _build(classes[name], spec, why)
        passed_over.append(f"{name}: {'; '.join(reasons)}")
    against = " | ".join(passed_over)
    raise AttentionBackendError(f"no backend can serve {spec.role} attention on {spec.device}: {against}")


def _unavailable(cls: type[AttentionBackend]) -> str | None:
    try:
        return cls.unavailable_reason()
    except Exception as error:  # a foreign probe that crashes is a reason against that backend, not against the others
        return f"asking {cls.name} whether it is available failed: {type(error).__name__}: {error}"


def _reasons_against(cls: type[AttentionBackend], spec: AttentionSpec) -> list[str]:
    unavailable = _unavailable(cls)
    return ([unavailable] if unavailable else []) + cls.unsupported_reasons(spec)


def _build(cls: type[AttentionBackend], spec: AttentionSpec, why: str) -> AttentionBackend:
    backend = cls(spec)
    if cls.kernels_from():
        why += f"; kernels from {cls.kernels_from()}"
    backend.selection = Selection(cls.name, why)
    logger.info("%s attention: %s (%s)", spec.role, cls.name, why)
    return backend


for _cls in (SDPABackend, FlashAttention4Backend, PagedFlashAttention3Backend):
    register_backend(_cls)
