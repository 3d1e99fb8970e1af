"""Steps of several tokens in Gluon, which keep the last state or the state after every token. A
program holds its columns of a state in registers, whose layout lets few threads share a column.
Therefore they exchange few sums. The program first computes the numbers that depend on the tokens
alone, and stores them, with q and k in float32, in shared memory.

`../kernel.py` computes the same bits, and has the equations. In its layout 32 or 16 threads share a
value-first column, and exchanges limit its speed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from gdn_triton._triton.activations import log_decay
from gdn_triton._triton.views import meet
from gdn_triton.recurrent.triton.hopper.parts import K, sum_of_channels, whole_warps
from gdn_triton.recurrent.triton.kernel import strength

# The tokens that are in shared memory at once, and the numbers of each that do not depend on a
# column of the state. There are six of them, and two copies fill a power of two.
TOKENS, FACTORS = gl.constexpr(4), gl.constexpr(8)
# The threads that share columns of the state, the channels of each thread, and the channels that a
# thread reads at once.
LANES, CHANNELS, READ = gl.constexpr(8), gl.constexpr(16), gl.constexpr(4)


@gluon.constexpr_function
def chained(KEY_FIRST, BITS):
    """Returns the number of rows of a column in a chain, which fused multiply-adds add one after
    another."""
    return 16 if KEY_FIRST else 128 // BITS


@gluon.constexpr_function
def at(i, CHAIN, KEY_FIRST):
    """Returns the channel of a thread that is added after i others. In a chain of a value-first
    state even channels come before odd ones, and the same holds for the even and for the odd ones
    when they are numbered anew."""
    if KEY_FIRST:
        return i
    bits = CHAIN.bit_length() - 1
    reverse = int(f"{i % CHAIN:0{bits}b}"[::-1], 2)
    return i - i % CHAIN + reverse


@gluon.constexpr_function
def threads_of_channels(KEY_FIRST):
    """Returns the bases of the threads of a warp for a token's channels [LANES, READ]."""
    threads, others = [[1, 0], [2, 0], [4, 0]], [[0, 0]] * 2
    return others + threads if KEY_FIRST else threads + others


@gluon.jit
def halves_of(x, LAYOUT: gl.constexpr):
    """Returns the elements of x [.., 2] as two tensors [..] in LAYOUT."""
    first, last = gl.split(x)
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(last, LAYOUT)


@gluon.jit
def quarters_of(x, LAYOUT: gl.constexpr):
    """Does the same as `halves_of` for x [.., 4]."""
    even, odd = gl.split(gl.reshape(x, x.shape[:-1] + [2, 2]))
    x0, x2 = halves_of(even, LAYOUT)
    x1, x3 = halves_of(odd, LAYOUT)
    return x0, x1, x2, x3


@gluon.jit
def eighths_of(x, LAYOUT: gl.constexpr):
    """Does the same as `halves_of` for x [.., 8]."""
    even, odd = gl.split(gl.reshape(x, x.shape[:-1] + [4, 2]))
    x0, x2, x4, x6 = quarters_of(even, LAYOUT)
    x1, x3, x5, x7 = quarters_of(odd, LAYOUT)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def joined(x, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Returns COUNT tensors of x from FIRST on, 4 or 8, as one tensor. This is the inverse of
    `quarters_of` and of `eighths_of`."""
    if COUNT == 4:
        even = gl.join(x[FIRST], x[FIRST + 2])
        odd = gl.join(x[FIRST + 1], x[FIRST + 3])
    else:
        even = gl.join(gl.join(x[FIRST], x[FIRST + 4]), gl.join(x[FIRST + 2], x[FIRST + 6]))
        odd = gl.join(gl.join(x[FIRST + 1], x[FIRST + 5]), gl.join(x[FIRST + 3], x[FIRST + 7]))
    return gl.reshape(gl.join(even, odd), x[FIRST].shape + [COUNT])


@gluon.jit
def sum_of_chains(x, COUNT: gl.constexpr):
    """Returns the sum of COUNT chains. In the portable kernel each chain has a thread of its own,
    and the sums of the threads are added in this order."""
    if COUNT == 4:
        return (x[0] + x[2]) + (x[1] + x[3])
    elif COUNT == 2:
        return x[0] + x[1]
    else:
        return x[0]


@gluon.jit
def sum_of_threads(x, COLUMN: gl.constexpr, KEY_FIRST: gl.constexpr):
    """Returns the sums of x [BV, LANES] over its columns, as `column_sums` of `sums.py` adds those
    of threads."""
    if KEY_FIRST:
        x = gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), 2)
    return gl.convert_layout(gl.sum(x, 1), COLUMN)


@gluon.jit
def store_channels(x_s, x, KEY_FIRST: gl.constexpr, CHAIN: gl.constexpr):
    """Stores x [TOKENS, K], of which a thread then reads four channels at once."""
    READS: gl.constexpr = TOKENS * (CHANNELS // READ)
    if KEY_FIRST:
        x = gl.permute(gl.reshape(x, [READS, READ, LANES]), (0, 2, 1))
    else:
        x = gl.reshape(x, [TOKENS * (CHANNELS // CHAIN), LANES, CHAIN // READ, READ])
        x = gl.permute(x, (0, 2, 1, 3))
    x_s.store(gl.reshape(x, [READS * LANES, READ]))


@gluon.jit
def load_channels(x_s, t: gl.constexpr, READ_LAYOUT: gl.constexpr, ROW: gl.constexpr):
    """Returns q or k of token t as vectors [LANES], one for each channel of a thread."""
    READS: gl.constexpr = CHANNELS // READ
    channels = ()
    for i in gl.static_range(READS):
        read = x_s.slice((t * READS + i) * LANES, LANES, 0).load(READ_LAYOUT)
        channels += quarters_of(read, ROW)
    return channels


@gluon.jit
def widened(x):
    """Returns x in float32, with one instruction for each number. The compiler would take two for
    every second one."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """Returns x in dtype. One instruction rounds two neighbours. The compiler would take one for
    each, because no store takes both."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return x.to(dtype)


@gluon.jit
def one_token(
    state, q_s, k_s, f_s, b_v, p_o, t: gl.constexpr, KEY_FIRST: gl.constexpr,
    CHAIN: gl.constexpr, READ_LAYOUT: gl.constexpr, FACTOR: gl.constexpr,
    PIECE: gl.constexpr
):  # fmt: skip
    """Stores o of token t at p_o, and returns the state after the token. state: [BV, LANES] for
    each channel of a thread. b_v: v of the token."""
    COLUMN: gl.constexpr = gl.SliceLayout(1, PIECE)
    dtype: gl.constexpr = state[0].dtype
    q = load_channels(q_s, t, READ_LAYOUT, gl.SliceLayout(0, PIECE))
    k = load_channels(k_s, t, READ_LAYOUT, gl.SliceLayout(0, PIECE))
    of_q, of_k, decay, of_v, b_beta, qk, _, _ = eighths_of(
        f_s.slice(t, 1, 0).slice(0, FACTORS, 1).load(FACTOR), COLUMN
    )
    sums_q, sums_k = (), ()
    for i in gl.static_range(CHANNELS // CHAIN):
        b_h = widened(state[i * CHAIN])
        sum_q, sum_k = b_h * q[i * CHAIN][None, :], b_h * k[i * CHAIN][None, :]
        for j in gl.static_range(i * CHAIN + 1, (i + 1) * CHAIN):
            b_h = widened(state[at(j, CHAIN, KEY_FIRST)])
            sum_q = gl.fma(b_h, q[at(j, CHAIN, KEY_FIRST)][None, :], sum_q)
            sum_k = gl.fma(b_h, k[at(j, CHAIN, KEY_FIRST)][None, :], sum_k)
        sums_q += (sum_q,)
        sums_k += (sum_k,)
    sum_q = sum_of_chains(sums_q, CHANNELS // CHAIN)
    sum_k = sum_of_chains(sums_k, CHANNELS // CHAIN)
    b_o = sum_of_threads(sum_q, COLUMN, KEY_FIRST) * of_q
    stored = sum_of_threads(sum_k, COLUMN, KEY_FIRST) * of_k
    b_v = (b_v.to(gl.float32) - stored) * of_v
    b_v *= b_beta
    gl.store(p_o, gl.fma(b_v, qk, b_o).to(p_o.dtype.element_ty))
    kept = ()
    for i in gl.static_range(CHANNELS):
        b_h = widened(state[i])
        kept += (rounded(gl.fma(b_h, decay[:, None], k[i][None, :] * b_v[:, None]), dtype),)
    return kept


@gluon.jit
def store_state(
    p_state, state, KEY_FIRST: gl.constexpr, CHAIN: gl.constexpr, TILE: gl.constexpr,
    stride_hk: gl.constexpr, POLICY: gl.constexpr
):  # fmt: skip
    """Stores a state at p_state, the pointers of the first rows of the state."""
    if KEY_FIRST:
        for i in gl.static_range(CHANNELS):
            gl.store(p_state + i * LANES * stride_hk, state[i], eviction_policy=POLICY)
    else:
        for i in gl.static_range(CHANNELS // CHAIN):
            tile = gl.convert_layout(joined(state, i * CHAIN, CHAIN), TILE)
            gl.store(p_state + i * LANES * CHAIN, tile, eviction_policy=POLICY)


@gluon.jit(do_not_specialize=["N", "T"])
def recurrent_several_fwd_kernel(
    q, k, v, g, beta, A_log, dt_bias, o, state, read_slots, write_slots, cu_seqlens,
    num_accepted_tokens, N, T, scale,
    stride_qb, stride_qt, stride_qh, stride_qk, stride_kb, stride_kt, stride_kh, stride_kk,
    stride_vb, stride_vt, stride_vh, stride_vv, stride_gb, stride_gt, stride_gh, stride_bb,
    stride_bt, stride_bh, stride_A, stride_dt, stride_ob, stride_ot, stride_oh, stride_ov,
    stride_htn, stride_hth, stride_r, stride_rt, stride_wb, stride_wt, stride_c, stride_n,
    stride_htk: gl.constexpr, stride_htv: gl.constexpr, H: gl.constexpr, HV: gl.constexpr,
    V: gl.constexpr, BV: gl.constexpr, K_OFFSET: gl.constexpr, V_OFFSET: gl.constexpr,
    RCP_LN2: gl.constexpr, EPS: gl.constexpr, THRESHOLD: gl.constexpr,
    USE_QK_L2NORM: gl.constexpr, BETA_FACTOR: gl.constexpr, EVERY_TOKEN: gl.constexpr,
    COLUMNS: gl.constexpr, LAST_SKIPPED: gl.constexpr, EACH: gl.constexpr, POLICY: gl.constexpr,
    DEPENDENT: gl.constexpr
):  # fmt: skip
    """K = 128. A program has BV columns of the state of one sequence and value head, bfloat16 or
    float32, in a pool. EACH: the number of tokens of each sequence, at most TOKENS, or 0 if the
    kernel reads it. The other arguments are those of `recurrent_fwd_kernel`."""
    gl.static_assert(EACH <= TOKENS)
    NW: gl.constexpr = gl.num_warps()
    V_BLOCKS: gl.constexpr = V // BV
    KEY_FIRST: gl.constexpr = stride_htv == 1
    dtype: gl.constexpr = state.dtype.element_ty
    CHAIN: gl.constexpr = chained(KEY_FIRST, dtype.primitive_bitwidth)

    # A thread has 1, 2 or 4 columns of the state. It has chains of neighbouring rows of its columns
    # if the state is value-first, and every LANES-th row of them otherwise.
    OF_THREAD: gl.constexpr = BV // (4 * NW)
    PIECE: gl.constexpr = gl.BlockedLayout(
        [OF_THREAD, 1], [4, LANES], [NW, 1], [0, 1] if KEY_FIRST else [1, 0]
    )
    TILE: gl.constexpr = gl.BlockedLayout(
        [OF_THREAD, 1, CHAIN], [4, LANES, 1], [NW, 1, 1], [2, 1, 0]
    )
    COLUMN: gl.constexpr = gl.SliceLayout(1, PIECE)
    READ_LAYOUT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2]], threads_of_channels(KEY_FIRST), whole_warps(NW), [], [LANES, READ]
    )
    FACTOR: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4]], [[0, 0]] * 5, whole_warps(NW), [], [1, FACTORS]
    )
    COPIES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    # A warp has whole tokens.
    TOKEN: gl.constexpr = gl.BlockedLayout([1, K // 32], [1, 32], [NW, 1], [1, 0])
    OF_TOKEN: gl.constexpr = gl.SliceLayout(1, TOKEN)
    READS: gl.constexpr = TOKENS * (CHANNELS // READ)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_s = gl.allocate_shared_memory(gl.float32, [READS * LANES, READ], FLAT)
    k_s = gl.allocate_shared_memory(gl.float32, [READS * LANES, READ], FLAT)
    # Each thread stores a copy. Otherwise several would store the same number at one place.
    f_s = gl.allocate_shared_memory(gl.float32, [TOKENS, 32 * FACTORS], FLAT)

    i_v, i_nh = gl.program_id(0) % V_BLOCKS, gl.program_id(0) // V_BLOCKS
    i_n, i_hv = (i_nh // HV).to(gl.int64), (i_nh % HV).to(gl.int64)
    i_h = i_hv // (HV // H)
    if DEPENDENT:
        gdc_wait()
    live = i_n < N
    p_read = read_slots + i_n * stride_r
    held = live
    if num_accepted_tokens is not None:
        accepted = gl.load(num_accepted_tokens + i_n * stride_n, mask=live, other=0)
        held = live & (accepted > 0) & (accepted <= COLUMNS)
        p_read += (accepted.to(gl.int64) - 1) * stride_rt
    slot = gl.load(p_read, mask=held, other=LAST_SKIPPED).to(gl.int64)
    if cu_seqlens is None:
        i_b = i_n
        row = i_n * 0
        n_tokens = T
    else:
        # Program N of a head writes zeros to the rows after the last sequence.
        i_b = i_n * 0
        p_end = cu_seqlens + (i_n + 1) * stride_c
        row = gl.load(p_end - stride_c).to(gl.int64)
        end = gl.load(p_end, mask=live, other=T).to(gl.int64)
        n_tokens = (end - row).to(gl.int32)
    o_v = i_v * BV + gl.arange(0, BV, COLUMN)
    p_o = o + i_b * stride_ob + row * stride_ot + i_hv * stride_oh + o_v * stride_ov
    if slot <= LAST_SKIPPED:
        for _ in range(0, n_tokens):
            gl.store(p_o, gl.full([BV], 0.0, o.dtype.element_ty, COLUMN))
            p_o += stride_ot
        return

    p_pool = state + i_hv * stride_hth
    if KEY_FIRST:
        o_k = gl.arange(0, LANES, gl.SliceLayout(0, PIECE))
        p_pool += o_k[None, :] * stride_htk + o_v[:, None]
    else:
        o_c = i_v * BV + gl.arange(0, BV, gl.SliceLayout(1, gl.SliceLayout(2, TILE)))
        o_l = gl.arange(0, LANES, gl.SliceLayout(0, gl.SliceLayout(2, TILE)))
        o_j = gl.arange(0, CHAIN, gl.SliceLayout(0, gl.SliceLayout(1, TILE)))
        p_pool += o_c[:, None, None] * stride_htv
        p_pool += o_l[None, :, None] * CHAIN + o_j[None, None, :]
    p_h0 = p_pool + slot * stride_htn
    h = ()
    if KEY_FIRST:
        for i in gl.static_range(CHANNELS):
            h += (gl.load(p_h0 + i * LANES * stride_htk, eviction_policy=POLICY),)
    else:
        for i in gl.static_range(CHANNELS // CHAIN):
            tile = gl.load(p_h0 + i * LANES * CHAIN, eviction_policy=POLICY)
            if CHAIN == 4:
                h += quarters_of(tile, PIECE)
            else:
                h += eighths_of(tile, PIECE)
    if EVERY_TOKEN:
        if num_accepted_tokens is not None:
            p_slot, stride_slot = read_slots + i_n * stride_r, gl.cast(stride_rt, gl.int64)
        else:
            p_slot = write_slots + i_b * stride_wb + row * stride_wt
            stride_slot = gl.cast(stride_wt, gl.int64)
    elif write_slots is not None:
        slot = gl.load(write_slots + i_n * stride_wb).to(gl.int64)

    o_t = gl.arange(0, TOKENS, OF_TOKEN)
    o_k = gl.arange(0, K, gl.SliceLayout(0, TOKEN))
    p_q = q + i_b * stride_qb + row * stride_qt + i_h * stride_qh
    p_k = k + K_OFFSET * stride_kk + i_b * stride_kb + row * stride_kt + i_h * stride_kh
    p_v = v + V_OFFSET * stride_vv + i_b * stride_vb + row * stride_vt + i_hv * stride_vh
    p_g = g + i_b * stride_gb + row * stride_gt + i_hv * stride_gh
    p_beta = beta + i_b * stride_bb + row * stride_bt + i_hv * stride_bh
    wide_t = o_t.to(gl.int64)
    p_q += wide_t[:, None] * stride_qt + o_k[None, :] * stride_qk
    p_k += wide_t[:, None] * stride_kt + o_k[None, :] * stride_kk
    p_v += o_v * stride_vv
    p_g += wide_t * stride_gt
    p_beta += wide_t * stride_bt
    b_A, bias = 0.0, 0.0
    if A_log is not None:
        b_A = gl.load(A_log + i_hv * stride_A).to(gl.float32)
        if dt_bias is not None:
            bias = gl.load(dt_bias + i_hv * stride_dt).to(gl.float32)
    wide_vt = gl.cast(stride_vt, gl.int64)
    for first in range(0, n_tokens, TOKENS):
        in_t = o_t < n_tokens - first
        in_y = in_t[:, None] & (o_k >= 0)[None, :]
        b_q = gl.load(p_q, mask=in_y, other=0.0).to(gl.float32)
        b_k = gl.load(p_k, mask=in_y, other=0.0).to(gl.float32)
        b_g = gl.load(p_g, mask=in_t, other=0.0).to(gl.float32)
        b_beta = gl.load(p_beta, mask=in_t, other=0.0)
        tokens_v = ()
        for t in gl.static_range(TOKENS if EACH == 0 else EACH):
            is_here = (o_v >= 0) & (first + t < n_tokens)
            tokens_v += (gl.load(p_v + t * wide_vt, mask=is_here, other=0.0),)
        if EVERY_TOKEN:
            slots = ()
            for t in gl.static_range(TOKENS if EACH == 0 else EACH):
                is_here = first + t < n_tokens
                if num_accepted_tokens is not None:
                    is_here = is_here & (first + t < COLUMNS)
                p_t = p_slot + (first + t) * stride_slot
                slots += (gl.load(p_t, mask=is_here, other=LAST_SKIPPED).to(gl.int64),)
        store_channels(q_s, b_q, KEY_FIRST, CHAIN)
        store_channels(k_s, b_k, KEY_FIRST, CHAIN)
        qq, kk = gl.split(sum_of_channels(gl.join(b_q * b_q, b_k * b_k)))
        qk = gl.convert_layout(sum_of_channels(b_q * b_k), OF_TOKEN)
        of_k = gl.full([TOKENS], 1.0, gl.float32, OF_TOKEN)
        of_q = of_k * scale
        if USE_QK_L2NORM:
            of_q = scale * gl.rsqrt(gl.convert_layout(qq, OF_TOKEN) + EPS)
            of_k = gl.rsqrt(gl.convert_layout(kk, OF_TOKEN) + EPS)
        if A_log is not None:
            b_g = log_decay(b_g + bias, b_A, gl.exp(b_A), THRESHOLD)
        decay = gl.exp2(b_g * RCP_LN2)
        b_beta = strength(b_beta, BETA_FACTOR)
        numbers = (of_q * decay, of_k * decay, decay, of_k, b_beta, qk * of_q, of_k, of_k)
        factors = ()
        for i in gl.static_range(FACTORS):
            number = gl.convert_layout(numbers[i], gl.SliceLayout(1, COPIES))[:, None]
            factors += (gl.broadcast(number, gl.zeros([TOKENS, 32], gl.float32, COPIES))[0],)
        f_s.store(gl.reshape(joined(factors, 0, FACTORS), [TOKENS, 32 * FACTORS]))
        meet()
        for t in gl.static_range(TOKENS if EACH == 0 else EACH):
            if EACH > 0 or first + t < n_tokens:
                h = one_token(
                    h, q_s, k_s, f_s, tokens_v[t], p_o, t, KEY_FIRST, CHAIN, READ_LAYOUT, FACTOR,
                    PIECE
                )  # fmt: skip
            p_o += stride_ot
            if EVERY_TOKEN:
                if slots[t] > LAST_SKIPPED:
                    store_state(
                        p_pool + slots[t] * stride_htn, h, KEY_FIRST, CHAIN, TILE, stride_htk,
                        POLICY
                    )  # fmt: skip
        p_q += TOKENS * gl.cast(stride_qt, gl.int64)
        p_k += TOKENS * gl.cast(stride_kt, gl.int64)
        p_v += TOKENS * wide_vt
        p_g += TOKENS * gl.cast(stride_gt, gl.int64)
        p_beta += TOKENS * gl.cast(stride_bt, gl.int64)
        meet()
    if not EVERY_TOKEN:
        if slot > LAST_SKIPPED:
            store_state(p_pool + slot * stride_htn, h, KEY_FIRST, CHAIN, TILE, stride_htk, POLICY)
