"""The whole Gated DeltaNet layer, and what it keeps between calls. Imported by name only."""

from gdn_triton.layers.cache import GatedDeltaNetCache
from gdn_triton.layers.gated_deltanet import GatedDeltaNet
from gdn_triton.layers.qwen import weights_from_qwen

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache", "weights_from_qwen"]
