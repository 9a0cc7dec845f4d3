"""The kernel layer: attention backends, their selection, and the metadata that they share."""

from attention_backend.graph_buffers import GraphBuffers
from attention_backend.interface import (
    CAPABILITIES,
    AttentionBackend,
    AttentionBackendError,
    AttentionSpec,
    AttentionTensorLayout,
)
from attention_backend.merge import merge_attention, merge_pad_rows
from attention_backend.metadata import ExtentKV, MaskedKV, PackedKV, PackedPadKV, PaddedKV, PagedKV
from attention_backend.metadata_state import AttentionMetadataState
from attention_backend.pad_formulation import pad_formulation
from attention_backend.selection import (
    AUTO_ORDER,
    AUTO_ORDER_OF_CACHES,
    Selection,
    auto_order,
    available_backends,
    backend_classes,
    broken_entry_points,
    check_backend_name,
    register_backend,
    select_backend,
)

__all__ = [
    "AUTO_ORDER",
    "AUTO_ORDER_OF_CACHES",
    "CAPABILITIES",
    "AttentionBackend",
    "AttentionBackendError",
    "AttentionMetadataState",
    "AttentionSpec",
    "AttentionTensorLayout",
    "ExtentKV",
    "GraphBuffers",
    "MaskedKV",
    "PackedKV",
    "PackedPadKV",
    "PaddedKV",
    "PagedKV",
    "Selection",
    "auto_order",
    "available_backends",
    "backend_classes",
    "broken_entry_points",
    "check_backend_name",
    "merge_attention",
    "merge_pad_rows",
    "pad_formulation",
    "register_backend",
    "select_backend",
]
