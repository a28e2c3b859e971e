// What the machine reaches at best, for bench/ceilings.py, which builds it with the flags of
// the library in kernels/cpu that this CPU runs.
//
//   ceilings THREADS BYTES TRIES
//
// prints bytes or operations a second of all threads together (a multiply-add is two), the best
// of TRIES tries each, and over how many bytes reading went round and round, which are nearly
// BYTES: {"num_bytes": ..., "read": ..., "float32": ..., "bfloat16": ..., "int8": ...}.
//
// Products are register tiles of ROWS rows by COLUMNS columns over FEATURES features of weights
// that stay in the first-level cache: what a matrix product's inner loop does, and nothing of
// what surrounds it. A type for which the CPU has no products is null.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int FEATURES = 128;
constexpr int COLUMNS = 2 * LANES;
constexpr int ROUNDS = 5000;  // of the tile, in a try
constexpr size_t PART = 8 << 20;  // bytes that a thread reads in a try, at most

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));

// The compiler must believe that a value is used, and that memory has changed.
template <class T>
inline void keep(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

struct alignas(64) Tile {
  uint32_t rows[ROWS][FEATURES];  // a float, two bfloat16 or four bytes each
  Words weights[FEATURES][2];
};

// step(sums, weights, a row's word): one word of every lane's products, added to its sum. Sum must
// not be __m512i or __m256i: g++ 12 keeps sums of these in memory, at half the speed.
template <class Sum, class Step>
inline void multiply(Tile& tile, const Step& step) {
  for (int round = 0; round < ROUNDS; round++) {
    keep(tile);
    Sum sums[ROWS][2] = {};
    for (int k = 0; k < FEATURES; k++) {
      Words first = tile.weights[k][0], second = tile.weights[k][1];
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) {
        step(sums[m][0], first, tile.rows[m][k]);
        step(sums[m][1], second, tile.rows[m][k]);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; m++) keep(sums[m][0]), keep(sums[m][1]);
  }
}

inline Floats splat(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value - Floats{};
}

void float32_products(Tile& tile) {
  multiply<Floats>(tile, [](Floats& sum, Words weights, uint32_t row) {
    sum += (Floats)weights * splat(row);
  });
}

#if defined(__AVX512BF16__)
constexpr int BFLOAT16_OF_WORD = 2;
void bfloat16_products(Tile& tile) {
  multiply<__m512>(tile, [](__m512& sum, Words weights, uint32_t row) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(int(row)), (__m512bh)weights);
  });
}
#else
// Weights that were widened once for many rows.
constexpr int BFLOAT16_OF_WORD = 1;
constexpr auto bfloat16_products = float32_products;
#endif

#if defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS
void byte_products(Tile& tile) {
  multiply<Words>(tile, [](Words& sum, Words weights, uint32_t row) {
    __m512i bytes = _mm512_set1_epi32(int(row));
    sum = (Words)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, bytes);
  });
}
#elif defined(__AVXVNNI__)
#define HAS_BYTE_PRODUCTS
void byte_products(Tile& tile) {
  multiply<Words>(tile, [](Words& sum, Words weights, uint32_t row) {
    __m256i bytes = _mm256_set1_epi32(int(row));
    sum = (Words)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, bytes);
  });
}
#elif defined(__AVX2__)
#define HAS_BYTE_PRODUCTS
inline Shorts dot2(Words codes, uint32_t row) {
#if defined(__AVX512BW__)
  return (Shorts)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(int(row)));
#else
  return (Shorts)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(int(row)));
#endif
}
inline Words add_pairs(Shorts words) {
#if defined(__AVX512BW__)
  return (Words)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1));
#else
  return (Words)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi16(1));
#endif
}

// Pairs of products add up in 16 bits, as those of weights in 4 bits may, eight times before they
// are widened: no sum of products of bytes costs less here. Weights in 8 bits need more.
void byte_products(Tile& tile) {
  constexpr int TOGETHER = 8;
  Words* weights = &tile.weights[0][0];
  for (int round = 0; round < ROUNDS; round++) {
    keep(tile);
    for (int column = 0; column < 2; column++) {
      Words sums[ROWS] = {};
      for (int k = 0; k < FEATURES; k += TOGETHER) {
        Words codes[TOGETHER];
#pragma GCC unroll 8
        for (int i = 0; i < TOGETHER; i++) codes[i] = weights[column * FEATURES + k + i];
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; m++) {
          Shorts words = {};
#pragma GCC unroll 8
          for (int i = 0; i < TOGETHER; i++) words += dot2(codes[i], tile.rows[m][k + i]);
          sums[m] += add_pairs(words);
        }
      }
#pragma GCC unroll 16
      for (int m = 0; m < ROWS; m++) keep(sums[m]);
    }
  }
}
#endif

// Every word is used, in eight chains so that no load waits for an addition.
void read(const Words* from, size_t count) {
  constexpr size_t CHAINS = 8;
  Words sums[CHAINS] = {};
  for (size_t i = 0; i + CHAINS <= count; i += CHAINS) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + i) + 4096);
#pragma GCC unroll 8
    for (size_t j = 0; j < CHAINS; j++) sums[j] ^= from[i + j];
  }
  for (Words& sum : sums) keep(sum);
}

// Seconds from the moment at which all threads are there until the last is done.
double seconds_of(int threads, const std::function<void(int)>& body) {
  using clock = std::chrono::steady_clock;
  std::atomic<int> there{0};
  std::vector<clock::time_point> begins(threads), ends(threads);
  std::vector<std::thread> others;
  auto run = [&](int index) {
    there++;
    while (there < threads) std::this_thread::yield();
    begins[index] = clock::now();
    body(index);
    ends[index] = clock::now();
  };
  for (int index = 1; index < threads; index++) others.emplace_back(run, index);
  run(0);
  for (std::thread& other : others) other.join();
  auto first = *std::min_element(begins.begin(), begins.end());
  auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return std::fputs("usage: ceilings THREADS BYTES TRIES\n", stderr), 2;
  int threads = std::atoi(arguments[1]), tries = std::atoi(arguments[3]);
  if (threads < 1 || tries < 1) return std::fputs("ceilings: nothing to measure\n", stderr), 2;
  size_t words = size_t(std::atoll(arguments[2])) / sizeof(Words) / size_t(threads) * size_t(threads);
  size_t bytes = words * sizeof(Words), share = words / size_t(threads);
  if (share == 0) return std::fputs("ceilings: nothing to read\n", stderr), 2;
  // A millisecond or so, in which a busy machine leaves a thread alone now and then. Parts are
  // alike and leave nothing out: fewer bytes would fit a cache that all do not.
  size_t parts = (share * sizeof(Words) + PART - 1) / PART, part = share / parts;

  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return std::perror("ceilings"), 1;
#if defined(MADV_HUGEPAGE)
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  Words* weights = static_cast<Words*>(memory);
  // Touched by the thread that reads it, for machines whose memory has a place.
  seconds_of(threads, [&](int index) {
    std::fill_n(weights + size_t(index) * share, share, Words{} + 0x3f803f80u);
  });
  std::vector<Tile> tiles(static_cast<size_t>(threads));
  // All words alike.
  auto seconds_of_products = [&](void (*products)(Tile&), uint32_t word) {
    for (Tile& tile : tiles) {
      std::fill_n(&tile.rows[0][0], ROWS * FEATURES, word);
      std::fill_n(&tile.weights[0][0], FEATURES * 2, Words{} + word);
    }
    return seconds_of(threads, [&](int index) { products(tiles[size_t(index)]); });
  };
  constexpr uint32_t ONES = 0x3f803f80u;   // two in bfloat16; about one as a float
  double most_read = 0, most_float32 = 0, most_bfloat16 = 0, most_int8 = 0;
  double multiplied = double(ROWS) * COLUMNS * FEATURES * ROUNDS * threads;  // words
  for (int i = 0; i < tries; i++) {
    // Round and round: what a part brought into a cache is gone when its turn comes again,
    // unless all of them fit.
    size_t begin = size_t(i) % parts * part;
    double seconds = seconds_of(threads, [&](int index) {
      read(weights + size_t(index) * share + begin, part);
    });
    most_read = std::max(most_read, double(part * sizeof(Words)) * threads / seconds);
    seconds = seconds_of_products(float32_products, ONES);
    most_float32 = std::max(most_float32, 2 * multiplied / seconds);
    seconds = seconds_of_products(bfloat16_products, ONES);
    most_bfloat16 = std::max(most_bfloat16, 2 * BFLOAT16_OF_WORD * multiplied / seconds);
#if defined(HAS_BYTE_PRODUCTS)
    seconds = seconds_of_products(byte_products, 0x0f0f0f0fu);  // codes of 4 bits
    most_int8 = std::max(most_int8, 2 * 4 * multiplied / seconds);
#endif
  }
  std::printf("{\"num_bytes\": %zu, ", parts * part * sizeof(Words) * size_t(threads));
  std::printf("\"read\": %.4g, \"float32\": %.4g, \"bfloat16\": %.4g, ", most_read, most_float32,
              most_bfloat16);
  if (most_int8 > 0)
    std::printf("\"int8\": %.4g}\n", most_int8);
  else
    std::printf("\"int8\": null}\n");
}
