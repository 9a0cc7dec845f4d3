from visual_gen.models.wan.config import WAN_PRESETS, WanConfig
from visual_gen.models.wan.text_kv import TextKV
from visual_gen.models.wan.transformer import WanTransformer

__all__ = ["WAN_PRESETS", "TextKV", "WanConfig", "WanTransformer"]
