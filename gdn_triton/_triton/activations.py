"""What kernels of several ops do to gates, write strengths, queries and keys: jit functions."""

import triton
import triton.language as tl


@triton.jit
def log_decay(x, A_log, rate, THRESHOLD: tl.constexpr):
    """-exp(A_log) softplus(x), the natural-log decay. x: the raw gate, to which its bias has been
    added. rate: exp(A_log).

    softplus(x) = log(1 + e^x). Below e^x = 1/16 by its series, where 1 + e^x and a fast logarithm
    lose e^x; above that with what the rounding of 1 + e^x lost put back; above the threshold x
    itself, as the formula of the models has it. Where softplus is e^x, the two exponentials are one
    of the sum: the rate may overflow where e^x underflows, and inf * 0 is NaN. NaN of NaN: selects,
    where a minimum would take the number."""
    is_exp = x < -2 * THRESHOLD
    e = tl.exp(tl.where(is_exp, A_log + x, tl.where(x > THRESHOLD, THRESHOLD, x)))
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5 - e / 6)))))
    u = 1 + e
    log1p = tl.where(e < 0.0625, series, tl.log(u) + (e - (u - 1)) / u)
    return -tl.where(is_exp, e, rate * tl.where(x > THRESHOLD, x, log1p))


@triton.jit
def sigmoid(x, FACTOR: tl.constexpr):
    """FACTOR times the logistic function."""
    return FACTOR / (1 + tl.exp(-x))


@triton.jit
def normalized(b_x, EPS: tl.constexpr):
    """Rows of b_x over their norm, in b_x's dtype."""
    x = b_x.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 1) + EPS)[:, None]).to(b_x.dtype)
