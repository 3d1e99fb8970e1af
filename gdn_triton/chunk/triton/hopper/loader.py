"""The loader warp: q, k and v of each chunk from memory to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, load_tile


@gluon.jit
def loader_walk(
    memory,
    descs,
    place,
    walk,
    ring,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    OUTPUT: gl.constexpr,
):
    k_s, q_s, v_s, tile_full, empty = memory
    q_desc, k_desc, v_desc = descs
    i_b, first_row, i_h, i_hv, first_v = place
    n_chunks, _, _ = walk
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    stage, phase = ring
    for i in range(n_chunks):
        row = first_row + i * CHUNK
        mbarrier.wait(empty.index(stage), phase ^ 1)
        full = tile_full.index(stage)
        mbarrier.expect(full, (BK * 2 + BV if OUTPUT else BK + BV) * CHUNK * 2)
        k = viewed(k_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
        v = viewed(v_s.index(stage), dtype, [1, CHUNK, 1, BV], ROWS)
        load_tile(k_desc, [i_b, row, i_h, 0], full, k)
        if OUTPUT:
            q = viewed(q_s.index(stage), dtype, [1, CHUNK, 1, BK], ROWS)
            load_tile(q_desc, [i_b, row, i_h, 0], full, q)
        load_tile(v_desc, [i_b, row, i_hv, first_v], full, v)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase
