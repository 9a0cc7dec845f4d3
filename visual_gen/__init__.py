"""Visual generation on the attention layer: the Attention module, Wan, its pipeline and its configuration."""

import importlib

_EXPORTS = {
    "Attention": "visual_gen.modules.attention",
    "CausalWanTransformer": "visual_gen.models.wan",
    "FrameStream": "visual_gen.pipelines",
    "StreamEngine": "visual_gen.pipelines",
    "WanPipeline": "visual_gen.pipelines",
    "WanTransformer": "visual_gen.models.wan",
    "load_config": "visual_gen.config",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    # Loaded on first use: the command line must answer --help before torch is there.
    if name not in _EXPORTS:
        raise AttributeError(f"module 'visual_gen' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
