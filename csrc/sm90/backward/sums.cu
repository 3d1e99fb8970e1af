// The last step: sums of dq and dk over the slices of a key head, where the walk forward has not
// added them; the gradient of the norm; the gradients of gates and betas through their activations;
// zeros for tokens of no sequence.
#include "sm90/backward/head_rows.cuh"
#include "sm90/launch_blocks.h"
#include "sm90/tile/l2norm.cuh"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 256;
constexpr int kLanes = kChannels / 8;  // of a row of scratch memory

GDN_DEVICE void store_as(void* base, int64_t at, Dtype dtype, float x) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(base)[at] = x;
  } else if (dtype == Dtype::kFloat64) {
    static_cast<double*>(base)[at] = x;
  } else {
    static_cast<uint16_t*>(base)[at] = dtype == Dtype::kFloat16
                                           ? __half_as_ushort(__float2half_rn(x))
                                           : __bfloat16_as_ushort(__float2bfloat16_rn(x));
  }
}

template <class T>
GDN_DEVICE void unpack_line(const uint4& line, float (&x)[8]) {
  const uint32_t words[4] = {line.x, line.y, line.z, line.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 pair = unpack(T{}, words[j]);
    x[2 * j] = pair.x;
    x[2 * j + 1] = pair.y;
  }
}

GDN_DEVICE float row_sum(float x) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d, kLanes);
  return x;
}

// kLanes threads have a row of a key head: they add the rows of its slices, or read the row that
// the walk forward has stored, and then apply the gradient of the norm. blockIdx.y: dq, dk.
template <class Kind>
__global__ void __launch_bounds__(kThreads) head_sum_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  using T = typename Kind::T;
  const ChunkBackward& problem = params.problem;
  const ChunkForward& p = problem.forward;
  const int64_t given = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const bool exists = given < p.B * p.T * p.H;
  const int64_t index = exists ? given : 0;  // all lanes of a warp take part in the sums
  const int lane = threadIdx.x % kLanes, group = slices_of<Kind>(params) / p.H,
            lines = lines_of<Kind>(p.K);
  const bool inside = lane < lines;
  const int64_t token = index / p.H;
  const int h = int(index % p.H), batch = int(token / p.T), t = int(token % p.T);
  bool owned = true;
  int chunk_index, row;
  if (p.cu_seqlens == nullptr) {
    chunk_index = batch * params.chunks_of_batch + t / kChunk;
    row = t % kChunk;
  } else {
    const int n = last_not_above(p.N, t, [&](int n) { return sequence_bound(p, n); });
    const int before = t - int(sequence_bound(p, n));
    owned = t < sequence_bound(p, p.N) && before >= 0;
    chunk_index = first_chunk(params, n) + before / kChunk;
    row = before % kChunk;
  }
  const bool of_keys = blockIdx.y == 1;
  float sum[8] = {};
  uint4* const own = static_cast<uint4*>(of_keys ? problem.dk : problem.dq) + index * lines + lane;
  if (params.sums != Sums::kLater) {
    if (owned && exists && inside) unpack_line<T>(*own, sum);
  } else if (owned && exists) {
    const int64_t block = int64_t{chunk_index} * slices_of<Kind>(params) + h * group;
    // Rows of a slice's block of dS, half of a row in each of two tiles.
    constexpr int64_t size = 2 * kChunk;
    const int line = (lane / 8 * kChunk + row) * 8 + (lane % 8 ^ row % 8);
    const uint4* from = reinterpret_cast<const uint4*>(params.scratch.ds) +
                        (block * size + (of_keys ? 0 : kChunk)) * kLanes + line;
#pragma unroll 2
    for (int i = 0; i < group; ++i, from += size * kLanes) {
      float x[8];
      unpack_line<T>(*from, x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum[j] += x[j];
    }
  }
  if (p.use_qk_l2norm) {  // dx = r (dy - y (y dy)), y = r x
    const Rows& from = of_keys ? p.k : p.q;
    float x[8] = {};
    if (owned && exists && inside) {
      const int64_t at = batch * from.batch + t * from.row + h * from.head + lane * 8;
      unpack_line<T>(*reinterpret_cast<const uint4*>(static_cast<const T*>(from.data) + at), x);
    }
    float square = 0, dot = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      square += x[j] * x[j];
      dot += x[j] * sum[j];
    }
    const float r = rsqrtf(row_sum(square) + kNormEps), along = r * r * row_sum(dot);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] = r * (sum[j] - x[j] * along);
  }
  if (!exists || !inside) return;
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) words[j] = pack(T{}, sum[2 * j], sum[2 * j + 1]);
  *own = make_uint4(words[0], words[1], words[2], words[3]);
}

// Zeroes gradients of packed tokens of no sequence, before the first sequence and after the last.
// kLanes threads have a row of a key head; `block` of `blocks`. With Sums::kLater head_sum_kernel
// zeroes dq and dk.
template <class Kind>
GDN_DEVICE void zero_rows(const Params& params, int64_t block, int64_t blocks) {
  const ChunkBackward& problem = params.problem;
  const ChunkForward& p = problem.forward;
  const int lane = threadIdx.x % kLanes, group = p.HV / p.H;
  const int64_t before = sequence_bound(p, 0), end = sequence_bound(p, p.N);
  const int lines = lines_of<Kind>(p.V), key_lines = lines_of<Kind>(p.K);
  const int64_t rows = (before + p.T - end) * p.H, each = blockDim.x / kLanes;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  for (int64_t i = block * each + threadIdx.x / kLanes; i < rows; i += blocks * each) {
    const int64_t index = i < before * p.H ? i : i + (end - before) * p.H;
    if (params.sums != Sums::kLater && lane < key_lines) {
      static_cast<uint4*>(problem.dq)[index * key_lines + lane] = zero;
      static_cast<uint4*>(problem.dk)[index * key_lines + lane] = zero;
    }
    for (int j = 0; j < group; ++j) {
      const int64_t at = index * group + j;
      for (int line = lane; line < lines; line += kLanes)
        static_cast<uint4*>(problem.dv)[at * lines + line] = zero;
      if (lane == 0) {
        store_as(problem.dg, at, problem.dg_dtype, 0.f);
        store_as(problem.dbeta, at, problem.dbeta_dtype, 0.f);
      }
    }
  }
}

// Makes the rows of dv of tokens with a small beta from their rows of dx (kReadsDv), for a chunk
// and value head. All lanes of a warp call it; x: ChunkFactors::x of the tokens 2 l and 2 l + 1 of
// lane l.
template <class Kind>
GDN_DEVICE void end_small_rows(const Params& params, const ChunkFactors& factors, const float4& x,
                               const Place& place, int hv) {
  using T = typename Kind::T;
  const ChunkForward& p = params.problem.forward;
  const int lane = threadIdx.x % 32, lines = lines_of<Kind>(p.V);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int own = 2 * lane + i;
    uint32_t small = __ballot_sync(~0u, own < place.rows && is_beta_small(factors.beta[own]));
    for (; small != 0; small &= small - 1) {
      const int source = __ffs(int(small)) - 1;
      const float c = __shfl_sync(~0u, i == 0 ? x.x : x.y, source);
      const int64_t token = place.batch * p.T + place.first + 2 * source + i;
      uint4* const row = static_cast<uint4*>(params.problem.dv) + (token * p.HV + hv) * lines;
      for (int line = lane; line < lines; line += 32) {
        const uint4 before = row[line];
        uint32_t words[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (uint32_t& word : words) {
          const float2 pair = unpack(T{}, word);
          word = pack(T{}, c * pair.x, c * pair.y);
        }
        row[line] = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

// dg and dbeta of a chunk and value head, by a warp, and zeros for rows of no sequence:
//     dg_t = sum over i >= t of ahead_i + sum over i < t of behind_i + <S, dS>
// and the gradients of their activations. Lane l has tokens 2 l and 2 l + 1. The parts of slices
// are added in their order.
template <class Kind>
__global__ void __launch_bounds__(kMostHeads * 32)
    gates_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  using T = typename Kind::T;
  if (params.problem.forward.cu_seqlens != nullptr)
    zero_rows<Kind>(params, int64_t{blockIdx.y} * gridDim.x + blockIdx.x,
                    int64_t{gridDim.x} * gridDim.y);
  __shared__ HeadRows g_rows, beta_rows;  // as given, then their gradients
  const ChunkBackward& problem = params.problem;
  const ChunkForward& p = problem.forward;
  const int chunk_index = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // A warp without a value head computes the last one again, and stores nothing.
  const int own_hv = blockIdx.y * (blockDim.x / 32) + warp, hv = min(own_hv, p.HV - 1),
            index = chunk_index * p.HV + hv;
  const bool stores = own_hv < p.HV;
  float* const sums = params.scratch.gate_sums + int64_t{chunk_index} * 2 * p.HV + hv;
  const Place place = place_of(params, chunk_index);
  if (place.rows <= 0) {
    if (p.use_gate && lane == 0 && stores) sums[0] = sums[p.HV] = 0.f;
    return;
  }
  const HeadThread own(params);
  uint32_t given_g[2], given_beta[2];
  own.load(given_g, p.g, p.g_dtype, place);
  if (p.use_beta_sigmoid) own.load(given_beta, p.beta, p.beta_dtype, place);
  const ChunkFactors& factors = params.scratch.factors[index];
  const int slices = Kind::kExact ? 1 : params.parts;
  const int64_t block = int64_t{index} * slices;
  const auto plus = [](float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); };
  const float2* const parts =
      reinterpret_cast<const float2*>(params.scratch.parts + block * (kParts * kChunk));
  const auto part = [&](int i) {
    float2 sum = parts[i * (kChunk / 2) + lane];
    for (int s = 1; s < slices; ++s) sum = plus(sum, parts[(s * kParts + i) * (kChunk / 2) + lane]);
    return sum;
  };
  const float2 read = plus(part(kReadPart), part(kReadPart + 1)), rows_sum = part(kBetaPart),
               value = part(kValuePart);
  const float2 behind = plus(part(kBehindPart), part(kBehindPart + 1));
  const float4 x = factors.x[lane];
  const float per_dx[2] = {of_dx<T>(factors, 2 * lane), of_dx<T>(factors, 2 * lane + 1)};
  if (kReadsDv<T> && stores) end_small_rows<Kind>(params, factors, x, place, hv);
  float2 ahead = plus(part(kPairsPart), part(kQueryPart));
  ahead.x -= x.z * per_dx[0] * read.x;
  ahead.y -= x.w * per_dx[1] * read.y;
  const float c[2] = {factors.c[2 * lane], factors.c[2 * lane + 1]};
  const float2 f =
      make_float2(exp2_approx(factors.power[2 * lane]), exp2_approx(factors.power[2 * lane + 1]));
  const float dbeta_of[2] = {per_dx[0] * (c[0] * value.x - f.x * read.x - rows_sum.x),
                             per_dx[1] * (c[1] * value.y - f.y * read.y - rows_sum.y)};
  // Sums over the tokens from this one on, and over the tokens before it.
  float after = ahead.x + ahead.y, before = behind.x + behind.y;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float above = __shfl_down_sync(~0u, after, d), below = __shfl_up_sync(~0u, before, d);
    if (lane + d < 32) after += above;
    if (lane >= d) before += below;
  }
  float next = __shfl_down_sync(~0u, after, 1), past = __shfl_up_sync(~0u, before, 1);
  if (lane == 31) next = 0.f;
  if (lane == 0) past = 0.f;
  float across = 0;
  for (int s = 0; s < slices; ++s) {
    const float2 halves = reinterpret_cast<const float2*>(params.scratch.across)[block + s];
    across += halves.x + halves.y;
  }
  across *= factors.post;
  float dg[2] = {after + past + across, next + ahead.y + past + behind.x + across};

  own.give(g_rows, given_g, p.g_dtype);
  if (p.use_beta_sigmoid) own.give(beta_rows, given_beta, p.beta_dtype);
  __syncthreads();
  float of_A_log = 0, of_bias = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row >= place.rows) continue;
    float g = g_rows.x[warp][row], dbeta = dbeta_of[i];
    // A decay below the floor is exactly 0 and has no gradient; a NaN stays one.
    if (p.use_gate) {
      if (p.dt_bias) g += p.dt_bias[hv];
      const float x = g, A_log = p.A_log[hv];
      g = log_decay(x, A_log);
      const bool closed = g * kRcpLn2 < kLog2Floor;
      of_A_log += closed ? 0.f : dg[i] * g;
      dg[i] = closed ? 0.f : log_decay_slope(x, A_log, g) * dg[i];
      of_bias += dg[i];
    } else if (g * kRcpLn2 < kLog2Floor) {
      dg[i] = 0.f;
    }
    if (p.use_beta_sigmoid) {
      const float beta = beta_rows.x[warp][row];
      dbeta *= (p.allow_neg_eigval ? 2.f : 1.f) / (1.f + __expf(-beta)) / (1.f + __expf(beta));
    }
    g_rows.x[warp][row] = dg[i];
    beta_rows.x[warp][row] = dbeta;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!own.has(place, i)) continue;
    const int row = own.row + 32 * i;
    const int64_t at = (place.batch * p.T + place.first + row) * p.HV + own.hv;
    store_as(problem.dg, at, problem.dg_dtype, g_rows.x[own.head][row]);
    store_as(problem.dbeta, at, problem.dbeta_dtype, beta_rows.x[own.head][row]);
  }
  if (!p.use_gate) return;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    of_A_log += __shfl_xor_sync(~0u, of_A_log, d);
    of_bias += __shfl_xor_sync(~0u, of_bias, d);
  }
  if (lane == 0 && stores) {
    sums[0] = of_A_log;
    sums[p.HV] = of_bias;
  }
}

// Sums over the chunks in a fixed order: a block has kWidth of the 2 HV columns.
constexpr int kWidth = 8;
__global__ void __launch_bounds__(kThreads) gate_sum_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  __shared__ float shares[kThreads / kWidth][kWidth];
  const int columns = 2 * params.problem.forward.HV;
  const int column = blockIdx.x * kWidth + threadIdx.x % kWidth, first = threadIdx.x / kWidth;
  float sum = 0;
  if (column < columns)
    for (int chunk_index = first; chunk_index < params.chunks; chunk_index += kThreads / kWidth)
      sum += params.scratch.gate_sums[int64_t{chunk_index} * columns + column];
  shares[first][threadIdx.x % kWidth] = sum;
  __syncthreads();
  if (first != 0 || column >= columns) return;
  for (int i = 1; i < kThreads / kWidth; ++i) sum += shares[i][threadIdx.x % kWidth];
  params.problem.gate_sums[column] = sum;
}
}  // namespace

template <class Kind>
const char* run_sums(const Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  const int64_t rows = p.B * p.T * p.H;
  const unsigned blocks = unsigned(ceil_div(rows * kLanes, kThreads));
  if (params.sums == Sums::kLater || p.use_qk_l2norm)
    if (const char* error =
            launch_small(&head_sum_kernel<Kind>, params, dim3(blocks, 2), kThreads, stream))
      return error;
  const HeadBlocks heads(params);
  if (const char* error =
          launch_small(&gates_kernel<Kind>, params, heads.grid, heads.threads, stream))
    return error;
  if (!p.use_gate) return nullptr;
  return launch_small(&gate_sum_kernel, params, unsigned(ceil_div(2 * p.HV, kWidth)), kThreads,
                      stream);
}

template const char* run_sums<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_sums<Kind<__nv_bfloat16, false>>(const Params&, cudaStream_t);
template const char* run_sums<Kind<__half, false>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
