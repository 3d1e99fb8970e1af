"""This package's ops under FlashInfer's names, with its arguments and its meaning of them.

For a program that was written for `flashinfer.gdn_prefill` and `flashinfer.gdn_decode`: it changes
the import. The parameters, their order and their defaults are those of FlashInfer 0.7.2, which is
not needed. Where its convention differs from this package's:

- tokens are packed, [T, H, K], without a batch dimension; states are value-first, [N, HV, V, K];
- `g` of the prefill is the decay alpha itself, in 0 to 1, not its logarithm (`log_decay`);
- there may be fewer k and v heads than q heads; heads of k and v are repeated then, in a copy;
- states are read from and written to the caller's tensors, and `output` is filled if it is given.

What chooses among FlashInfer's own kernels (`backend`) is a hint, and so is `use_cp`, of which
False is kept: no sequence is cut. What is not served is an error, never ignored.
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
