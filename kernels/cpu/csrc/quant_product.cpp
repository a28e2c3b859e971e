// Products with weights of quant.h, by dot products of bytes.
//
// Activations become signed bytes with a float scale for each row and block of 32 features; a
// block's product is then an exact integer, which joins the float sum of its output:
//   sum += integer * (scale of the weights * scale of the row)
//   sum += min * (scale of the row * sum of its bytes), where there is a min
// A sum runs over the blocks in order whatever the number of rows: a row's result does not
// depend on the rows beside it. A block of weights is unpacked once for up to ROWS rows, or on AVX2, with
// half the registers, for all (quant_unpacked.h). Where there are tile registers, they take sixteens
// of rows (quant_tiles.h).

#include <algorithm>

#include "quant_dots.h"
#include "quant_tiles.h"
#include "quant_unpacked.h"

namespace pagewire {
namespace quant {
namespace {

// Of a register tile.
constexpr int ROWS = W == 16 ? 16 : W == 8 ? unpacked::FEWEST - 1 : 4;
constexpr int ABREAST = 8;  // rows whose sums of bytes grow in turn

// Features 4 FROM to 4 TO of a block against one row; start is -LEAST_OFFSET * sum of x. Few rows
// have too few sums in flight, so their integers are summed in two chains.
template <class F, int FROM, int TO, bool TWO_CHAINS>
inline vf dot_block(const vi (&codes)[8], const int8_t* x, int32_t start) {
#if defined(PAGEWIRE_BYTE_PAIRS)
  constexpr int BITS = F::CODE_BITS;
  vi sum{};
  if constexpr (BITS == 8) {
    static_assert(F::OFFSET == 128);
    PAGEWIRE_UNROLL
    for (int j = FROM; j < TO; j++)
      sum += add_pairs(dot2_signed(less_128(codes[j]), broadcast4(x + 4 * j)));
    return to_floats(sum);
  }
  // So many words add up below 2^15: 2 * 15 * 127 * 8, and so on.
  constexpr int RUN = BITS == 4 ? 8 : BITS == 5 ? 4 : 2;
  if constexpr (F::OFFSET > 0) sum = splat_int(start) * (F::OFFSET / LEAST_OFFSET);
  PAGEWIRE_UNROLL
  for (int j = FROM; j < TO; j += RUN) {
    vs words = dot2(codes[j], broadcast4(x + 4 * j));
    PAGEWIRE_UNROLL
    for (int k = j + 1; k < j + RUN; k++) words += dot2(codes[k], broadcast4(x + 4 * k));
    sum += add_pairs(words);
  }
  return to_floats(sum);
#else
  vi sum{}, other{};
  if constexpr (F::OFFSET > 0) sum = splat_int(start) * (F::OFFSET / LEAST_OFFSET);
  PAGEWIRE_UNROLL
  for (int j = FROM; j < TO; j++) {
    if (TWO_CHAINS && j % 2)
      other = dot4(other, codes[j], broadcast4(x + 4 * j));
    else
      sum = dot4(sum, codes[j], broadcast4(x + 4 * j));
  }
  return to_floats(TWO_CHAINS ? sum + other : sum);
#endif
}

// Adds a block's products with ABREAST rows to acc, four features of all rows at a time: the sums of
// one row alone wait for each other, and the scheduler does not hold enough rows to hide it. Fewer
// rows go one after the other, since their weights come from memory.
template <class F>
inline void add_abreast(const vi (&codes)[8], const Scales& s, const char* x, int64_t row_bytes,
                        vf* acc) {
  const PreparedBlock* rows[ABREAST];
  PAGEWIRE_UNROLL
  for (int m = 0; m < ABREAST; m++)
    rows[m] = reinterpret_cast<const PreparedBlock*>(x + m * row_bytes);
  constexpr int STEPS = 8 / F::HALVES;
  PAGEWIRE_UNROLL
  for (int half = 0; half < F::HALVES; half++) {
    vi sums[ABREAST] = {};
    if constexpr (F::OFFSET > 0) {
      PAGEWIRE_UNROLL
      for (int m = 0; m < ABREAST; m++) {
        int32_t start = F::HALVES == 1 ? rows[m]->start
                        : half == 0    ? rows[m]->start_half
                                       : rows[m]->start - rows[m]->start_half;
        sums[m] = splat_int(start) * (F::OFFSET / LEAST_OFFSET);
      }
    }
    PAGEWIRE_UNROLL
    for (int j = half * STEPS; j < (half + 1) * STEPS; j++) {
      PAGEWIRE_UNROLL
      for (int m = 0; m < ABREAST; m++)
        sums[m] = dot4(sums[m], codes[j], broadcast4(rows[m]->codes + 4 * j));
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < ABREAST; m++)
      acc[m] += to_floats(sums[m]) * (s.scale[half] * rows[m]->scale);
  }
  if constexpr (F::HAS_MIN) {
    PAGEWIRE_UNROLL
    for (int m = 0; m < ABREAST; m++) acc[m] += s.min * rows[m]->scaled_sum;
  }
}

// sums[m * PANEL] of W rows of the weight, the first of which is `first` of the group, for M
// prepared rows.
template <class F, int M>
__attribute__((noinline)) void tile(const uint8_t* group, int64_t first, int64_t blocks,
                                    const PreparedBlock* x, int64_t row_bytes, float* sums) {
  constexpr bool TWO = M <= 2;
  const uint8_t* codes_at = group + F::scale_bytes(blocks) + first * 4;
  const char* xs = reinterpret_cast<const char*>(x);
  const uint8_t* ahead = group + AHEAD;
  int64_t step = F::group_bytes(blocks) / blocks;
  vf acc[M] = {};
  for (int64_t b = 0; b < blocks; b++) {
    // As much as a block takes, scales and all.
    PAGEWIRE_UNROLL
    for (int64_t line = 0; line < F::BYTES + LINE; line += LINE) __builtin_prefetch(ahead + line);
    ahead += step;
    vi codes[8];
    F::unpack(codes_at, codes);
    Scales s = F::load_block(group, b, first);
    if constexpr (BYTE_DOTS && W == 16 && M == ROWS) {
      PAGEWIRE_UNROLL
      for (int m = 0; m < M; m += ABREAST)
        add_abreast<F>(codes, s, xs + m * row_bytes, row_bytes, acc + m);
      codes_at += F::BYTES;
      xs += sizeof(PreparedBlock);
      continue;
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < M; m++) {
      const PreparedBlock& block = *reinterpret_cast<const PreparedBlock*>(xs + m * row_bytes);
      if constexpr (F::HALVES == 2) {
        vf low = dot_block<F, 0, 4, TWO>(codes, block.codes, block.start_half);
        vf high = dot_block<F, 4, 8, TWO>(codes, block.codes, block.start - block.start_half);
        acc[m] += low * (s.scale[0] * block.scale);
        acc[m] += high * (s.scale[1] * block.scale);
      } else {
        vf whole = dot_block<F, 0, 8, TWO>(codes, block.codes, block.start);
        acc[m] += whole * (s.scale[0] * block.scale);
        if constexpr (F::HAS_MIN) acc[m] += s.min * block.scaled_sum;
      }
    }
    codes_at += F::BYTES;
    xs += sizeof(PreparedBlock);
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < M; m++) store(sums + m * PANEL, acc[m]);
}

template <class F, int M>
void tiles(const uint8_t* group, int64_t first, int64_t blocks, const char* x, int64_t row_bytes,
           int64_t rows, float* sums) {
  int64_t r = 0;
  for (; r + M <= rows; r += M)
    tile<F, M>(group, first, blocks, reinterpret_cast<const PreparedBlock*>(x + r * row_bytes),
               row_bytes, sums + r * PANEL);
  if constexpr (M > 1)
    if (r < rows)
      tiles<F, M / 2>(group, first, blocks, x + r * row_bytes, row_bytes, rows - r, sums + r * PANEL);
}

// sums [rows][PANEL] of columns of a group from `first` on; returns how many columns.
template <class F>
int64_t multiply_group(const uint8_t* group, int64_t first, int64_t blocks, const char* x,
                       int64_t row_bytes, int64_t rows, float* sums) {
#if defined(PAGEWIRE_TILES)
  int64_t done = tiled::multiply_rows<F>(group, blocks, x, row_bytes, rows, sums);
  tiles<F, ROWS / 2>(group, first, blocks, x + done * row_bytes, row_bytes, rows - done,
                     sums + done * PANEL);
#else
  if constexpr (PANEL == GROUP) {
    if (rows >= unpacked::FEWEST) {
      unpacked::multiply<F>(group, blocks, x, row_bytes, rows, sums);
      return PANEL;
    }
  }
  tiles<F, ROWS>(group, first, blocks, x, row_bytes, rows, sums);
#endif
  return W;
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Integers that fit into bytes as bytes, and the sums of both halves.
inline void narrow(const vi (&from)[BLOCK / W], int8_t* to, int32_t (&sums)[2]) {
  __m256i words[2];
  PAGEWIRE_UNROLL
  for (int i = 0; i < 2; i++)
    words[i] = _mm256_packs_epi32(bits_as<__m256i>(from[2 * i]), bits_as<__m256i>(from[2 * i + 1]));
  // Packing takes the low halves of its operands' vectors before the high ones.
  __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), order);
  std::memcpy(to, &bytes, sizeof bytes);
  // As unsigned bytes, 128 more each, which are summed eight at a time.
  __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), __m256i{});
  int64_t each[4];
  std::memcpy(each, &eights, sizeof eights);
  for (int half = 0; half < 2; half++)
    sums[half] = int32_t(each[2 * half] + each[2 * half + 1]) - BLOCK / 2 * 128;
}
#else
typedef int8_t vb __attribute__((vector_size(W)));

inline int32_t sum_bytes(vb bytes) {
#if defined(__AVX512F__)
  __m128i all{};
  std::memcpy(&all, &bytes, sizeof bytes);
  // As unsigned bytes, 128 more each, which are summed eight at a time.
  __m128i eights = _mm_sad_epu8(_mm_xor_si128(all, _mm_set1_epi8(-128)), __m128i{});
  return _mm_cvtsi128_si32(_mm_add_epi32(eights, _mm_srli_si128(eights, 8))) - 16 * 128;
#else
  int32_t total = 0;
  for (int i = 0; i < W; i++) total += bytes[i];
  return total;
#endif
}

// Integers that fit into bytes as bytes, and the sums of both halves.
inline void narrow(const vi (&from)[BLOCK / W], int8_t* to, int32_t (&sums)[2]) {
  sums[0] = sums[1] = 0;
  PAGEWIRE_UNROLL
  for (int i = 0; i < BLOCK / W; i++) {
    vb bytes = __builtin_convertvector(from[i], vb);
    std::memcpy(to + i * W, &bytes, sizeof bytes);
    sums[i * W / (BLOCK / 2)] += sum_bytes(bytes);
  }
}
#endif

template <class T>
PAGEWIRE_INLINE void prepare_block(const T* x, PreparedBlock& to) {
  vf values[BLOCK / W];
  vi peaks = {};
  PAGEWIRE_UNROLL
  for (int i = 0; i < BLOCK / W; i++) {
    values[i] = load(x + i * W);
    vi magnitude = bits_as<vi>(values[i]) & 0x7fffffff;  // ordered as the floats are, then inf, NaN
    peaks = peaks > magnitude ? peaks : magnitude;
  }
  float most = bits_as<float>(max_lane(peaks));
  float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0.0f;
  if (!(inverse < INF)) scale = inverse = 0.0f;  // so tiny that its inverse overflows
  if (!(most < INF)) scale = std::numeric_limits<float>::quiet_NaN();
  vi rounded[BLOCK / W];
  PAGEWIRE_UNROLL
  for (int i = 0; i < BLOCK / W; i++) {
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    rounded[i] = bits_as<vi>(values[i] * inverse + magic) - bits_as<vi>(magic);
  }
  int32_t sums[2];
  narrow(rounded, to.codes, sums);
  to.scale = scale;
  to.scaled_sum = scale * float(sums[0] + sums[1]);
  to.start_half = -LEAST_OFFSET * sums[0];
  to.start = -LEAST_OFFSET * (sums[0] + sums[1]);
}

}  // namespace

int64_t prepared_row_bytes(int64_t in) {
  // An odd number of lines: rows at a power of two from each other would evict each other.
  return round_up(in / BLOCK * int64_t(sizeof(PreparedBlock)), LINE) | LINE;
}

template <class T>
void prepare_row(int64_t in, const T* x, void* to) {
  PreparedBlock* blocks = static_cast<PreparedBlock*>(to);
  for (int64_t b = 0; b < in / BLOCK; b++) prepare_block(x + b * BLOCK, blocks[b]);
}
template void prepare_row(int64_t, const float*, void*);
template void prepare_row(int64_t, const bf16*, void*);
template void prepare_row(int64_t, const f16*, void*);

void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                    int64_t rows, float* sums) {
  const QuantizedParts& table = *static_cast<const QuantizedParts*>(w.data);
  const QuantizedPart* part = table.parts;
  const char* from = static_cast<const char*>(x);
  int64_t blocks = w.in / BLOCK, end = std::min(w.out, (panel + 1) * PANEL);
  for (int64_t row = panel * PANEL; row < end;) {
    while (part + 1 < table.parts + table.count && part[1].first_row <= row) part++;
    int64_t of_part = row - part->first_row;
    int64_t columns = with_format(part->format, [&](auto format) {
      using F = decltype(format);
      const uint8_t* group = part->packed + of_part / GROUP * F::group_bytes(blocks);
      return multiply_group<F>(group, of_part % GROUP, blocks, from, row_bytes, rows, sums);
    });
    row += columns;
    sums += columns;
  }
}

}  // namespace quant
}  // namespace pagewire
