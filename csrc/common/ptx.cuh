// The Hopper instructions that the kernels use, one wrapper each. Names follow the PTX ISA.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#define GDN_DEVICE __device__ __forceinline__
#define GDN_HOST_DEVICE __host__ GDN_DEVICE  // tests call it

namespace gdn {

GDN_DEVICE uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- barriers --------------------------------------------------------------------------------

GDN_DEVICE void mbarrier_init(uint64_t* bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals)
               : "memory");
}
GDN_DEVICE void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
GDN_DEVICE void mbarrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
GDN_DEVICE void mbarrier_arrive_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
GDN_DEVICE void mbarrier_wait(uint32_t bar, uint32_t parity) {
#ifdef GDN_WATCHDOG  // a wait of about a second is a deadlock: stop the kernel with an error
  asm volatile(
      "{.reg .pred p; .reg .u32 t0, t1;\n"
      "mov.u32 t0, %%clock;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\n"
      "mov.u32 t1, %%clock; sub.u32 t1, t1, t0; setp.lt.u32 p, t1, 1500000000;\n"
      "@p bra WAIT_%=;\n"
      "trap;\n"
      "DONE_%=:}" ::"r"(bar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{.reg .pred p;\n"
      "WAIT_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=;}" ::"r"(bar),
      "r"(parity)
      : "memory");
#endif
}
GDN_DEVICE void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Orders this thread's ordinary shared-memory accesses before later ones of TMA and WGMMA.
GDN_DEVICE void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- copies to shared memory by the threads themselves -----------------------------------------

GDN_DEVICE void copy_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
GDN_DEVICE void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
GDN_DEVICE void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- a kernel launched beside the one before it ------------------------------------------------

// Lets the next kernel start, if it was launched so, once all blocks of this one have come here.
GDN_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Until the kernel that this one was launched beside, if so, is done and what it wrote can be read.
GDN_DEVICE void wait_for_prerequisites() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- registers of a warpgroup ----------------------------------------------------------------

template <int R>
GDN_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R>
GDN_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}

// ---- TMA -------------------------------------------------------------------------------------

GDN_DEVICE void tma_load(uint32_t to, const CUtensorMap* map, uint32_t bar, int column, int row,
                         int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(bar), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
GDN_DEVICE void tma_store(const CUtensorMap* map, uint32_t from, int column, int row, int head,
                          int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          map),
      "r"(from), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
GDN_DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the stores have read shared memory; they are in global memory when the kernel ends.
GDN_DEVICE void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
GDN_DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- 8 x 8 tiles of 16-bit values between shared memory and registers --------------------------

GDN_DEVICE void ldmatrix_x4(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
GDN_DEVICE void ldmatrix_x4_trans(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
GDN_DEVICE uint32_t ldmatrix_x1(uint32_t from) {
  uint32_t r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(from)
               : "memory");
  return r;
}
GDN_DEVICE uint32_t ldmatrix_x1_trans(uint32_t from) {
  uint32_t r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
               : "=r"(r)
               : "r"(from)
               : "memory");
  return r;
}
GDN_DEVICE void stmatrix_x4(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
GDN_DEVICE void stmatrix_x4_trans(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
GDN_DEVICE void stmatrix_x1(uint32_t to, uint32_t r) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(to), "r"(r) : "memory");
}
GDN_DEVICE void store_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
GDN_DEVICE uint32_t load_shared_4(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
GDN_DEVICE void store_shared_16(uint32_t to, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
GDN_DEVICE void load_shared_16(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// ---- arithmetic ------------------------------------------------------------------------------

GDN_DEVICE float exp2_approx(float x) {  // 2 ulp; results below 2^-126 are 0
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
GDN_DEVICE uint32_t pack(__nv_bfloat16, float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
GDN_DEVICE uint32_t pack(__half, float low, float high) {
  const __half2 v = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&v);
}
GDN_DEVICE float2 unpack(__nv_bfloat16, uint32_t x) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x));
}
GDN_DEVICE float2 unpack(__half, uint32_t x) {
  return __half22float2(*reinterpret_cast<const __half2*>(&x));
}

// d (16 x 8) += a (16 x 16) b (16 x 8), one warp.
GDN_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d (16 x 8) = a (16 x 8) b (8 x 8), one warp.
GDN_DEVICE void mma_1688(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(0.f));
}

// ---- WGMMA -----------------------------------------------------------------------------------
// Operands in shared memory have the 128-byte swizzle that TMA writes: rows of 64 16-bit values.
//   K-major (the row is the reduction): from 8 rows to the next 8 are 1024 bytes.
//   MN-major (the column is the reduction): from 8 rows to the next 8 are 1024 bytes, from 64
//   columns to the next 64 a whole tile of 64 rows.

struct Descriptor {
  uint32_t low;
  static constexpr uint32_t kHigh = 1u << 30 | 1024 >> 4;
  GDN_DEVICE Descriptor(uint32_t address, uint32_t lead)
      : low((address & 0x3ffff) >> 4 | lead >> 4 << 16) {}
  // The descriptor of what lies so many bytes further on.
  GDN_DEVICE uint64_t at(uint32_t bytes) const {
    return uint64_t{kHigh} << 32 | (low + (bytes >> 4));
  }
};
GDN_DEVICE Descriptor k_major(uint32_t address) { return {address, 16}; }
GDN_DEVICE Descriptor mn_major(uint32_t address) { return {address, 8192}; }

GDN_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
GDN_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most N groups are in flight.
template <int N>
GDN_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// The compiler may not move accesses of these registers across this: they belong to WGMMA.
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

#define GDN_D8(i)                                                                               \
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
#define GDN_WGMMA_RS(F, N, T, NAME, OUT, REGS, A0, A1, A2, A3, B, P, TRANS)                     \
  GDN_DEVICE void F(T, float* d, const uint32_t* a, uint64_t b, int accumulate) {               \
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, " P ", 0;\n"                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" REGS      \
                 "}, {" A0 "," A1 "," A2 "," A3 "}, " B ", p, 1, 1, " TRANS ";}"                \
                 : OUT                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));        \
  }
// d (64 x 64) = [d +] a (64 x 16, shared memory, K-major) b (16 x 64, shared memory, K-major)
#define GDN_WGMMA_SS(T, NAME)                                                                   \
  GDN_DEVICE void wgmma_ss_n64(T, float* d, uint64_t a, uint64_t b, int accumulate) {           \
    asm volatile("{.reg .pred p;\n setp.ne.b32 p, %34, 0;\n"                                    \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." NAME "." NAME " {" GDN_R32       \
                 "}, %32, %33, p, 1, 1, 0, 0;}"                                                 \
                 : GDN_D64                                                                      \
                 : "l"(a), "l"(b), "r"(accumulate));                                            \
  }
#define GDN_WGMMA(T, NAME)                                                                      \
  GDN_WGMMA_RS(wgmma_rs_n64, 64, T, NAME, GDN_D64, GDN_R32, "%32", "%33", "%34", "%35", "%36",  \
               "%37", "0")                                                                      \
  GDN_WGMMA_RS(wgmma_rs_n64_mn, 64, T, NAME, GDN_D64, GDN_R32, "%32", "%33", "%34", "%35",      \
               "%36", "%37", "1")                                                               \
  GDN_WGMMA_RS(wgmma_rs_n128_mn, 128, T, NAME, GDN_D128, GDN_R64, "%64", "%65", "%66", "%67",   \
               "%68", "%69", "1")                                                               \
  GDN_WGMMA_SS(T, NAME)
GDN_WGMMA(__nv_bfloat16, "bf16")
GDN_WGMMA(__half, "f16")

}  // namespace gdn
