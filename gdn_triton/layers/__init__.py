"""The whole Gated DeltaNet layer, what it keeps between calls, and an optimizer's groups for models
of it. Imported by name only."""

from gdn_triton.layers.cache import GatedDeltaNetCache
from gdn_triton.layers.gated_deltanet import GatedDeltaNet
from gdn_triton.layers.qwen import weights_from_qwen
from gdn_triton.layers.weight_decay import parameter_groups

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache", "parameter_groups", "weights_from_qwen"]
