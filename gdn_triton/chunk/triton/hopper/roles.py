"""How the roles of a block share its warps and registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton.chunk.triton.hopper.gates import gates_role
from gdn_triton.chunk.triton.hopper.loader import loader_role
from gdn_triton.chunk.triton.hopper.norms import norm_role
from gdn_triton.chunk.triton.hopper.state import state_role
from gdn_triton.chunk.triton.hopper.triangles import triangles_role
from gdn_triton.chunk.triton.hopper.wide import keys_role, pairs_role, queries_role, wide_state_role


@gluon.jit
def run_roles(
    states,
    fulls,
    inverses,
    scratch,
    tiles,
    norms,
    factors,
    descs,
    o_desc,
    heads,
    place,
    walk,
    ends,
    stops,
    strides,
    gate_inputs,
    p_A_log,
    p_dt_bias,
    scale,
    dtype: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STATES: gl.constexpr,
    STAGES: gl.constexpr,
    T_STAGES: gl.constexpr,
    STATE_REGISTERS: gl.constexpr,
    TRIANGLES_REGISTERS: gl.constexpr,
    SINGLE: gl.constexpr,
    RCP_LN2: gl.constexpr,
    FLOOR: gl.constexpr,
    THRESHOLD: gl.constexpr,
    BETA_FACTOR: gl.constexpr,
    EPS: gl.constexpr,
    LAST_SKIPPED: gl.constexpr,
    PART: gl.constexpr,
    OUTPUT: gl.constexpr,
    HAS_H0: gl.constexpr,
    STORE_HT: gl.constexpr,
    HAS_GATE: gl.constexpr,
    HAS_DT_BIAS: gl.constexpr,
    USE_SIGMOID: gl.constexpr,
    HAS_STOPS: gl.constexpr,
    HAS_STOP_SLOTS: gl.constexpr,
    ZERO_ROWS: gl.constexpr,
    WINDOWS: gl.constexpr,
    IS_VARLEN: gl.constexpr,
    NORM: gl.constexpr,
):
    q_desc, k_desc, v_desc = descs
    k_s, q_s, v_s, k_full, empty = tiles
    COLUMNS: gl.constexpr = STATES * BV
    if BK == 256:
        q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for s in gl.static_range(2):
            mbarrier.init(q_empty.index(s), count=2)
        gl.warp_specialize(
            [
                (
                    wide_state_role,
                    (
                        states,
                        fulls,
                        k_full,
                        q_empty,
                        o_desc,
                        ends,
                        stops,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        STAGES,
                        T_STAGES,
                        HAS_H0,
                        STORE_HT,
                        HAS_STOPS,
                        HAS_STOP_SLOTS,
                        LAST_SKIPPED,
                        ZERO_ROWS,
                        IS_VARLEN,
                    ),
                ),
                (
                    pairs_role,
                    (states, fulls, k_full, q_empty, walk, dtype, BK, 0, STAGES, IS_VARLEN),
                ),
                (
                    pairs_role,
                    (states, fulls, k_full, q_empty, walk, dtype, BK, 1, STAGES, IS_VARLEN),
                ),
                (
                    gates_role,
                    (
                        factors,
                        gate_inputs,
                        p_A_log,
                        p_dt_bias,
                        walk,
                        scale,
                        dtype,
                        RCP_LN2,
                        FLOOR,
                        THRESHOLD,
                        STAGES,
                        HAS_GATE,
                        HAS_DT_BIAS,
                        USE_SIGMOID,
                        BETA_FACTOR,
                    ),
                ),
                (keys_role, (k_s, k_full, empty, k_desc, heads, walk, dtype, BK, STAGES)),
                (
                    queries_role,
                    (q_s, v_s, fulls[0], q_empty, q_desc, v_desc, heads, walk, dtype, BK, BV),
                ),
            ],
            [4, 4, 1, 1, 1],
            [TRIANGLES_REGISTERS, TRIANGLES_REGISTERS, SINGLE, SINGLE, SINGLE],
        )
    else:
        # The states are the first warps; the others follow.
        gl.warp_specialize(
            [
                (
                    state_role,
                    (
                        states,
                        fulls,
                        o_desc,
                        ends,
                        stops,
                        strides,
                        place,
                        walk,
                        dtype,
                        K,
                        V,
                        BK,
                        BV,
                        n,
                        STATES,
                        STAGES,
                        T_STAGES,
                        HAS_H0,
                        STORE_HT,
                        PART,
                        WINDOWS,
                        HAS_STOPS,
                        HAS_STOP_SLOTS,
                        LAST_SKIPPED,
                        ZERO_ROWS,
                        IS_VARLEN,
                    ),
                )
                if n < STATES
                else (
                    (
                        triangles_role,
                        (
                            inverses,
                            scratch,
                            walk,
                            dtype,
                            BK,
                            STAGES,
                            T_STAGES,
                            IS_VARLEN,
                            True,
                            NORM,
                            EPS,
                        ),
                    ),
                    (
                        gates_role,
                        (
                            factors,
                            gate_inputs,
                            p_A_log,
                            p_dt_bias,
                            walk,
                            scale,
                            dtype,
                            RCP_LN2,
                            FLOOR,
                            THRESHOLD,
                            STAGES,
                            HAS_GATE,
                            HAS_DT_BIAS,
                            USE_SIGMOID,
                            BETA_FACTOR,
                        ),
                    ),
                    (
                        loader_role,
                        (
                            tiles,
                            descs,
                            heads,
                            walk,
                            dtype,
                            BK,
                            COLUMNS,
                            STAGES,
                            OUTPUT,
                        ),
                    ),
                    (norm_role, (norms, walk, dtype, BK, 0, STAGES, NORM, EPS)),
                    (norm_role, (norms, walk, dtype, BK, 1, STAGES, NORM, EPS)),
                )[n - STATES]
                for n in ((0, 1, 2, 3, 4, 5, 6) if STATES == 2 else (0, 1, 2, 3))
            ],
            [4, 4, 1, 1, 1, 1] if STATES == 2 else [4, 1, 1],
            [STATE_REGISTERS, TRIANGLES_REGISTERS, SINGLE, SINGLE, SINGLE, SINGLE]
            if STATES == 2
            else [TRIANGLES_REGISTERS, SINGLE, SINGLE],
        )
