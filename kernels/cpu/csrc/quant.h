// Weights in 4 to 8 bits, and how the CPU keeps them.
//
// Sixteen output rows make a group, so that a vector of sums holds one lane for each row. A
// group is its scales, block after block, then its codes, both beginning on a cache line. A
// block is 32 input features of the sixteen rows: eight vectors of 64 bytes, vector j holding
// features 4j to 4j+3 of row 0, then of row 1, and so on, which is what a dot product of bytes
// (vpdpbusd) wants. Codes are unsigned. In 4 bits, vectors j and j + 4 share one; a fifth bit
// lies in a plane of one vector for all eight, bits 5 and 6 in two.
//
// The formats are those of GGUF (github.com/ggml-org/ggml, ggml-common.h); a weight is
//   scale * (code - OFFSET)    Q4_0, Q5_0, Q8_0, Q6_K (a scale for every 16 features)
//   scale * code + min         Q4_1, Q5_1, Q4_K, Q5_K
// and in the K formats scale and min are bytes times a half float for every 256 features.
#pragma once

#include "weight.h"

// As kernels/cpu/quantized.py fills it: the data of a PackedWeight of format PACKED_QUANTIZED.
// Rows from first_row on, which is a multiple of 16, up to the next part's.
struct QuantizedPart {
  int64_t first_row, format;
  const uint8_t* packed;
};
struct QuantizedParts {
  int64_t count;
  QuantizedPart parts[1];
};

namespace pagewire {
namespace quant {

constexpr int64_t GROUP = 16;         // rows
constexpr int64_t BLOCK = 32;         // features
constexpr int64_t SUPER_BLOCKS = 8;   // blocks of a K format that share half floats
constexpr int64_t LINE = 64;

typedef uint16_t vw __attribute__((vector_size(4 * W)));  // W lanes of two 16-bit words

inline vi load_bytes(const uint8_t* p) {
  vi v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline vi splat_int(int32_t x) { return x - vi{}; }
inline vf load_half(const uint8_t* p) { return load(reinterpret_cast<const f16*>(p)); }
inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Bytes as floats.
template <class Byte>
inline vf widen_bytes(const uint8_t* p) {
  typedef Byte bytes __attribute__((vector_size(W)));
  bytes v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, vi), vf);
}

template <int BITS>
struct Codes {
  static constexpr int64_t BYTES = GROUP * BLOCK * BITS / 8;

  // The eight vectors of one block, W rows of each: block points at the first of these rows.
  static inline void unpack(const uint8_t* block, vi (&codes)[8]) {
    constexpr uint16_t NIBBLE = 0x0f0f;
    if constexpr (BITS == 8) {
      PAGEWIRE_UNROLL
      for (int j = 0; j < 8; j++) codes[j] = load_bytes(block + j * LINE);
      return;
    }
    PAGEWIRE_UNROLL
    for (int j = 0; j < 4; j++) {
      vw pair = bits_as<vw>(load_bytes(block + j * LINE));
      codes[j] = bits_as<vi>(pair & NIBBLE);
      codes[j + 4] = bits_as<vi>((pair >> 4) & NIBBLE);
    }
    if constexpr (BITS == 5) {
      vw high = bits_as<vw>(load_bytes(block + 4 * LINE));
      PAGEWIRE_UNROLL
      for (int j = 0; j < 8; j++) {
        vw bit = (j < 4 ? high << (4 - j) : high >> (j - 4)) & uint16_t(0x1010);
        codes[j] |= bits_as<vi>(bit);
      }
    }
    if constexpr (BITS == 6) {
      PAGEWIRE_UNROLL
      for (int j = 0; j < 8; j++) {
        vw high = bits_as<vw>(load_bytes(block + (4 + j / 4) * LINE));
        int at = 2 * (j % 4);
        vw bits = (at < 4 ? high << (4 - at) : high >> (at - 4)) & uint16_t(0x3030);
        codes[j] |= bits_as<vi>(bits);
      }
    }
  }

  // Feature i of a row of the group, [0, 32) of its block.
  static uint8_t get(const uint8_t* block, int64_t row, int64_t i) {
    int64_t j = i / 4, at = row * 4 + i % 4;
    if constexpr (BITS == 8) return block[j * LINE + at];
    uint8_t code = (block[j % 4 * LINE + at] >> (j < 4 ? 0 : 4)) & 15;
    if constexpr (BITS == 5) code |= ((block[4 * LINE + at] >> j) & 1) << 4;
    if constexpr (BITS == 6) code |= ((block[(4 + j / 4) * LINE + at] >> (2 * (j % 4))) & 3) << 4;
    return code;
  }

  // Into a block that was zeros.
  static void put(uint8_t* block, int64_t row, int64_t i, uint8_t code) {
    int64_t j = i / 4, at = row * 4 + i % 4;
    if constexpr (BITS == 8) {
      block[j * LINE + at] = code;
      return;
    }
    block[j % 4 * LINE + at] |= uint8_t((code & 15) << (j < 4 ? 0 : 4));
    if constexpr (BITS == 5) block[4 * LINE + at] |= uint8_t((code >> 4) << j);
    if constexpr (BITS == 6) block[(4 + j / 4) * LINE + at] |= uint8_t((code >> 4) << (2 * (j % 4)));
  }
};

// Scale and min of W rows in one block; a block of two halves has two scales.
struct Scales {
  vf scale[2];
  vf min;
};

// Half floats for every block: scale, then min where there is one.
template <bool HAS_MIN>
struct BlockScales {
  static constexpr int64_t BLOCK_BYTES = GROUP * 2 * (HAS_MIN ? 2 : 1);

  static int64_t bytes(int64_t blocks) { return blocks * BLOCK_BYTES; }
  static const uint8_t* scale_at(const uint8_t* scales, int64_t b) { return scales + b * BLOCK_BYTES; }

  static inline Scales load_block(const uint8_t* scales, int64_t b, int64_t row) {
    const uint8_t* at = scale_at(scales, b) + row * 2;
    Scales s{};
    s.scale[0] = load_half(at);
    if constexpr (HAS_MIN) s.min = load_half(at + GROUP * 2);
    return s;
  }
};

// Half floats for eight blocks, then for each block a byte of scale and one of min, or two
// signed bytes of scale for its halves.
template <bool HAS_MIN>
struct SuperScales {
  static constexpr int64_t HALVES_BYTES = GROUP * 2 * (HAS_MIN ? 2 : 1);
  static constexpr int64_t SUPER_BYTES = HALVES_BYTES + SUPER_BLOCKS * 2 * GROUP;

  static int64_t bytes(int64_t blocks) { return blocks / SUPER_BLOCKS * SUPER_BYTES; }

  static inline Scales load_block(const uint8_t* scales, int64_t b, int64_t row) {
    const uint8_t* super = scales + b / SUPER_BLOCKS * SUPER_BYTES;
    const uint8_t* at = super + HALVES_BYTES + b % SUPER_BLOCKS * 2 * GROUP + row;
    vf scale = load_half(super + row * 2);
    Scales s{};
    if constexpr (HAS_MIN) {
      s.scale[0] = scale * widen_bytes<uint8_t>(at);
      s.min = -(load_half(super + GROUP * 2 + row * 2) * widen_bytes<uint8_t>(at + GROUP));
    } else {
      s.scale[0] = scale * widen_bytes<int8_t>(at);
      s.scale[1] = scale * widen_bytes<int8_t>(at + GROUP);
    }
    return s;
  }
};

template <int BITS, int ZERO, class ScaleLayout, int HALVES_ = 1>
struct Layout : Codes<BITS>, ScaleLayout {
  static constexpr int CODE_BITS = BITS;
  static constexpr int OFFSET = ZERO;
  static constexpr bool HAS_MIN = ZERO == 0;
  static constexpr int HALVES = HALVES_;

  static int64_t scale_bytes(int64_t blocks) { return round_up(ScaleLayout::bytes(blocks), LINE); }
  static int64_t group_bytes(int64_t blocks) {
    return scale_bytes(blocks) + blocks * Codes<BITS>::BYTES;
  }
};

struct Q4_0 : Layout<4, 8, BlockScales<false>> {};
struct Q4_1 : Layout<4, 0, BlockScales<true>> {};
struct Q5_0 : Layout<5, 16, BlockScales<false>> {};
struct Q5_1 : Layout<5, 0, BlockScales<true>> {};
struct Q8_0 : Layout<8, 128, BlockScales<false>> {};
struct Q4_K : Layout<4, 0, SuperScales<true>> {};
struct Q5_K : Layout<5, 0, SuperScales<true>> {};
struct Q6_K : Layout<6, 32, SuperScales<false>, 2> {};

// The codes of kernels/cpu/quantized.py.
template <class F>
auto with_format(int64_t format, const F& call) {
  switch (format) {
    case 0: return call(Q4_0{});
    case 1: return call(Q4_1{});
    case 2: return call(Q5_0{});
    case 3: return call(Q5_1{});
    case 4: return call(Q8_0{});
    case 5: return call(Q4_K{});
    case 6: return call(Q5_K{});
    default: return call(Q6_K{});
  }
}

// weight.h's functions of these names, for PACKED_QUANTIZED.
int64_t prepared_row_bytes(int64_t in);
template <class T>
void prepare_row(int64_t in, const T* x, void* to);
void multiply_panel(const PackedWeight& w, int64_t panel, const void* x, int64_t row_bytes,
                    int64_t rows, float* sums);

}  // namespace quant
}  // namespace pagewire
