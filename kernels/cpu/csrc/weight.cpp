// Formats whose weights are float32, bfloat16 or float16.
//
// float32 and float16: [panels][in][PANEL]. bfloat16: [panels][in / 2 rounded up][PANEL][2], the
// operand of vdpbf16ps, or of tile registers (weight_tiles.h); without either the pairs widen to
// float32 by a shift and a mask.
// A register tile of up to ROWS rows by PANEL columns keeps the multipliers fed; with few rows the
// weights stream through once, at the speed of memory. Sums run over CHUNK features, and over the
// sums of chunks: one long chain would round more than an ordinary product, whose sums are split.

#include "weight.h"

#include <algorithm>

#include "parallel.h"
#include "quant.h"
#include "weight_tiles.h"

namespace pagewire {
namespace {

// Of a register tile: with AVX2's sixteen registers, what leaves room for the weights beside the sums.
template <class V>
constexpr int ROWS = W == 16 ? 12 : std::is_same_v<V, bf16> ? 5 : 6;
constexpr int64_t AHEAD = 4096;  // bytes between a weight and what is fetched meanwhile
constexpr int64_t CHUNK = 256;   // even

#if defined(__AVX512BF16__) || defined(PAGEWIRE_TILES)
constexpr bool NATIVE_BFLOAT16 = true;
#else
constexpr bool NATIVE_BFLOAT16 = false;
#endif

inline void fetch_ahead(const void* weights, int64_t bytes) {
  const char* from = static_cast<const char*>(weights) + AHEAD;
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
}

// Each adds the products of one or two input features to the sums of M rows.
template <int M, class V>
inline void add_feature(const float* x, int64_t row, const V* weights, vf (&acc)[M][2]) {
  vf w0 = load(weights), w1 = load(weights + W);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    acc[m][0] += w0 * x[m * row];
    acc[m][1] += w1 * x[m * row];
  }
}

template <int M>
inline void add_pair(const float* x, int64_t row, const bf16* weights, vf (&acc)[M][2]) {
  vu w0, w1;
  std::memcpy(&w0, weights, sizeof w0);
  std::memcpy(&w1, weights + 2 * W, sizeof w1);
  vf even0 = bits_as<vf>(w0 << 16), even1 = bits_as<vf>(w1 << 16);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    acc[m][0] += even0 * x[m * row];
    acc[m][1] += even1 * x[m * row];
  }
  vf odd0 = bits_as<vf>(w0 & 0xffff0000u), odd1 = bits_as<vf>(w1 & 0xffff0000u);
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    acc[m][0] += odd0 * x[m * row + 1];
    acc[m][1] += odd1 * x[m * row + 1];
  }
}

#if defined(__AVX512BF16__)
template <int M>
inline void add_pair(const bf16* x, int64_t row, const bf16* weights, vf (&acc)[M][2]) {
  __m512bh w0 = bits_as<__m512bh>(_mm512_loadu_si512(weights));
  __m512bh w1 = bits_as<__m512bh>(_mm512_loadu_si512(weights + 2 * W));
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    int32_t pair;
    std::memcpy(&pair, x + m * row, sizeof pair);
    __m512bh both = bits_as<__m512bh>(_mm512_set1_epi32(pair));
    acc[m][0] = bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(acc[m][0]), both, w0));
    acc[m][1] = bits_as<vf>(_mm512_dpbf16_ps(bits_as<__m512>(acc[m][1]), both, w1));
  }
}
#endif

// X is the element of prepared rows, V that of the weights. ADD: to the sums that are there.
template <int M, bool ADD, class X, class V>
void tile(const X* x, int64_t row, const V* weights, int64_t in, float* sums) {
  vf acc[M][2] = {};
  if constexpr (std::is_same_v<V, bf16>) {
    for (int64_t i = 0; i < in; i += 2, weights += 2 * PANEL) {
      fetch_ahead(weights, 4 * PANEL);
      add_pair<M>(x + i, row, weights, acc);
    }
  } else {
    for (int64_t i = 0; i < in; i++, weights += PANEL) {
      fetch_ahead(weights, PANEL * int64_t(sizeof(V)));
      add_feature<M>(x + i, row, weights, acc);
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) {
    PAGEWIRE_UNROLL
    for (int i = 0; i < 2; i++) {
      float* to = sums + m * PANEL + i * W;
      store(to, ADD ? load(to) + acc[m][i] : acc[m][i]);
    }
  }
}

template <int M, bool ADD, class X, class V>
void tile_of(int64_t count, const X* x, int64_t row, const V* weights, int64_t in, float* sums) {
  if constexpr (M > 0) {
    if (count == M) return tile<M, ADD>(x, row, weights, in, sums);
    tile_of<M - 1, ADD>(count, x, row, weights, in, sums);
  }
}

template <bool ADD, class X, class V>
void tiles(const X* x, int64_t row, const V* weights, int64_t in, int64_t rows, float* sums) {
  // Of even height: a low tile has too few sums in flight.
  int64_t left = (rows + ROWS<V> - 1) / ROWS<V>;
  for (int64_t r = 0; r < rows; left--) {
    int64_t count = (rows - r + left - 1) / left;
    tile_of<ROWS<V>, ADD>(count, x + r * row, row, weights, in, sums + r * PANEL);
    r += count;
  }
}

template <class X, class V>
void multiply(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes, int64_t rows,
              float* sums) {
  int64_t features = std::is_same_v<V, bf16> ? (w.in + 1) / 2 * 2 : w.in;
  const X* from = static_cast<const X*>(x);
  const V* weights = static_cast<const V*>(w.data) + panel * features * PANEL;
  int64_t row = row_bytes / int64_t(sizeof(X));
  tiles<false>(from, row, weights, std::min(CHUNK, w.in), rows, sums);
  // A chunk of weights stays in the first-level cache for all rows.
  for (int64_t i = CHUNK; i < w.in; i += CHUNK)
    tiles<true>(from + i, row, weights + i * PANEL, std::min(CHUNK, w.in - i), rows, sums);
}

void multiply_bfloat16(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                       int64_t rows, float* sums) {
#if defined(PAGEWIRE_TILES)
  weight_tiles::multiply_panel(w, panel, x, row_bytes, rows, sums);
#else
  using X = std::conditional_t<NATIVE_BFLOAT16, bf16, float>;
  multiply<X, bf16>(w, panel, x, row_bytes, rows, sums);
#endif
}

template <class V>
void pack(const V* from, int64_t in, int64_t out, V* to, int threads) {
  constexpr int64_t PAIR = std::is_same_v<V, bf16> ? 2 : 1;
  int64_t features = (in + PAIR - 1) / PAIR * PAIR;
  parallel_for((out + PANEL - 1) / PANEL, threads, [&](int64_t panel) {
    V* at = to + panel * PANEL * features;
    int64_t first = panel * PANEL, whole = first + PANEL <= out ? in / PAIR * PAIR : 0;
    for (int64_t i = 0; i < whole; i += PAIR)
      for (int64_t n = first; n < first + PANEL; n++, at += PAIR)
        std::memcpy(at, from + n * in + i, PAIR * sizeof(V));
    for (int64_t i = whole; i < features; i += PAIR)
      for (int64_t n = first; n < first + PANEL; n++)
        for (int64_t j = i; j < i + PAIR; j++) *at++ = n < out && j < in ? from[n * in + j] : V{};
  });
}

// What pack() was given as row n. A line of the cache for each feature or pair.
template <class V>
void unpack_row(const V* packed, int64_t in, int64_t n, V* to) {
  constexpr int64_t PAIR = std::is_same_v<V, bf16> ? 2 : 1;
  int64_t features = (in + PAIR - 1) / PAIR * PAIR;
  const V* at = packed + n / PANEL * PANEL * features + n % PANEL * PAIR;
  int64_t i = 0;
  for (; i + PAIR <= in; i += PAIR, at += PAIR * PANEL) std::memcpy(to + i, at, PAIR * sizeof(V));
  if (i < in) to[i] = *at;
}

}  // namespace

bool reads_directly(const PackedWeight& w, int dtype) {
  if (w.format == PACKED_BFLOAT16) return NATIVE_BFLOAT16 && dtype == BFLOAT16 && w.in % 2 == 0;
  return dtype == FLOAT32 && (w.format == PACKED_FLOAT32 || w.format == PACKED_FLOAT16);
}

int64_t prepared_row_bytes(const PackedWeight& w) {
  if (w.format == PACKED_QUANTIZED) return quant::prepared_row_bytes(w.in);
  int64_t size = w.format == PACKED_BFLOAT16 && NATIVE_BFLOAT16 ? 2 : 4;
  return (w.in + 1) / 2 * 2 * size;
}

template <class T>
void prepare_row(const PackedWeight& w, const T* x, void* to) {
  if (w.format == PACKED_QUANTIZED) return quant::prepare_row(w.in, x, to);
  auto convert = [&](auto* row) {
    int64_t i = 0;
    for (; i + W <= w.in; i += W) store(row + i, load(x + i));
    for (; i < w.in; i++) from_float(to_float(x[i]), row + i);
    if (w.in % 2) from_float(0.0f, row + w.in);
  };
  if (w.format == PACKED_BFLOAT16 && NATIVE_BFLOAT16)
    convert(static_cast<bf16*>(to));
  else
    convert(static_cast<float*>(to));
}
template void prepare_row(const PackedWeight&, const float*, void*);
template void prepare_row(const PackedWeight&, const bf16*, void*);
template void prepare_row(const PackedWeight&, const f16*, void*);

void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                    int64_t rows, float* sums) {
  switch (w.format) {
    case PACKED_BFLOAT16:
      return multiply_bfloat16(w, panel, x, row_bytes, rows, sums);
    case PACKED_FLOAT16:
      return multiply<float, f16>(w, panel, x, row_bytes, rows, sums);
    case PACKED_QUANTIZED:
      return quant::multiply_panel(w, panel, x, row_bytes, rows, sums);
    default:
      return multiply<float, float>(w, panel, x, row_bytes, rows, sums);
  }
}

}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_API int64_t pagewire_packed_elements(int dtype, int64_t in, int64_t out) {
  int64_t features = dtype == BFLOAT16 ? (in + 1) / 2 * 2 : in;
  return (out + PANEL - 1) / PANEL * PANEL * features;
}

// weight [out, in] dense, packed has pagewire_packed_elements().
PAGEWIRE_API void pagewire_pack(int dtype, const void* weight, int64_t in, int64_t out,
                                void* packed, int threads) {
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    pack(static_cast<const T*>(weight), in, out, static_cast<T*>(packed), threads);
  });
}

// out[t] = row ids[t] of the weight [rows, in] that was packed. Returns the first t whose id is out
// of range, or -1.
PAGEWIRE_API int64_t pagewire_packed_rows(int dtype, const void* packed, int64_t rows, int64_t in,
                                          const int64_t* ids, int64_t tokens, void* out,
                                          int threads) {
  for (int64_t t = 0; t < tokens; t++)
    if (ids[t] < 0 || ids[t] >= rows) return t;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    for_rows(tokens, in, threads, [&](int64_t t) {
      unpack_row(static_cast<const T*>(packed), in, ids[t], static_cast<T*>(out) + t * in);
    });
  });
  return -1;
}
