"""The complete Gated DeltaNet layer, its cache, and parameter groups for an optimizer.
`import gdn_triton` does not import this package."""

from gdn_triton.layers.cache import GatedDeltaNetCache
from gdn_triton.layers.gated_deltanet import GatedDeltaNet
from gdn_triton.layers.qwen import weights_from_qwen
from gdn_triton.layers.weight_decay import parameter_groups

__all__ = ["GatedDeltaNet", "GatedDeltaNetCache", "parameter_groups", "weights_from_qwen"]
