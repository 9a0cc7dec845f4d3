from visual_gen.models.wan.causal import CausalWanTransformer
from visual_gen.models.wan.config import WAN_PRESETS, WanConfig
from visual_gen.models.wan.text_kv import TextKV
from visual_gen.models.wan.text_pool import PooledText, TextPool
from visual_gen.models.wan.transformer import WanTransformer

__all__ = [
    "WAN_PRESETS", "CausalWanTransformer", "PooledText", "TextKV", "TextPool", "WanConfig", "WanTransformer"
]  # fmt: skip
