"""The warpgroup of across = 2^g_last <h, dh>, with the state before the chunk and the gradient of
the state after it.

Its loop is not unrolled, because the loops of all roles share the instruction cache. In packed
calls it also clears the rows of q and k past the end of a sequence, because a NaN of another
sequence would survive a product with 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from gdn_triton._triton.views import viewed
from gdn_triton.chunk.triton.hopper.gradients.common import (
    LAST_VECTOR,
    PAIR,
    PART,
    PIECE,
    VECTORS,
    chunk_place,
)
from gdn_triton.chunk.triton.hopper.names import CHUNK, advance, here

PIECES = gl.constexpr(PAIR.value // PIECE.value)
LANES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TOKEN = gl.constexpr(gl.SliceLayout(1, LANES.value))


@gluon.jit
def values_role(
    memory,
    across,
    vectors,
    place,
    sizes,
    dtype: gl.constexpr,
    BK: gl.constexpr,
    BV: gl.constexpr,
    RING: gl.constexpr,
    IS_VARLEN: gl.constexpr,
):
    qk_s, ring_s, qk_full, qk_ready, full, empty = memory
    vectors_s, vectors_full, vectors_empty = vectors
    first_item, n_items, step, chunk_rows = place
    T, NT, H, G = sizes
    V_BLOCKS: gl.constexpr = BV // PART
    K_BLOCKS: gl.constexpr = BK // PART
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    o_t = gl.arange(0, PIECE, TOKEN)
    # The same bytes in pieces of 16 rows.
    pieces = viewed(ring_s, dtype, [RING * V_BLOCKS * PIECES, PIECE, PART], ROWS)
    keys = viewed(qk_s, dtype, [K_BLOCKS * PIECES, PIECE, PART], ROWS)
    numbers = viewed(vectors_s, gl.float32, [2 * VECTORS * PIECES // 2, PIECE], FLAT)
    UNIT: gl.constexpr = V_BLOCKS * PIECES
    STATE_PIECES: gl.constexpr = BK // PIECE
    # A number of turns that the compiler does not know.
    state_pieces = here(H * 0 + STATE_PIECES)
    item_phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    heads = gl.to_tensor(0)
    for i in range(first_item, n_items, step):
        i_c, i_h, _, _, n_rows = chunk_place(i, chunk_rows, T, NT, H, IS_VARLEN)
        if n_rows > 0:
            p_across = across + (i_c.to(gl.int64) * H + i_h) * G
            if IS_VARLEN:
                mbarrier.wait(qk_full, item_phase)
                if n_rows < CHUNK:
                    for n in range(K_BLOCKS * PIECES):
                        tile = keys.index(n)
                        inside = (n % (PIECES // 2)) * PIECE + o_t < n_rows
                        x = tile.load(LANES)
                        tile.store(gl.where(inside[:, None], x, gl.zeros_like(x)))
                    fence_async_shared()
                mbarrier.arrive(qk_ready, count=1)
                item_phase ^= 1
            for _ in range(G):
                stage = heads & 1
                base = stage * VECTORS
                slot_dh, phase_dh = advance(slot, phase, RING)
                slot_u, phase_u = advance(slot_dh, phase_dh, RING)
                slot_do, phase_do = advance(slot_u, phase_u, RING)
                mbarrier.wait(vectors_full.index(stage), (heads >> 1) & 1)
                mbarrier.wait(full.index(slot), phase)
                total = gl.zeros([PIECE, PART], gl.float32, LANES)
                for n in range(state_pieces):
                    # In each turn, because a loop in a loop is not unrolled.
                    mbarrier.wait(full.index(slot_dh), phase_dh)
                    for c in gl.static_range(V_BLOCKS):
                        dh = pieces.index(slot_dh * UNIT + c * STATE_PIECES + n).load(LANES)
                        h = pieces.index(slot * UNIT + c * STATE_PIECES + n).load(LANES)
                        total += dh.to(gl.float32) * h.to(gl.float32)
                mbarrier.arrive(empty.index(slot_dh), count=1)
                mbarrier.arrive(empty.index(slot), count=1)
                last = numbers.index((base + LAST_VECTOR) * (PIECES // 2)).load(TOKEN)
                gl.store(p_across, gl.sum(gl.sum(total, 1) * last, 0))
                mbarrier.arrive(vectors_empty.index(stage), count=1)
                # This role does not read u, do and dv. It waits for them, too, because it could
                # otherwise take a phase of a barrier for the one before last.
                mbarrier.wait(full.index(slot_u), phase_u)
                mbarrier.arrive(empty.index(slot_u), count=1)
                mbarrier.wait(full.index(slot_do), phase_do)
                mbarrier.arrive(empty.index(slot_do), count=1)
                slot, phase = advance(slot_do, phase_do, RING)
                p_across += 1
                heads += 1
