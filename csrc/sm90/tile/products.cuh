// WGMMA for the walks of the backward. The first product of a sum *defines* its accumulator: an
// accumulator that is set to zero before would be pinned, and would spill.
#pragma once
#include "sm90/tile/wgmma.cuh"

namespace gdn::sm90 {

#define GDN_O8(i)                                                                             \
  "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), \
      "=f"(d[i + 6]), "=f"(d[i + 7])
#define GDN_O32 GDN_O8(0), GDN_O8(8), GDN_O8(16), GDN_O8(24)
#define GDN_O64 GDN_O32, GDN_O8(32), GDN_O8(40), GDN_O8(48), GDN_O8(56)

// d (64 x N) = or += a (64 x 16, shared memory) b (16 x N, shared memory); TA, TB 1: MN-major.
#define GDN_SS(T, NAME, F, N, OUT, REGS, A, B, SET, TA, TB)                                        \
  GDN_DEVICE void F(T, float* d, uint64_t a, uint64_t b) {                                         \
    asm volatile("{.reg .pred p;\n setp.eq.b32 p, 1, " SET                                         \
                 ";\n"                                                                             \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGS "}, " A \
                 ", " B ", p, 1, 1, " TA ", " TB ";}"                                              \
                 : OUT                                                                             \
                 : "l"(a), "l"(b));                                                                \
  }
// d (64 x 64) = a (64 x 16, registers) b (16 x 64, shared memory)
#define GDN_RS(T, NAME, F, TB)                                                   \
  GDN_DEVICE void F(T, float* d, const uint32_t* a, uint64_t b) {                \
    asm volatile(                                                                \
        "{.reg .pred p;\n setp.eq.b32 p, 1, 0;\n"                                \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" GDN_R32 \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, " TB ";}"                        \
        : GDN_O32                                                                \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                   \
  }
#define GDN_PRODUCTS(T, NAME)                                                                  \
  GDN_SS(T, NAME, set_ss_n64, 64, GDN_O32, GDN_R32, "%32", "%33", "0", "0", "0")               \
  GDN_SS(T, NAME, add_ss_n64, 64, GDN_D64, GDN_R32, "%32", "%33", "1", "0", "0")               \
  GDN_SS(T, NAME, set_ss_n64_mn, 64, GDN_O32, GDN_R32, "%32", "%33", "0", "0", "1")            \
  GDN_SS(T, NAME, add_ss_n64_mn, 64, GDN_D64, GDN_R32, "%32", "%33", "1", "0", "1")            \
  GDN_SS(T, NAME, add_ss_n64_transposed_mn, 64, GDN_D64, GDN_R32, "%32", "%33", "1", "1", "1") \
  GDN_SS(T, NAME, set_ss_n128_mn, 128, GDN_O64, GDN_R64, "%64", "%65", "0", "0", "1")          \
  GDN_SS(T, NAME, add_ss_n128_mn, 128, GDN_D128, GDN_R64, "%64", "%65", "1", "0", "1")         \
  GDN_RS(T, NAME, set_rs_n64, "0")                                                             \
  GDN_RS(T, NAME, set_rs_n64_mn, "1")
GDN_PRODUCTS(__nv_bfloat16, "bf16")
GDN_PRODUCTS(__half, "f16")

// As pack, but volatile: a state is rounded twice in a chunk, and the compiler would keep the first
// result in registers.
GDN_DEVICE uint32_t pack_again(__nv_bfloat16, float low, float high) {
  uint32_t r;
  asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
GDN_DEVICE uint32_t pack_again(__half, float low, float high) {
  uint32_t r;
  asm volatile("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Stores to shared memory; the compiler does not move it across other accesses.
GDN_DEVICE void store_float(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

}  // namespace gdn::sm90
