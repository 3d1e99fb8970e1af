// What the C++ that translate.py makes of a kernel's PTX calls: one function an instruction. Registers are bits: a float is
// a uint32_t here. machine.cpp runs the threads.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator {

struct Block;
struct Warp;

// A CUDA thread: a stack of its own, left where the thread waits.
struct Thread {
  void* stack_pointer;
  Block* block;
  Warp* warp;
  uint32_t index, lane;  // in the block; in the warp
  uint32_t site;         // the line of PTX that it is at, where it may wait or fail
  uint8_t* shared;       // of its block: address 0
  uint32_t shared_end;
  const uint64_t* barriers;  // of its block: a bit for each 8 bytes of shared memory, set where a barrier is
  bool watched;      // whether accesses are looked at for races
  uint32_t fences;   // fence.proxy.async so far
  uint32_t barrier_fences;  // the same, and fence.mbarrier_init
};

// ---- bits ------------------------------------------------------------------------------------------------------

inline float f(uint32_t x) {
  float y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint32_t bits(float x) {
  uint32_t y;
  std::memcpy(&y, &x, 4);
  return y;
}
inline uint64_t bits(double x) {
  uint64_t y;
  std::memcpy(&y, &x, 8);
  return y;
}

float from_half(uint16_t x);
uint16_t to_half(float x);
inline float from_bf16(uint16_t x) { return f(uint32_t(x) << 16); }
inline uint16_t to_bf16(float x) {  // to the nearest, ties to even
  if (x != x) return 0x7fff;
  const uint32_t y = bits(x);
  return uint16_t((y + 0x7fff + (y >> 16 & 1)) >> 16);
}

// ---- arithmetic ------------------------------------------------------------------------------------------------

#define EMULATOR_OP2(name, type, expression)     \
  inline type name(type a, type b) {             \
    return type(expression);                     \
  }
#define EMULATOR_FLOAT2(name, expression)                            \
  inline uint32_t name##_f32(uint32_t x, uint32_t y) {               \
    const float a = f(x), b = f(y);                                  \
    return bits(float(expression));                                  \
  }
#define EMULATOR_INTEGERS(bits_)                                                                                      \
  EMULATOR_OP2(add_s##bits_, uint##bits_##_t, a + b)                                                                  \
  EMULATOR_OP2(sub_s##bits_, uint##bits_##_t, a - b)                                                                  \
  EMULATOR_OP2(mul_lo_s##bits_, uint##bits_##_t, a * b)                                                               \
  EMULATOR_OP2(and_b##bits_, uint##bits_##_t, a & b)                                                                  \
  EMULATOR_OP2(or_b##bits_, uint##bits_##_t, a | b)                                                                   \
  EMULATOR_OP2(xor_b##bits_, uint##bits_##_t, a ^ b)                                                                  \
  EMULATOR_OP2(min_s##bits_, uint##bits_##_t, int##bits_##_t(a) < int##bits_##_t(b) ? a : b)                          \
  EMULATOR_OP2(max_s##bits_, uint##bits_##_t, int##bits_##_t(a) > int##bits_##_t(b) ? a : b)                          \
  EMULATOR_OP2(min_u##bits_, uint##bits_##_t, a < b ? a : b)                                                          \
  EMULATOR_OP2(max_u##bits_, uint##bits_##_t, a > b ? a : b)                                                          \
  inline uint##bits_##_t not_b##bits_(uint##bits_##_t a) { return uint##bits_##_t(~a); }                              \
  inline uint##bits_##_t neg_s##bits_(uint##bits_##_t a) { return uint##bits_##_t(-a); }                              \
  inline uint##bits_##_t shl_b##bits_(uint##bits_##_t a, uint32_t b) { return b < bits_ ? uint##bits_##_t(a << b) : 0; } \
  inline uint##bits_##_t shr_u##bits_(uint##bits_##_t a, uint32_t b) { return b < bits_ ? uint##bits_##_t(a >> b) : 0; } \
  inline uint##bits_##_t shr_s##bits_(uint##bits_##_t a, uint32_t b) {                                                \
    return uint##bits_##_t(int##bits_##_t(a) >> (b < bits_ ? b : bits_ - 1));                                         \
  }
EMULATOR_INTEGERS(16)
EMULATOR_INTEGERS(32)
EMULATOR_INTEGERS(64)
// PTX does not define a division by zero; today's GPUs return all ones.
EMULATOR_OP2(div_u32, uint32_t, b ? a / b : ~0u)
EMULATOR_OP2(rem_u32, uint32_t, b ? a % b : a)
EMULATOR_OP2(div_u64, uint64_t, b ? a / b : ~0ull)
EMULATOR_OP2(rem_u64, uint64_t, b ? a % b : a)
EMULATOR_OP2(div_s32, uint32_t, b ? int64_t(int32_t(a)) / int32_t(b) : -1)
EMULATOR_OP2(rem_s32, uint32_t, b ? int64_t(int32_t(a)) % int32_t(b) : a)
EMULATOR_OP2(div_s64, uint64_t, b + 1 < 2 ? (b ? -a : ~0ull) : uint64_t(int64_t(a) / int64_t(b)))
EMULATOR_OP2(rem_s64, uint64_t, b + 1 < 2 ? (b ? 0 : a) : uint64_t(int64_t(a) % int64_t(b)))
inline uint32_t brev_b32(uint32_t a) {
  uint32_t x = 0;
  for (int i = 0; i < 32; ++i) x |= (a >> i & 1) << (31 - i);
  return x;
}
// How far the highest bit that is set would be shifted to become the highest one; all bits set if there is none.
inline uint32_t bfind_shiftamt_u32(uint32_t a) { return a == 0 ? ~0u : uint32_t(__builtin_clz(a)); }
inline uint32_t popc_b32(uint32_t x) { return uint32_t(__builtin_popcount(x)); }
EMULATOR_OP2(mul_hi_s32, uint32_t, (int64_t(int32_t(a)) * int32_t(b)) >> 32)
EMULATOR_OP2(mul_hi_u32, uint32_t, (uint64_t(a) * b) >> 32)
EMULATOR_OP2(mul_hi_u64, uint64_t, (static_cast<unsigned __int128>(a) * b) >> 64)
inline uint64_t mul_wide_s32(uint32_t a, uint32_t b) { return uint64_t(int64_t(int32_t(a)) * int32_t(b)); }
inline uint32_t mul_wide_u16(uint16_t a, uint16_t b) { return uint32_t(a) * b; }
inline uint32_t mul_wide_s16(uint16_t a, uint16_t b) { return uint32_t(int32_t(int16_t(a)) * int16_t(b)); }
inline uint32_t mad_wide_u16(uint16_t a, uint16_t b, uint32_t c) { return uint32_t(a) * b + c; }
inline uint64_t mul_wide_u32(uint32_t a, uint32_t b) { return uint64_t(a) * b; }
inline uint64_t mad_lo_s64(uint64_t a, uint64_t b, uint64_t c) { return a * b + c; }
inline uint16_t mad_lo_s16(uint16_t a, uint16_t b, uint16_t c) { return uint16_t(uint32_t(a) * b + c); }
inline uint32_t mad_lo_s32(uint32_t a, uint32_t b, uint32_t c) { return a * b + c; }
// The table says for each bit the result of the three bits there.
inline uint32_t lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t out = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) out |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return out;
}
inline uint64_t mad_wide_s32(uint32_t a, uint32_t b, uint64_t c) { return mul_wide_s32(a, b) + c; }
inline uint64_t mad_wide_u32(uint32_t a, uint32_t b, uint64_t c) { return mul_wide_u32(a, b) + c; }
inline bool and_pred(bool a, bool b) { return a && b; }
inline bool or_pred(bool a, bool b) { return a || b; }
inline bool xor_pred(bool a, bool b) { return a != b; }
inline bool not_pred(bool a) { return !a; }
inline uint32_t bfe_u32(uint32_t a, uint32_t at, uint32_t length) {
  return length == 0 ? 0 : (a >> at) & (length < 32 ? (1u << length) - 1 : ~0u);
}
inline uint64_t bfe_u64(uint64_t a, uint32_t at, uint32_t length) {
  at &= 255, length &= 255;
  if (at > 63 || length == 0) return 0;
  const uint64_t x = a >> at;
  return length > 63 ? x : x & ((uint64_t(1) << length) - 1);
}
inline uint32_t bfe_s32(uint32_t a, uint32_t at, uint32_t length) {  // of at most 32 bits in all
  return length == 0 ? 0 : uint32_t(int32_t(a << (32 - at - length)) >> (32 - length));
}
inline uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t at, uint32_t length) {
  const uint32_t mask = length < 32 ? ((1u << length) - 1) << at : ~0u << at;
  return (b & ~mask) | (a << at & mask);
}
inline uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t at, uint32_t length) {
  const uint64_t mask = length < 64 ? ((uint64_t{1} << length) - 1) << at : ~uint64_t{0} << at;
  return (b & ~mask) | (a << at & mask);
}
inline uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t how) {
  const uint64_t both = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = how >> 4 * i & 15;
    uint32_t byte = both >> 8 * (choice & 7) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;  // its sign
    out |= byte << 8 * i;
  }
  return out;
}

EMULATOR_FLOAT2(add, a + b)
EMULATOR_FLOAT2(sub, a - b)
EMULATOR_FLOAT2(mul, a * b)
EMULATOR_FLOAT2(add_rn, a + b)
EMULATOR_FLOAT2(sub_rn, a - b)
EMULATOR_FLOAT2(mul_rn, a * b)
EMULATOR_FLOAT2(div_rn, a / b)
EMULATOR_FLOAT2(div_approx, a / b)
EMULATOR_FLOAT2(div_full, a / b)
EMULATOR_FLOAT2(min, std::fmin(a, b))
EMULATOR_FLOAT2(max, std::fmax(a, b))
inline uint32_t fma_rn_f32(uint32_t a, uint32_t b, uint32_t c) { return bits(std::fma(f(a), f(b), f(c))); }
inline uint32_t neg_f32(uint32_t a) { return a ^ 0x80000000u; }
inline uint16_t neg_bf16(uint16_t a) { return a ^ 0x8000u; }
inline uint16_t neg_f16(uint16_t a) { return a ^ 0x8000u; }
inline uint32_t neg_f16x2(uint32_t a) { return a ^ 0x80008000u; }
inline uint32_t neg_bf16x2(uint32_t a) { return a ^ 0x80008000u; }
inline uint32_t abs_f32(uint32_t a) { return a & 0x7fffffffu; }
inline uint32_t rcp_rn_f32(uint32_t a) { return bits(1 / f(a)); }
inline uint32_t rsqrt_approx_f32(uint32_t a) { return bits(float(1 / std::sqrt(double(f(a))))); }
inline uint32_t lg2_approx_f32(uint32_t a) { return bits(std::log2(f(a))); }
inline uint32_t ex2_approx_f32(uint32_t a) { return bits(std::exp2(f(a))); }
inline uint32_t flushed(uint32_t a) { return (a & 0x7f800000u) ? a : a & 0x80000000u; }
inline uint32_t rsqrt_approx_ftz_f32(uint32_t a) { return flushed(rsqrt_approx_f32(flushed(a))); }
inline uint32_t ex2_approx_ftz_f32(uint32_t a) { return flushed(ex2_approx_f32(flushed(a))); }
inline uint32_t rcp_approx_ftz_f32(uint32_t a) { return flushed(bits(1 / f(flushed(a)))); }
inline uint32_t fma_rn_ftz_f32(uint32_t a, uint32_t b, uint32_t c) {
  return flushed(fma_rn_f32(flushed(a), flushed(b), flushed(c)));
}

// Two 16-bit values a word.
template <class Function>
inline uint32_t by_halves(uint32_t a, uint32_t b, const Function& function) {
  return uint32_t(uint16_t(function(uint16_t(a), uint16_t(b)))) |
         uint32_t(uint16_t(function(uint16_t(a >> 16), uint16_t(b >> 16)))) << 16;
}
inline uint32_t add_s16x2(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint16_t x, uint16_t y) { return uint16_t(x + y); });
}
inline uint32_t min_relu_s32(uint32_t a, uint32_t b) { return max_s32(min_s32(a, b), 0); }
inline uint32_t min_s16x2_relu(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint16_t x, uint16_t y) {
    const int16_t least = int16_t(x) < int16_t(y) ? int16_t(x) : int16_t(y);
    return uint16_t(least < 0 ? 0 : least);
  });
}
inline uint16_t mul_bf16(uint16_t a, uint16_t b) { return to_bf16(from_bf16(a) * from_bf16(b)); }
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint16_t x, uint16_t y) { return to_bf16(from_bf16(x) * from_bf16(y)); });
}
inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
  return by_halves(a, b, [](uint16_t x, uint16_t y) { return to_half(from_half(x) * from_half(y)); });
}

// ---- comparisons and choices -----------------------------------------------------------------------------------

#define EMULATOR_COMPARE(type, unsigned_, signed_)                                                  \
  inline bool setp_eq_##type(unsigned_ a, unsigned_ b) { return a == b; }                           \
  inline bool setp_ne_##type(unsigned_ a, unsigned_ b) { return a != b; }                           \
  inline bool setp_lt_##type(unsigned_ a, unsigned_ b) { return signed_(a) < signed_(b); }          \
  inline bool setp_le_##type(unsigned_ a, unsigned_ b) { return signed_(a) <= signed_(b); }         \
  inline bool setp_gt_##type(unsigned_ a, unsigned_ b) { return signed_(a) > signed_(b); }          \
  inline bool setp_ge_##type(unsigned_ a, unsigned_ b) { return signed_(a) >= signed_(b); }
EMULATOR_COMPARE(s16, uint16_t, int16_t)
EMULATOR_COMPARE(u16, uint16_t, uint16_t)
EMULATOR_COMPARE(b16, uint16_t, uint16_t)
EMULATOR_COMPARE(s32, uint32_t, int32_t)
EMULATOR_COMPARE(u32, uint32_t, uint32_t)
EMULATOR_COMPARE(b32, uint32_t, uint32_t)
EMULATOR_COMPARE(s64, uint64_t, int64_t)
EMULATOR_COMPARE(u64, uint64_t, uint64_t)
EMULATOR_COMPARE(b64, uint64_t, uint64_t)
// With a u: also where one is NaN.
inline bool setp_num_f32(uint32_t a, uint32_t b) { return f(a) == f(a) && f(b) == f(b); }
inline bool setp_eq_f32(uint32_t a, uint32_t b) { return f(a) == f(b); }
inline bool setp_ne_f32(uint32_t a, uint32_t b) { return f(a) < f(b) || f(a) > f(b); }
inline bool setp_lt_f32(uint32_t a, uint32_t b) { return f(a) < f(b); }
inline bool setp_le_f32(uint32_t a, uint32_t b) { return f(a) <= f(b); }
inline bool setp_gt_f32(uint32_t a, uint32_t b) { return f(a) > f(b); }
inline bool setp_ge_f32(uint32_t a, uint32_t b) { return f(a) >= f(b); }
inline bool setp_equ_f32(uint32_t a, uint32_t b) { return !setp_ne_f32(a, b); }
inline bool setp_neu_f32(uint32_t a, uint32_t b) { return !setp_eq_f32(a, b); }
inline bool setp_ltu_f32(uint32_t a, uint32_t b) { return !setp_ge_f32(a, b); }
inline bool setp_leu_f32(uint32_t a, uint32_t b) { return !setp_gt_f32(a, b); }
inline bool setp_gtu_f32(uint32_t a, uint32_t b) { return !setp_le_f32(a, b); }
inline bool setp_geu_f32(uint32_t a, uint32_t b) { return !setp_lt_f32(a, b); }
inline bool setp_nan_f32(uint32_t a, uint32_t b) { return f(a) != f(a) || f(b) != f(b); }
// A bfloat16 number is the upper half of a float32 number.
inline bool setp_lt_bf16(uint16_t a, uint16_t b) { return setp_lt_f32(a << 16, b << 16); }
inline bool setp_gt_bf16(uint16_t a, uint16_t b) { return setp_gt_f32(a << 16, b << 16); }
inline bool setp_ge_bf16(uint16_t a, uint16_t b) { return setp_ge_f32(a << 16, b << 16); }

inline uint16_t selp_b16(uint16_t a, uint16_t b, bool p) { return p ? a : b; }
inline uint16_t selp_u16(uint16_t a, uint16_t b, bool p) { return p ? a : b; }
inline uint16_t selp_s16(uint16_t a, uint16_t b, bool p) { return p ? a : b; }
inline uint32_t selp_b32(uint32_t a, uint32_t b, bool p) { return p ? a : b; }
inline uint32_t selp_u32(uint32_t a, uint32_t b, bool p) { return p ? a : b; }
inline uint32_t selp_s32(uint32_t a, uint32_t b, bool p) { return p ? a : b; }
inline uint32_t selp_f32(uint32_t a, uint32_t b, bool p) { return p ? a : b; }
inline uint64_t selp_b64(uint64_t a, uint64_t b, bool p) { return p ? a : b; }
inline uint64_t selp_u64(uint64_t a, uint64_t b, bool p) { return p ? a : b; }
inline uint64_t selp_s64(uint64_t a, uint64_t b, bool p) { return p ? a : b; }

// ---- conversions -----------------------------------------------------------------------------------------------

inline uint64_t cvt_s64_s32(uint32_t a) { return uint64_t(int64_t(int32_t(a))); }
inline uint64_t cvt_u64_u32(uint32_t a) { return a; }
inline uint32_t cvt_u32_u64(uint64_t a) { return uint32_t(a); }
inline uint32_t cvt_s32_s8(uint32_t a) { return uint32_t(int32_t(int8_t(a))); }
inline uint32_t cvt_s32_s16(uint16_t a) { return uint32_t(int32_t(int16_t(a))); }
inline uint32_t cvt_u32_u16(uint16_t a) { return a; }
inline uint64_t cvt_u64_u16(uint16_t a) { return a; }
inline uint16_t cvt_u16_u32(uint32_t a) { return uint16_t(a); }
inline uint16_t cvt_u16_u64(uint64_t a) { return uint16_t(a); }
inline uint16_t cvt_s16_s8(uint16_t a) { return uint16_t(int16_t(int8_t(a))); }
inline uint32_t cvt_rn_f32_s32(uint32_t a) { return bits(float(int32_t(a))); }
inline uint32_t cvt_rn_f32_u32(uint32_t a) { return bits(float(a)); }
inline uint32_t cvt_rn_f32_s16(uint16_t a) { return bits(float(int16_t(a))); }
inline uint64_t cvt_f64_f32(uint32_t a) { return bits(double(f(a))); }
inline uint64_t cvt_rzi_s64_f32(uint32_t a) { return uint64_t(int64_t(f(a))); }
inline uint32_t cvt_rn_f32_s64(uint64_t a) { return bits(float(int64_t(a))); }
inline uint32_t cvt_rmi_f32_f32(uint32_t a) { return bits(std::floor(f(a))); }
inline uint32_t cvt_rmi_ftz_f32_f32(uint32_t a) { return cvt_rmi_f32_f32(flushed(a)); }
inline uint32_t cvt_rpi_f32_f32(uint32_t a) { return bits(std::ceil(f(a))); }
inline uint32_t cvt_rzi_s32_f32(uint32_t a) {
  const float x = f(a);
  if (x != x) return 0;
  if (x >= 2147483648.f) return 0x7fffffffu;
  if (x <= -2147483648.f) return 0x80000000u;
  return uint32_t(int32_t(x));
}
inline uint32_t cvt_f32_f16(uint16_t a) { return bits(from_half(a)); }
inline uint32_t cvt_f32_bf16(uint16_t a) { return bits(from_bf16(a)); }
inline float tf32(uint32_t x) { return f(x & ~0x1fffu); }  // of an operand, whose lower bits products ignore
inline uint32_t cvt_rna_tf32_f32(uint32_t a) { return (a + 0x1000) & ~0x1fffu; }  // of finite numbers
inline uint16_t cvt_rn_f16_f32(uint32_t a) { return to_half(f(a)); }
inline uint16_t cvt_rn_bf16_f32(uint32_t a) { return to_bf16(f(a)); }
inline uint32_t cvt_rn_bf16x2_f32(uint32_t high, uint32_t low) {
  return uint32_t(to_bf16(f(high))) << 16 | to_bf16(f(low));
}
inline uint32_t cvt_rn_f16x2_f32(uint32_t high, uint32_t low) {
  return uint32_t(to_half(f(high))) << 16 | to_half(f(low));
}

// ---- memory ----------------------------------------------------------------------------------------------------

// Loads a parameter.
template <class T>
inline T load(uint64_t address) {
  T x;
  std::memcpy(&x, reinterpret_cast<const void*>(address), sizeof(T));
  return x;
}

[[noreturn]] void fail(Thread& t, const char* what);

enum class GlobalAccess { kRead, kWrite, kAtomic };
// copy: the clock of the copy that makes the access, or 0.
void watch_global(Thread& t, uint64_t address, uint64_t bytes, GlobalAccess how, uint32_t copy = 0);
// st.release and ld.acquire of a number in global memory that is 0 until something can be read.
void publish_global(Thread& t, uint64_t address, uint32_t x);
uint32_t load_published(Thread& t, uint64_t address);
void launch_dependents(Thread& t);
void wait_for_prerequisites(Thread& t);

inline void* global_at(Thread& t, uint64_t address, uint32_t bytes, uint32_t offset, GlobalAccess how) {
  if (address % bytes) fail(t, "an access to global memory that is not aligned");
  if (t.watched && offset == 0) watch_global(t, address, bytes, how);
  return reinterpret_cast<void*>(address + offset);
}
// `bytes`: of the whole vector, whose element `i` is meant.
template <class T>
inline T load_global(Thread& t, uint64_t address, uint32_t bytes = sizeof(T), uint32_t i = 0) {
  T x;
  std::memcpy(&x, global_at(t, address, bytes, i * sizeof(T), GlobalAccess::kRead), sizeof(T));
  return x;
}
template <class T>
inline void store_global(Thread& t, uint64_t address, T x, uint32_t bytes = sizeof(T), uint32_t i = 0) {
  std::memcpy(global_at(t, address, bytes, i * sizeof(T), GlobalAccess::kWrite), &x, sizeof(T));
}

void watch_read(Thread& t, uint32_t address, uint32_t bytes);
void watch_write(Thread& t, uint32_t address, uint32_t bytes);

// Where shared memory begins: below is what the system keeps.
constexpr uint32_t kSharedStart = 1024;

[[noreturn]] void fail_at_barrier(Thread& t, uint32_t address, uint32_t bytes);

// bytes: a power of two up to 256. From mbarrier.init to mbarrier.inval PTX defines no access to the memory of a barrier but
// by the operations of barriers.
inline uint8_t* shared_at(Thread& t, uint32_t address, uint32_t bytes) {
  if (address < kSharedStart || address > t.shared_end || t.shared_end - address < bytes)
    fail(t, "an access outside of the block's shared memory");
  if (address % bytes) fail(t, "an access to shared memory that is not aligned");
  const uint64_t words = bytes <= 8 ? 1 : (uint64_t{1} << bytes / 8) - 1;
  if (t.barriers[address / 512] >> address / 8 % 64 & words) fail_at_barrier(t, address, bytes);
  return t.shared + address;
}
// `bytes`: of the whole vector, whose element `i` is meant.
template <class T>
inline T load_shared(Thread& t, uint32_t address, uint32_t bytes = sizeof(T), uint32_t i = 0) {
  const uint8_t* from = shared_at(t, address, bytes);
  if (t.watched && i == 0) watch_read(t, address, bytes);
  T x;
  std::memcpy(&x, from + i * sizeof(T), sizeof(T));
  return x;
}
template <class T>
inline void store_shared(Thread& t, uint32_t address, T x, uint32_t bytes = sizeof(T), uint32_t i = 0) {
  uint8_t* to = shared_at(t, address, bytes);
  if (t.watched && i == 0) watch_write(t, address, bytes);
  std::memcpy(to + i * sizeof(T), &x, sizeof(T));
}
template <class T, class Function>
inline T change_shared(Thread& t, uint32_t address, const Function& function) {
  uint8_t* at = shared_at(t, address, sizeof(T));
  T old;
  std::memcpy(&old, at, sizeof(T));
  const T x = function(old);
  std::memcpy(at, &x, sizeof(T));
  return old;
}
template <class T, class Function>
inline T change_global(Thread& t, uint64_t address, const Function& function) {
  void* const at = global_at(t, address, sizeof(T), 0, GlobalAccess::kAtomic);
  T old;
  std::memcpy(&old, at, sizeof(T));
  const T x = function(old);
  std::memcpy(at, &x, sizeof(T));
  return old;
}

// ---- what threads do together ----------------------------------------------------------------------------------

uint32_t block_index(Thread& t, int dimension);
uint32_t block_count(Thread& t, int dimension);
uint32_t block_threads(Thread& t, int dimension);
uint32_t cluster_rank(Thread& t);

enum class Shuffle { kUp, kDown, kButterfly, kIndex };
void sync_warp(Thread& t, uint32_t mask);
uint32_t shuffle(Thread& t, Shuffle how, uint32_t x, uint32_t b, uint32_t c, uint32_t mask, bool* in_range);
uint32_t ballot(Thread& t, bool x, uint32_t mask);
bool vote_all(Thread& t, bool x, uint32_t mask);
bool vote_any(Thread& t, bool x, uint32_t mask);
uint32_t redux_max_s32(Thread& t, uint32_t x, uint32_t mask);
uint32_t redux_add_s32(Thread& t, uint32_t x, uint32_t mask);
void load_matrices(Thread& t, uint32_t address, uint32_t* out, int count, bool transposed);
void store_matrices(Thread& t, uint32_t address, const uint32_t* x, int count, bool transposed);
enum class Format { k_bf16, k_f16, k_tf32 };  // of the operands of a product
void mma(Thread& t, uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, int k, Format format);

void named_barrier(Thread& t, uint32_t id, uint32_t threads, bool waits);  // threads 0: all of the block
void cluster_arrive(Thread& t);
void cluster_wait(Thread& t);

// ---- barriers in shared memory, and copies ---------------------------------------------------------------------

void barrier_init(Thread& t, uint32_t barrier, uint32_t arrivals);
void barrier_inval(Thread& t, uint32_t barrier);
void barrier_arrive(Thread& t, uint32_t barrier, bool in_cluster, uint32_t count = 1);
void barrier_expect(Thread& t, uint32_t barrier, uint32_t bytes);
bool barrier_try_wait(Thread& t, uint32_t barrier, uint32_t parity);
uint32_t map_to_rank(Thread& t, uint32_t address, uint32_t rank);
void fence_proxy_async(Thread& t);
void fence_mbarrier_init(Thread& t);

void copy_async(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t read);  // and zeros after those read
void copy_async_commit(Thread& t);
void copy_async_wait(Thread& t, uint32_t groups);
void tensor_load(Thread& t, uint32_t to, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                 uint32_t barrier);
void tensor_store(Thread& t, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t from);
void tensor_add(Thread& t, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t from);
// blocks: a bit for each block of the cluster to which the bytes go, by its rank; kOwnBlock: to the thread's own alone.
constexpr uint32_t kOwnBlock = 0;
void bulk_load(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint32_t blocks);
void bulk_store(Thread& t, uint64_t to, uint32_t from, uint32_t bytes);
void bulk_commit(Thread& t);
void bulk_wait(Thread& t, uint32_t groups);
void bulk_wait_read(Thread& t, uint32_t groups);

// ---- WGMMA -----------------------------------------------------------------------------------------------------

struct Product {
  int n;
  Format format;  // of the operands: 16 along k, or 8 tf32
  uint32_t* out;
  const uint32_t* a;  // four registers, or null: a_shared
  uint64_t a_shared, b_shared;
  bool adds, transpose_a, transpose_b;
};
void wgmma(Thread& t, const Product& product);
void wgmma_fence(Thread& t);
void wgmma_commit(Thread& t);
void wgmma_wait(Thread& t, uint32_t groups);
void set_registers(Thread& t, uint32_t count, bool more);  // setmaxnreg.inc, or .dec

// ---- a kernel --------------------------------------------------------------------------------------------------

struct Parameter {
  uint32_t offset, bytes;
};
struct Kernel {
  void (*run)(Thread& t, uint64_t params);
  const Parameter* params;
  uint32_t param_count;
  uint32_t dynamic_start;  // the address of dynamic shared memory
  uint32_t registers;      // of a thread at launch; 0: not known, and setmaxnreg is a fault
  const char* ptx;         // the file that its sites are lines of
};

}  // namespace emulator
