"""Numbers that more than one module must agree on."""

import math

import torch

CHUNK_SIZES = (16, 32, 64)
DEFAULT_CHUNK_SIZE = 64

# Natural-log gates times this are log2 gates, the unit of `g_cumsum`.
RCP_LN2 = 1.0 / math.log(2.0)

# Inside the square root: x * rsqrt(sum(x^2) + L2NORM_EPS).
L2NORM_EPS = 1e-6

# Above this, softplus(x) is taken to be x. Below -2 times this it is e^x to the last bit of
# float64, as e^-40 is less than 2^-57.
SOFTPLUS_THRESHOLD = 20.0

# Floor of one token's log2 decay. 2^floor is exactly 0 in the dtype (the least subnormals are
# 2^-149 and 2^-1074), so the floor changes no factor. It only keeps differences of cumulative sums
# from being (-inf) - (-inf).
LOG2_DECAY_FLOOR = {torch.float32: -160.0, torch.float64: -1100.0}

# An int8 state stores the largest magnitude of a value channel as this number. A channel whose
# magnitudes are all at most LEAST_INT8_RANGE is stored as zeros: the reciprocal of a smaller range
# could overflow.
INT8_MAX = 127.0
LEAST_INT8_RANGE = 1e-30

# Largest key size of the Triton and CUDA kernels; the reference has no limit.
MAX_K = 256

# Elements from a row (a token's heads) to the next, below which the Triton kernels' offsets inside
# a chunk of 64 rows fit 32 bits. Offsets to a chunk are 64-bit.
MAX_ROW_STRIDE = 2**31 // 64

# The Triton kernels' copies of q, k and v have rows of whole multiples of this many elements: what
# Triton needs for its widest loads.
LINE = 16

# Elements between the first and the last of a state, below which offsets inside it fit 32 bits.
MAX_STATE_SPAN = 2**31

# Tokens of a padded sequence, or of the row of a packed call, below which the numbers of tokens fit
# 32 bits in the kernels, with room for a chunk or a segment that the last token does not fill.
MAX_TOKENS = 2**30
