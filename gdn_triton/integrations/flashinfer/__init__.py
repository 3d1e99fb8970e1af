"""This package's ops under FlashInfer's names, with FlashInfer's arguments and their meaning.

A program written for `flashinfer.gdn_prefill` and `flashinfer.gdn_decode` only changes its imports.
The parameters, their order and their defaults are those of FlashInfer 0.7.2, which need not be
installed. FlashInfer's convention differs from this package's in these points:

- tokens are packed, [T, H, K], without a batch dimension; states are value-first, [N, HV, V, K];
- `g` of the prefill is the decay alpha itself, from 0 to 1, not its logarithm (`log_decay`);
- there may be fewer k and v heads than q heads; then heads of k and v are repeated, in a copy;
- states are read from and written to the caller's tensors, and `output` is filled if it is given.

`backend` chooses among FlashInfer's own kernels and has no effect here. With `use_cp=False` no
sequence is split; other values have no effect. An argument that this package does not support is an
error.
"""

from gdn_triton.integrations.flashinfer.decode import (
    gated_delta_rule_decode,
    gated_delta_rule_decode_pretranspose,
    gated_delta_rule_mtp,
)
from gdn_triton.integrations.flashinfer.prefill import chunk_gated_delta_rule, log_decay

__all__ = [
    "chunk_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_decode_pretranspose",
    "gated_delta_rule_mtp",
    "log_decay",
]
