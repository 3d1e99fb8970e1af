// WGMMA, the matrix products of a warpgroup on Hopper, one wrapper each. Names follow the PTX ISA.
//
// Operands in shared memory have the 128-byte swizzle that TMA writes: rows of 64 16-bit values.
//   K-major (rows are reduced): 1024 bytes from 8 rows to the next 8.
//   MN-major (columns are reduced): 1024 bytes from 8 rows to the next 8, a whole tile of 64 rows
//   from 64 columns to the next 64.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"

namespace gdn::sm90 {

struct Descriptor {
  uint32_t low;
  static constexpr uint32_t kHigh = 1u << 30 | 1024 >> 4;
  GDN_DEVICE Descriptor(uint32_t address, uint32_t lead)
      : low((address & 0x3ffff) >> 4 | lead >> 4 << 16) {}
  // The descriptor of an operand that lies so many bytes further on.
  GDN_DEVICE uint64_t at(uint32_t bytes) const {
    return uint64_t{kHigh} << 32 | (low + (bytes >> 4));
  }
};
GDN_DEVICE Descriptor k_major(uint32_t address) { return {address, 16}; }
GDN_DEVICE Descriptor mn_major(uint32_t address) { return {address, 8192}; }

GDN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GDN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N groups are in flight.
template <int N>
GDN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accesses of these registers across this point: WGMMA uses them.
template <int N>
GDN_DEVICE void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
GDN_DEVICE void pin(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

#define GDN_D8(i)                                                                             \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define GDN_D64 GDN_D8(0), GDN_D8(8), GDN_D8(16), GDN_D8(24)
#define GDN_D128 GDN_D64, GDN_D8(32), GDN_D8(40), GDN_D8(48), GDN_D8(56)
#define GDN_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define GDN_R16 GDN_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define GDN_R24 GDN_R16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define GDN_R32 GDN_R24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define GDN_R64                                                                                \
  GDN_R32                                                                                      \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%" \
  "54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d (64 x N) = [d +] a (64 x 16, registers) b (16 x N, shared memory); TRANS 1: b is MN-major.
#define GDN_WGMMA_RS(F, N, T, NAME, OUT, REGS, A0, A1, A2, A3, B, P, TRANS)                \
  GDN_DEVICE void F(T, float* d, const uint32_t* a, uint64_t b, int accumulate) {          \
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, " P                                      \
                 ", 0;\n"                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGS \
                 "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", p, 1, 1, " TRANS ";}"           \
                 : OUT                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
  }
// d (64 x 64) = [d +] a (64 x 16, shared memory, K-major) b (16 x 64, shared memory, K-major)
#define GDN_WGMMA_SS(T, NAME)                                                         \
  GDN_DEVICE void wgmma_ss_n64(T, float* d, uint64_t a, uint64_t b, int accumulate) { \
    asm volatile(                                                                     \
        "{.reg .pred p;\n setp.ne.b32 p, %34, 0;\n"                                   \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" GDN_R32      \
        "}, %32, %33, p, 1, 1, 0, 0;}"                                                \
        : GDN_D64                                                                     \
        : "l"(a), "l"(b), "r"(accumulate));                                           \
  }
#define GDN_WGMMA(T, NAME)                                                                        \
  GDN_WGMMA_RS(wgmma_rs_n64, 64, T, NAME, GDN_D64, GDN_R32, "%32", "%33", "%34", "%35", "%36",    \
               "%37", "0")                                                                        \
  GDN_WGMMA_RS(wgmma_rs_n64_mn, 64, T, NAME, GDN_D64, GDN_R32, "%32", "%33", "%34", "%35", "%36", \
               "%37", "1")                                                                        \
  GDN_WGMMA_RS(wgmma_rs_n128_mn, 128, T, NAME, GDN_D128, GDN_R64, "%64", "%65", "%66", "%67",     \
               "%68", "%69", "1")                                                                 \
  GDN_WGMMA_SS(T, NAME)
GDN_WGMMA(__nv_bfloat16, "bf16")
GDN_WGMMA(__half, "f16")

}  // namespace gdn::sm90
