from visual_gen.modules.attention import Attention, CrossKV
from visual_gen.modules.feed_forward import FeedForward

__all__ = ["Attention", "CrossKV", "FeedForward"]
