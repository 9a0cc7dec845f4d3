"""Pipelines: from text to frames."""

from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.wan import WanPipeline, WanPipelineOutput

__all__ = ["GenerationError", "WanPipeline", "WanPipelineOutput"]
