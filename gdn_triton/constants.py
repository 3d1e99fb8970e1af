"""Numbers that more than one module must agree on."""

import math

import torch

CHUNK_SIZES = (16, 32, 64)
DEFAULT_CHUNK_SIZE = 64

# Natural-log gates times this are log2 gates, the unit of `g_cumsum`.
RCP_LN2 = 1.0 / math.log(2.0)

# The norm of q and k is x * rsqrt(sum(x^2) + L2NORM_EPS).
L2NORM_EPS = 1e-6

# Above this threshold softplus(x) is computed as x. Below -2 times the threshold softplus(x) equals
# e^x to the last bit of float64, because e^-40 is less than 2^-57.
SOFTPLUS_THRESHOLD = 20.0

# The floor of one token's log2 decay. 2^floor is exactly 0 in the dtype (the least subnormals are
# 2^-149 and 2^-1074), so the floor changes no factor. It only keeps differences of cumulative sums
# from being (-inf) - (-inf).
LOG2_DECAY_FLOOR = {torch.float32: -160.0, torch.float64: -1100.0}

# An int8 state stores the largest magnitude of a value channel as this number. A channel whose
# magnitudes are all at most LEAST_INT8_RANGE is stored as zeros: the reciprocal of a smaller range
# could overflow.
INT8_MAX = 127.0
LEAST_INT8_RANGE = 1e-30

# The largest key size of the Triton and CUDA kernels. The reference has no limit.
MAX_K = 256

# A bound of the distance between rows (a row is a token's heads), in elements: below it the Triton
# kernels' offsets inside a chunk of 64 rows fit 32 bits. Offsets to a chunk are 64-bit.
MAX_ROW_STRIDE = 2**31 // 64

# The Triton kernels' copies of q, k and v have rows of a multiple of this many elements, which
# Triton needs for its widest loads.
LINE = 16

# A bound of the elements from the first to the last of a state, below which offsets inside of the
# state fit 32 bits.
MAX_STATE_SPAN = 2**31

# A bound of the tokens of a padded sequence, or of the row of a packed call: below it token numbers
# fit 32 bits in the kernels, those of a partly filled last chunk or segment included.
MAX_TOKENS = 2**30
