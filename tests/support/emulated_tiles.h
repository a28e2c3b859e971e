// Tile registers in plain C++, for kernels/cpu/csrc/tiles.h: what Intel's manual says of each
// instruction, and an abort where a CPU would raise #UD.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace pagewire {
namespace tile_registers {

inline thread_local TileShapes shapes(0);
inline thread_local uint8_t registers[8][TILE_ROWS][TILE_BYTES];

inline void demand(bool allowed, const char* what) {
  if (allowed) return;
  std::fprintf(stderr, "tiles: %s\n", what);
  std::abort();
}

inline void load_shapes(const TileShapes& wanted) {
  demand(wanted.palette == 1 && wanted.start_row == 0, "palette 1 from row 0");
  for (int t = 0; t < 16; t++) {
    demand(wanted.rows[t] <= TILE_ROWS && wanted.row_bytes[t] <= TILE_BYTES, "a shape is too big");
    demand((wanted.rows[t] == 0) == (wanted.row_bytes[t] == 0), "a shape of one zero");
    demand(t < 8 || wanted.rows[t] == 0, "a register past the eighth");
  }
  shapes = wanted;
  std::memset(registers, 0, sizeof registers);
}
inline void release() {
  shapes = TileShapes(0);
  std::memset(registers, 0, sizeof registers);
}

template <int TILE>
inline void zero() {
  demand(shapes.rows[TILE] > 0, "zero of a register without shape");
  std::memset(registers[TILE], 0, sizeof registers[TILE]);
}

template <int TILE>
inline void load(const void* from, int64_t stride) {
  zero<TILE>();
  for (int64_t m = 0; m < shapes.rows[TILE]; m++)
    std::memcpy(registers[TILE][m], static_cast<const char*>(from) + m * stride,
                shapes.row_bytes[TILE]);
}
template <int TILE>
inline void store(void* to, int64_t stride) {
  demand(shapes.rows[TILE] > 0, "store of a register without shape");
  for (int64_t m = 0; m < shapes.rows[TILE]; m++)
    std::memcpy(static_cast<char*>(to) + m * stride, registers[TILE][m], shapes.row_bytes[TILE]);
}

template <int C, int A, int B>
inline void demand_product() {
  demand(shapes.rows[C] > 0 && shapes.rows[A] > 0 && shapes.rows[B] > 0, "product without shape");
  demand(C != A && C != B && A != B, "product of one register with itself");
  demand(shapes.rows[C] == shapes.rows[A], "rows of C and A");
  demand(shapes.row_bytes[C] == shapes.row_bytes[B], "columns of C and B");
  demand(shapes.row_bytes[A] == 4 * shapes.rows[B], "features of A and B");
}

template <class T>
inline T element(int tile, int64_t row, int64_t column) {
  T value;
  std::memcpy(&value, registers[tile][row] + column * int64_t(sizeof(T)), sizeof value);
  return value;
}
template <class T>
inline void put_element(int tile, int64_t row, int64_t column, T value) {
  std::memcpy(registers[tile][row] + column * int64_t(sizeof(T)), &value, sizeof value);
}

inline float without_denormals(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }

inline float widened(uint16_t bits) {
  uint32_t wide = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return without_denormals(value);
}

template <int C, int A, int B>
inline void add_bfloat16_product() {
  demand_product<C, A, B>();
  for (int64_t m = 0; m < shapes.rows[C]; m++)
    for (int64_t n = 0; n < shapes.row_bytes[C] / 4; n++) {
      float sums[2] = {};
      for (int64_t k = 0; k < shapes.rows[B]; k++)
        for (int64_t odd = 0; odd < 2; odd++) {
          float a = widened(element<uint16_t>(A, m, 2 * k + odd));
          float b = widened(element<uint16_t>(B, k, 2 * n + odd));
          sums[odd] = without_denormals(std::fma(a, b, sums[odd]));
        }
      float both = without_denormals(sums[0] + sums[1]);
      put_element(C, m, n, without_denormals(without_denormals(element<float>(C, m, n)) + both));
    }
}

template <int C, int A, int B>
inline void add_byte_product() {
  demand_product<C, A, B>();
  for (int64_t m = 0; m < shapes.rows[C]; m++)
    for (int64_t n = 0; n < shapes.row_bytes[C] / 4; n++) {
      int32_t sum = element<int32_t>(C, m, n);
      for (int64_t k = 0; k < shapes.rows[B]; k++)
        for (int64_t byte = 0; byte < 4; byte++)
          sum += element<int8_t>(A, m, 4 * k + byte) * element<uint8_t>(B, k, 4 * n + byte);
      put_element(C, m, n, sum);
    }
}

}  // namespace tile_registers
}  // namespace pagewire

// Whether the calling thread has tiles in use.
extern "C" __attribute__((visibility("default"), used)) inline bool pagewire_tiles_in_use() {
  return pagewire::tile_registers::shapes.palette != 0;
}
