// WGMMA. A product is computed when it is issued, and its operands are checked again when it is waited for.
#include "threads.h"

namespace emulator {
namespace {

// The address of element (line, column) of an operand with the swizzle of 128 bytes; a line is a row of A or a column of
// B, and columns are along k.
struct Operand {
  uint32_t start, leading, stride;
  bool transposed;  // lines are what lies together, else columns are

  Operand(Thread& t, uint64_t descriptor, bool transposed) : transposed(transposed) {
    start = uint32_t(descriptor & 0x3fff) << 4;
    leading = uint32_t(descriptor >> 16 & 0x3fff) << 4;
    stride = uint32_t(descriptor >> 32 & 0x3fff) << 4;
    if (descriptor >> 62 != 1) fail(t, "WGMMA with another swizzle than that of 128 bytes");
    if (descriptor >> 49 & 7) fail(t, "WGMMA with a base offset");
  }
  uint32_t at(uint32_t line, uint32_t column) const {
    const uint32_t plain = transposed ? start + line / 64 * leading + column / 8 * stride + column % 8 * 128 + line % 64 * 2
                                      : start + line / 8 * stride + line % 8 * 128 + column * 2;
    return swizzled(plain);
  }
  // Elements of `lines` lines of 16 columns, or 8 of tf32, from `first` on, a column of B after the other; `ranges`: what
  // was read.
  void read(Thread& t, uint32_t first, uint32_t lines, Format format, float* out, bool by_line,
            std::vector<Range>& ranges) const {
    if (format == Format::k_tf32) {
      if (transposed) fail(t, "WGMMA with a transposed operand of tf32");
      for (uint32_t line = 0; line < lines; ++line)
        for (uint32_t column = 0; column < 8; column += 4) {
          const uint32_t address = at(first + line, 2 * column);
          ranges.push_back({address, 16});
          uint32_t x[4];
          std::memcpy(x, shared_at(t, address, 16), 16);
          for (uint32_t e = 0; e < 4; ++e)
            out[by_line ? line * 8 + column + e : (column + e) * lines + line] = tf32(x[e]);
        }
      return;
    }
    const uint32_t outer = transposed ? 16 : lines, inner = transposed ? lines : 16;
    for (uint32_t i = 0; i < outer; ++i)
      for (uint32_t j = 0; j < inner; j += 8) {
        const uint32_t address = transposed ? at(first + j, i) : at(first + i, j);
        const uint8_t* from = shared_at(t, address, 16);
        ranges.push_back({address, 16});
        for (uint32_t e = 0; e < 8; ++e) {
          uint16_t x;
          std::memcpy(&x, from + 2 * e, 2);
          const float value = format == Format::k_f16 ? from_half(x) : from_bf16(x);
          const uint32_t line = transposed ? j + e : i, column = transposed ? i : j + e;
          out[by_line ? line * 16 + column : column * lines + line] = value;
        }
      }
  }
};

uint64_t content(const Block& block, const std::vector<Range>& ranges) {
  uint64_t sum = 0;
  for (const Range& range : ranges)
    for (uint32_t i = 0; i < range.bytes; i += 8) {
      uint64_t x;
      std::memcpy(&x, block.shared + range.address + i, 8);
      sum = (sum ^ x) * 0x9e3779b97f4a7c15ull;
      sum ^= sum >> 29;
    }
  return sum;
}

}  // namespace

void make_product(Thread& t, Meeting& m) {
  auto& product = *static_cast<Product*>(m.of[0]);
  const bool is_tf32 = product.format == Format::k_tf32;
  const int n = product.n, depth = is_tf32 ? 8 : 16;
  static thread_local float a[16 * 16], b[16 * 256];
  Flight flight;
  flight.site = t.site;
  const uint32_t first = t.warp->number % 4 * 16;
  if (product.a) {
    for (int lane = 0; lane < 32; ++lane) {
      const uint32_t* registers = static_cast<Product*>(m.of[lane])->a;
      for (int i = 0; is_tf32 && i < 4; ++i) a[(lane / 4 + i % 2 * 8) * 8 + lane % 4 + i / 2 * 4] = tf32(registers[i]);
      for (int i = 0; !is_tf32 && i < 8; ++i)
        a[(lane / 4 + i / 2 % 2 * 8) * 16 + lane % 4 * 2 + i % 2 + i / 4 * 8] =
            part(registers, i, product.format == Format::k_f16);
    }
  } else {
    Operand(t, product.a_shared, product.transpose_a).read(t, first, 16, product.format, a, true, flight.ranges);
  }
  Operand(t, product.b_shared, product.transpose_b).read(t, 0, n, product.format, b, false, flight.ranges);
  for (int lane = 0; lane < 32; ++lane) {
    const Product& own = *static_cast<Product*>(m.of[lane]);
    if (own.b_shared != product.b_shared || own.adds != product.adds || (!own.a && own.a_shared != product.a_shared))
      fail(t, "lanes that give WGMMA different operands");
  }
  alignas(64) float sums[256];
  for (int row = 0; row < 16; ++row) {
    std::memset(sums, 0, sizeof(float) * size_t(n));
    for (int k = 0; k < depth; ++k) {
      const float x = a[row * depth + k];
      const float* const line = b + k * n;
      for (int column = 0; column < n; ++column) sums[column] += x * line[column];
    }
    for (int column = 0; column < n; ++column) {
      const int lane = row % 8 * 4 + column % 8 / 2, i = column / 8 * 4 + row / 8 * 2 + column % 2;
      uint32_t& out = static_cast<Product*>(m.of[lane])->out[i];
      out = bits(product.adds ? f(out) + sums[column] : sums[column]);
    }
  }
  flight.sum = content(*t.block, flight.ranges);
  if (t.watched) {
    flight.clocks = t.warp->clocks;
    for (const Range& range : flight.ranges) {
      check_read(t, *t.block, t.warp->clocks, range.address, range.bytes, true);
      note_read(*t.block, *t.warp, range.address, range.bytes);
    }
  }
  t.warp->open.push_back(std::move(flight));
}

void wait_products(Thread& t, uint32_t left) {
  Warp& warp = *t.warp;
  while (warp.groups.size() > left) {
    for (const Flight& flight : warp.groups.front()) {
      if (content(*t.block, flight.ranges) != flight.sum) {
        const std::string what = "an operand changed before the product was waited for: " + place(flight.site);
        fail(t, what.c_str());
      }
      if (!t.watched) continue;
      for (const Range& range : flight.ranges) {
        check_read(t, *t.block, flight.clocks, range.address, range.bytes, false);
        note_read(*t.block, warp, range.address, range.bytes);
      }
    }
    warp.groups.pop_front();
  }
}

}  // namespace emulator
