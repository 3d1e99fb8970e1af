"""Jit functions for gates, write strengths, queries and keys, which kernels of several operators
call."""

import triton
import triton.language as tl


@triton.jit
def log_decay(x, A_log, rate, THRESHOLD: tl.constexpr):
    """Computes the natural-log decay -exp(A_log) softplus(x). x: the raw gate plus its bias. rate:
    exp(A_log).

    softplus(x) = log(1 + e^x) has four ranges. For e^x < 1/16 its series is summed, because 1 + e^x
    and a fast logarithm would lose the bits of e^x. Above that the logarithm is corrected by the
    rounding error of 1 + e^x. Above the threshold softplus(x) is x, as in the models' formula. Far
    below 0 softplus(x) is e^x, and the product of both exponentials is exp(A_log + x): the rate
    alone may overflow where e^x underflows, and inf * 0 is NaN. The ranges are selected by `where`,
    which passes a NaN of x on; a minimum would drop it."""
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
def norm_factors(b_x, EPS: tl.constexpr):
    """Returns 1 / sqrt(sum x^2 + EPS) of each row, in fp32."""
    x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + EPS)


@triton.jit
def normalized(b_x, EPS: tl.constexpr):
    """Divides the rows of b_x by their norms, in b_x's dtype."""
    return (b_x.to(tl.float32) * norm_factors(b_x, EPS)[:, None]).to(b_x.dtype)
