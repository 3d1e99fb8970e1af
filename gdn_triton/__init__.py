"""Gated DeltaNet on Triton kernels, with the signature of flash-linear-attention's op."""

from gdn_triton._host.backends import Explanation
from gdn_triton.chunk.api import chunk_gated_delta_rule, chunk_gdn
from gdn_triton.chunk.prefill.api import chunk_prefill
from gdn_triton.conv.api import causal_conv1d, causal_conv1d_update, fused_conv_prep
from gdn_triton.explanations import explain, explain_call
from gdn_triton.norm.api import rms_norm_gated
from gdn_triton.prep.api import fused_post_conv_prep
from gdn_triton.recurrent.api import (
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    recurrent_step,
)
from gdn_triton.recurrent.prepared import PreparedStep, prepare_step
from gdn_triton.recurrent.window import (
    StepWindow,
    accept_window,
    fold_window,
    make_window,
    restart_window,
)
from gdn_triton.step.api import layer_step
from gdn_triton.warming import warmup

__version__ = "0.1.0"

__all__ = [
    "Explanation",
    "PreparedStep",
    "StepWindow",
    "__version__",
    "accept_window",
    "causal_conv1d",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_prefill",
    "explain",
    "explain_call",
    "fold_window",
    "fused_conv_prep",
    "fused_post_conv_prep",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "layer_step",
    "make_window",
    "prepare_step",
    "recurrent_step",
    "restart_window",
    "rms_norm_gated",
    "warmup",
]
