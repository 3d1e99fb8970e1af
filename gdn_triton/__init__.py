"""Gated DeltaNet on Triton kernels, with the signature of flash-linear-attention's op."""

from gdn_triton.api import chunk_gated_delta_rule, chunk_gdn, explain
from gdn_triton.backend import Explanation

__version__ = "0.1.0"

__all__ = ["Explanation", "__version__", "chunk_gated_delta_rule", "chunk_gdn", "explain"]
