"""Pipelines: from text to frames."""

import importlib

_EXPORTS = {
    "FrameDecoder": "visual_gen.pipelines.frame_stream",
    "FrameStream": "visual_gen.pipelines.frame_stream",
    "GenerationError": "visual_gen.pipelines.errors",
    "StreamEngine": "visual_gen.pipelines.stream_engine",
    "WanPipeline": "visual_gen.pipelines.wan",
    "WanPipelineOutput": "visual_gen.pipelines.wan",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str):
    # Loaded on first use: diffusers and transformers take seconds, which checking a request or a prompt does not need.
    if name not in _EXPORTS:
        raise AttributeError(f"module 'visual_gen.pipelines' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
