"""The public preparation of the gated delta rule's inputs: validate, choose a backend, run it."""

import torch
from torch import Tensor

from gdn_triton._host.tensors import is_traced
from gdn_triton.prep.backends import choose_post_conv, run_post_conv
from gdn_triton.prep.operators import traced
from gdn_triton.prep.validation import validate_post_conv


def fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    apply_l2norm: bool = True,
    output_g_exp: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The inputs of the gated delta rule from the output of the causal convolution, in one pass.

    In a Gated DeltaNet layer (Yang, Kautz and Hatamizadeh, 2024, arXiv:2412.06464, section 3.4)
    these are all operations between the convolution over [q | k | v] and the rule:

        q, k = x * rsqrt(sum(x^2) + 1e-6) of each head      v = its columns
        g    = -exp(A_log) * softplus(a + dt_bias)          beta = sigmoid(b)

    in one kernel that reads conv_output, a and b once and writes contiguous outputs. The
    parameters, their order and their defaults are those of vLLM's function of that name. Call the
    rule on the result without its own norm, gate and sigmoid:

        q, k, v, g, beta = fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, H, K, V)
        chunk_gated_delta_rule(q[None], k[None], v[None], g[None], beta[None], ...)

    Sizes: L tokens of one or several consecutive sequences, H heads of q and k with K channels, HV
    heads of v with V channels, HV a multiple of H. "Float" is float16, bfloat16, float32 or
    float64. All tensors are on one device.

    Args:
        conv_output: [L, 2 * H * K + HV * V], float: in a row H heads of q, H of k, HV of v. It is
            read in place if its rows are dense, at any distance, as in a view of a projection, or
            if its columns are dense, as in the transpose of a [2 * H * K + HV * V, L]. Otherwise
            the Triton backend first copies it.
        a: [L, HV], float: the gate before its activation. Any strides.
        b: [L, HV], float: the logit of the write strength. Any strides.
        A_log: [HV], float: log of the decay's rate.
        dt_bias: [HV], float: added to a.
        num_k_heads: H.
        head_k_dim: K, at most 256 in the Triton backend and unlimited in the reference.
        head_v_dim: V.
        apply_l2norm: normalise each head of q and k, computed in float32 and rounded to their
            dtype. False: q and k are copied.
        output_g_exp: return the decay exp(g) in place of g.

    Returns:
        q, k: [L, H, K], the dtype of conv_output.
        v: [L, HV, V], the dtype of conv_output.
        g: [L, HV], float32: natural log of the decay, at most 0; its exponential, 0 to 1, with
            `output_g_exp`.
        beta: [L, HV], float32, 0 to 1.
        g and beta are float64 if any input is. All five are new and contiguous.

    The arithmetic is float32 (float64 if any input is); softplus(x) is x above 20. `GDN_BACKEND`
    chooses the backend, triton or reference; a call that needs gradients runs in the reference. The
    host does not wait for the device, so a call can be captured in a CUDA graph. Under
    torch.compile a call is one operator.

    Raises:
        TypeError, ValueError: an argument that does not fit, with its name, the expected and the
            given value; nothing has been launched. ValueError also for an unknown `GDN_BACKEND`.
        RuntimeError: the backend asked for by name cannot run this call, with its reason.
    """
    args = (
        conv_output,
        a,
        b,
        A_log,
        dt_bias,
        num_k_heads,
        head_k_dim,
        head_v_dim,
        apply_l2norm,
        output_g_exp,
    )
    if is_traced(conv_output):
        return traced(*args)
    sizes = validate_post_conv(*args)
    needs_grad = torch.is_grad_enabled() and (
        conv_output.requires_grad
        or a.requires_grad
        or b.requires_grad
        or A_log.requires_grad
        or dt_bias.requires_grad
    )
    return run_post_conv(choose_post_conv(sizes, needs_grad), *args)
