// Causal attention over the paged KV cache, read in place through the block table.
//
// Work is cut into items of (sequence, KV head, tile of query tokens, span of keys). All the
// query heads of a KV head go together, so each key and value is read once for them. Keys pass
// in steps of up to KEYS with an online softmax (Milakov and Gimelshein, arXiv:1805.02867).
// Few query rows (decode): keys and values are read straight from the cache, and a long
// context is cut into spans at fixed positions that are merged at the end, so that a result
// depends on neither the batch nor the threads. Many rows (prefill): a step's keys and values
// are widened to float32 tiles once and multiplied by register-blocked products.

#include <algorithm>
#include <cmath>

#include "api.h"
#include "parallel.h"

struct AttentionSizes {
  int64_t tokens, sequences, heads, kv_heads, head_dim, num_blocks, block_size;
  int64_t q_token, q_head;  // strides
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head, table_row;
  int64_t table_columns;
  float scale;
};

namespace pagewire {
namespace {

constexpr int64_t KEYS = 64;         // a step
constexpr int64_t SPAN = 512;        // keys of a decode item
constexpr int64_t DIRECT_ROWS = 12;  // up to here rows read the cache directly
// Query rows (tokens x heads) of a prefill item: many, to widen a key seldom, but a short chunk
// still makes several items.
constexpr int64_t MIN_TILE_ROWS = 48, MAX_TILE_ROWS = 192, TILES = 4;

struct Item {
  int64_t sequence, kv_head, kv_heads;
  int64_t first_token, tokens;     // of the flat batch
  int64_t first_position;          // absolute position of first_token
  int64_t key_begin, key_end;
  int64_t partial;                 // first row of its partial result; -1: writes the output

  // Its query rows are ordered by KV head, token, and query head within the group.
  int64_t head_rows(int64_t group) const { return tokens * group; }
  int64_t rows(int64_t group) const { return kv_heads * head_rows(group); }
  int64_t token(int64_t row, int64_t group) const { return row % head_rows(group) / group; }
  int64_t head(int64_t row, int64_t group) const {
    return (kv_head + row / head_rows(group)) * group + row % group;
  }
};

// Softmax state of some query rows: the running maximum, the sum of exp, the weighted values.
struct Rows {
  float *q, *scores, *acc, *peak, *total;
};

int64_t padded(int64_t n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

// c[MR][2W] (+)= a[MR][depth] b[depth][2W]
template <int MR>
void product(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
             int64_t c_row, int64_t depth, bool add) {
  vf acc[MR][2] = {};
  if (add) {
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      acc[m][0] = load(c + m * c_row);
      acc[m][1] = load(c + m * c_row + W);
    }
  }
  for (int64_t i = 0; i < depth; i++) {
    vf b0 = load(b + i * b_row), b1 = load(b + i * b_row + W);
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++) {
      acc[m][0] += b0 * a[m * a_row + i];
      acc[m][1] += b1 * a[m * a_row + i];
    }
  }
  PAGEWIRE_UNROLL
  for (int m = 0; m < MR; m++) {
    store(c + m * c_row, acc[m][0]);
    store(c + m * c_row + W, acc[m][1]);
  }
}

// c[rows][width] (+)= a[rows][depth] b[depth][width], width a multiple of 2W
void multiply(const float* a, int64_t a_row, const float* b, int64_t b_row, float* c,
              int64_t c_row, int64_t rows, int64_t width, int64_t depth, bool add) {
  for (int64_t x = 0; x < width; x += 2 * W) {
    int64_t m = 0;
    for (; m + 6 <= rows; m += 6)
      product<6>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
    for (; m + 2 <= rows; m += 2)
      product<2>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
    for (; m < rows; m++)
      product<1>(a + m * a_row, a_row, b + x, b_row, c + m * c_row + x, c_row, depth, add);
  }
}

template <class T>
struct Attention {
  const AttentionSizes& n;
  const T *q, *k_cache, *v_cache;
  T* out;
  const int32_t *starts, *seq_lens, *block_table;
  int64_t group = n.heads / n.kv_heads;
  int64_t dim = padded(n.head_dim);
  std::vector<float> partials = {};  // per row: peak, total, acc[dim]

  void locate(const Item& item, int64_t key, int64_t count, const T** keys, const T** values) const {
    const int32_t* table = block_table + item.sequence * n.table_row;
    int64_t index = key / n.block_size, slot = key % n.block_size;
    for (int64_t j = 0; j < count; index++, slot = 0) {
      const T* key_block = k_cache + table[index] * n.k_block + item.kv_head * n.k_head;
      const T* value_block = v_cache + table[index] * n.v_block + item.kv_head * n.v_head;
      for (; j < count && slot < n.block_size; j++, slot++) {
        keys[j] = key_block + slot * n.k_slot;
        values[j] = value_block + slot * n.v_slot;
      }
    }
  }

  // A sequence's blocks are scattered, so the hardware does not see the next one coming.
  void fetch(const T* const* rows, int64_t count, int64_t width) const {
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(T))) __builtin_prefetch(rows[j] + d);
  }

  // scores[row][j] = q[row] . keys[j] for MR rows and U keys
  template <int MR, int U>
  void dot(const float* q_rows, const T* const* keys, float* scores) const {
    vf acc[U][MR] = {};
    int64_t d = 0;
    for (; d + W <= n.head_dim; d += W) {
      vf key[U];
      PAGEWIRE_UNROLL
      for (int j = 0; j < U; j++) key[j] = load(keys[j] + d);
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) {
        vf query = load(q_rows + m * dim + d);
        PAGEWIRE_UNROLL
        for (int j = 0; j < U; j++) acc[j][m] += key[j] * query;
      }
    }
    if (d < n.head_dim) {
      PAGEWIRE_UNROLL
      for (int j = 0; j < U; j++) {
        vf key = load_first(keys[j] + d, n.head_dim - d);
        PAGEWIRE_UNROLL
        for (int m = 0; m < MR; m++) acc[j][m] += key * load(q_rows + m * dim + d);
      }
    }
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++)
      PAGEWIRE_UNROLL
      for (int j = 0; j < U; j++) scores[m * KEYS + j] = sum(acc[j][m]);
  }

  // acc[row] += sum over j of weights[row][j] * values[j], for MR rows
  template <int MR>
  void accumulate(const float* weights, const T* const* values, int64_t count, float* acc) const {
    int64_t d = 0;
    for (; d + 2 * W <= n.head_dim; d += 2 * W) {
      vf c[MR][2];
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) {
        c[m][0] = load(acc + m * dim + d);
        c[m][1] = load(acc + m * dim + d + W);
      }
      for (int64_t j = 0; j < count; j++) {
        vf v0 = load(values[j] + d), v1 = load(values[j] + d + W);
        PAGEWIRE_UNROLL
        for (int m = 0; m < MR; m++) {
          float weight = weights[m * KEYS + j];
          c[m][0] += v0 * weight;
          c[m][1] += v1 * weight;
        }
      }
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) {
        store(acc + m * dim + d, c[m][0]);
        store(acc + m * dim + d + W, c[m][1]);
      }
    }
    for (; d < n.head_dim; d += W) {
      int64_t width = std::min<int64_t>(W, n.head_dim - d);
      vf c[MR];
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) c[m] = load(acc + m * dim + d);
      for (int64_t j = 0; j < count; j++) {
        vf v = width == W ? load(values[j] + d) : load_first(values[j] + d, width);
        PAGEWIRE_UNROLL
        for (int m = 0; m < MR; m++) c[m] += v * weights[m * KEYS + j];
      }
      PAGEWIRE_UNROLL
      for (int m = 0; m < MR; m++) store(acc + m * dim + d, c[m]);
    }
  }

  // Turns the scores of one row into weights, and rescales what the row has so far.
  void soften(const Rows& rows, int64_t row, int64_t visible, int64_t count) const {
    float* scores = rows.scores + row * KEYS;
    int64_t width = (count + W - 1) / W * W;
    for (int64_t j = visible; j < width; j++) scores[j] = -INF;
    vf best = splat(-INF);
    for (int64_t j = 0; j < width; j += W) best = max(best, load(scores + j));
    float peak = std::max(rows.peak[row], max_lane(best));
    // A row that has seen no key yet keeps weights of zero: -inf - (-inf) would be NaN.
    vf shift = splat(peak == -INF ? 0.0f : peak), total = {};
    for (int64_t j = 0; j < width; j += W) {
      vf weight = exp(load(scores + j) - shift);
      store(scores + j, weight);
      total += weight;
    }
    if (peak != rows.peak[row]) {
      float rescale = exp(splat(rows.peak[row] - peak))[0];
      rows.total[row] *= rescale;
      float* acc = rows.acc + row * dim;
      for (int64_t d = 0; d < dim; d += W) store(acc + d, load(acc + d) * rescale);
      rows.peak[row] = peak;
    }
    rows.total[row] += sum(total);
  }

  int64_t visible_keys(const Item& item, int64_t row, int64_t key, int64_t count) const {
    int64_t position = item.first_position + item.token(row, group);
    return std::clamp<int64_t>(position + 1 - key, 0, count);
  }

  template <int MR>
  void direct_step(const Item& item, const Rows& rows, int64_t row, int64_t key, int64_t count,
                   const T* const* keys, const T* const* values) const {
    constexpr int U = MR <= 2 ? 4 : MR == 3 ? 3 : 2;
    const float* q_rows = rows.q + row * dim;
    float* scores = rows.scores + row * KEYS;
    int64_t j = 0;
    for (; j + U <= count; j += U) dot<MR, U>(q_rows, keys + j, scores + j);
    for (; j < count; j++) dot<MR, 1>(q_rows, keys + j, scores + j);
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++)
      soften(rows, row + m, visible_keys(item, row + m, key, count), count);
    accumulate<MR>(scores, values, count, rows.acc + row * dim);
  }

  void direct(const Item& item, const Rows& rows) const {
    const T *keys[KEYS], *values[KEYS];
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS) {
      int64_t count = std::min(KEYS, item.key_end - key);
      locate(item, key, count, keys, values);
      fetch(keys, count, item.kv_heads * n.k_head);
      fetch(values, count, item.kv_heads * n.v_head);
      int64_t row = 0;
      for (int64_t h = 1; h <= item.kv_heads; h++) {
        int64_t end = h * item.head_rows(group);
        for (; row + 4 < end; row += 3) direct_step<3>(item, rows, row, key, count, keys, values);
        switch (end - row) {
          case 4: direct_step<4>(item, rows, row, key, count, keys, values); break;
          case 3: direct_step<3>(item, rows, row, key, count, keys, values); break;
          case 2: direct_step<2>(item, rows, row, key, count, keys, values); break;
          case 1: direct_step<1>(item, rows, row, key, count, keys, values); break;
        }
        row = end;
        for (int64_t j = 0; j < count; j++) {
          keys[j] += n.k_head;
          values[j] += n.v_head;
        }
      }
    }
  }

  // A head's row in float32, with zeros up to dim.
  void widen(const T* from, float* to) const {
    for (int64_t d = 0; d < dim; d += W) {
      int64_t left = n.head_dim - d;
      store(to + d, left >= W ? load(from + d) : left > 0 ? load_first(from + d, left) : vf{});
    }
  }

  void tiled(const Item& item, const Rows& rows) const {
    int64_t num_rows = item.rows(group);
    struct KeyTile;
    struct ValueTile;
    struct KeyRows;
    float* key_tile = scratch<KeyTile, float>(size_t(dim * KEYS));      // [D padded, KEYS]
    float* value_tile = scratch<ValueTile, float>(size_t(KEYS * dim));  // [KEYS, D padded]
    float* key_rows = scratch<KeyRows, float>(size_t(4 * dim));
    const T *keys[KEYS], *values[KEYS];
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS) {
      int64_t count = std::min(KEYS, item.key_end - key);
      locate(item, key, count, keys, values);
      for (int64_t j = 0; j < count; j++) widen(values[j], value_tile + j * dim);
      // Past count the tile holds old or zero keys, whose scores are never looked at.
      for (int64_t j = 0; j < count; j += 4) {
        for (int64_t i = 0; i < std::min<int64_t>(4, count - j); i++)
          widen(keys[j + i], key_rows + i * dim);
        for (int64_t d = 0; d < dim; d += 4)
          transpose4(key_rows + d, dim, key_tile + d * KEYS + j, KEYS);
      }
      multiply(rows.q, dim, key_tile, KEYS, rows.scores, KEYS, num_rows, padded(count), n.head_dim,
               false);
      for (int64_t row = 0; row < num_rows; row++)
        soften(rows, row, visible_keys(item, row, key, count), count);
      multiply(rows.scores, KEYS, value_tile, dim, rows.acc, dim, num_rows, dim, count, true);
    }
  }

  bool is_direct(int64_t tokens) const { return tokens == 1 || tokens * group <= DIRECT_ROWS; }

  void run(const Item& item) {
    struct RowMemory;
    int64_t num_rows = item.rows(group), floats = 2 * dim + KEYS + 2;
    float* memory = scratch<RowMemory, float>(size_t(num_rows * floats));
    Rows rows;
    rows.q = memory;
    rows.acc = rows.q + num_rows * dim;
    rows.scores = rows.acc + num_rows * dim;
    rows.peak = rows.scores + num_rows * KEYS;
    rows.total = rows.peak + num_rows;
    std::fill(rows.q, rows.scores, 0.0f);
    std::fill_n(rows.peak, num_rows, -INF);
    std::fill_n(rows.total, num_rows, 0.0f);
    for (int64_t row = 0; row < num_rows; row++) {
      const T* from = q + (item.first_token + item.token(row, group)) * n.q_token +
                      item.head(row, group) * n.q_head;
      for (int64_t d = 0; d < n.head_dim; d++) rows.q[row * dim + d] = to_float(from[d]) * n.scale;
    }
    if (is_direct(item.tokens))
      direct(item, rows);
    else
      tiled(item, rows);
    for (int64_t row = 0; row < num_rows; row++) {
      if (item.partial < 0) {
        write(item, row, rows.acc + row * dim, rows.total[row]);
        continue;
      }
      float* partial = partials.data() + (item.partial + row) * (dim + 2);
      partial[0] = rows.peak[row];
      partial[1] = rows.total[row];
      std::copy_n(rows.acc + row * dim, dim, partial + 2);
    }
  }

  void write(const Item& item, int64_t row, const float* acc, float total) const {
    int64_t token = item.first_token + item.token(row, group);
    T* to = out + (token * n.heads + item.head(row, group)) * n.head_dim;
    float inverse = 1.0f / total;
    for (int64_t d = 0; d < n.head_dim; d++) from_float(acc[d] * inverse, to + d);
  }

  // first and the spans - 1 items after it are the spans of one token, in key order.
  void merge(const Item* first, int64_t spans) const {
    struct MergeMemory;
    float* acc = scratch<MergeMemory, float>(size_t(dim));
    int64_t num_rows = first->rows(group), span_floats = num_rows * (dim + 2);
    for (int64_t row = 0; row < num_rows; row++) {
      const float* partial = partials.data() + (first->partial + row) * (dim + 2);
      float peak = -INF, total = 0;
      for (int64_t s = 0; s < spans; s++) peak = std::max(peak, partial[s * span_floats]);
      std::fill_n(acc, dim, 0.0f);
      for (int64_t s = 0; s < spans; s++) {
        const float* span = partial + s * span_floats;
        float weight = exp(splat(span[0] - peak))[0];
        total += span[1] * weight;
        for (int64_t d = 0; d < dim; d += W)
          store(acc + d, load(acc + d) + load(span + 2 + d) * weight);
      }
      write(*first, row, acc, total);
    }
  }

  void clear(int64_t first_token, int64_t end_token) const {
    int64_t width = n.heads * n.head_dim;
    if (end_token > first_token)
      std::memset(static_cast<void*>(out + first_token * width), 0,
                  size_t((end_token - first_token) * width) * sizeof(T));
  }

  void run_all(int threads) {
    std::vector<Item> items;
    std::vector<std::pair<int64_t, int64_t>> merges;  // first item, spans
    int64_t partial_rows = 0, work = 0;
    // A token's heads lie side by side: with work enough for all threads, a direct item takes
    // them together and reads memory in one run.
    int64_t together = n.sequences >= 4 * threads ? n.kv_heads : 1;
    // Prefill sequences, which come last, hold the longest items: hand those out first.
    for (int64_t r = n.sequences - 1; r >= 0; r--) {
      int64_t query_len = starts[r + 1] - starts[r], seq_len = seq_lens[r];
      if (seq_len == 0) clear(starts[r], starts[r + 1]);
      if (seq_len == 0 || query_len == 0) continue;
      work += query_len * seq_len * n.heads * n.head_dim;
      int64_t tile_rows = std::clamp(query_len * group / TILES, MIN_TILE_ROWS, MAX_TILE_ROWS);
      int64_t tile_tokens = std::max<int64_t>(1, tile_rows / group);
      for (int64_t end = query_len; end > 0; end -= tile_tokens) {
        int64_t begin = std::max<int64_t>(0, end - tile_tokens);
        int64_t kv_heads = is_direct(end - begin) ? together : 1;
        Item item{r, 0, kv_heads, starts[r] + begin, end - begin, seq_len - query_len + begin, 0,
                  seq_len - query_len + end, -1};
        int64_t spans = query_len == 1 ? (seq_len + SPAN - 1) / SPAN : 1;
        for (item.kv_head = 0; item.kv_head < n.kv_heads; item.kv_head += kv_heads) {
          if (spans == 1) {
            items.push_back(item);
            continue;
          }
          merges.emplace_back(int64_t(items.size()), spans);
          for (int64_t s = 0; s < spans; s++) {
            Item span = item;
            span.key_begin = s * SPAN;
            span.key_end = std::min(seq_len, (s + 1) * SPAN);
            span.partial = partial_rows;
            partial_rows += span.rows(group);
            items.push_back(span);
          }
        }
      }
    }
    clear(0, n.sequences ? starts[0] : n.tokens);
    if (n.sequences) clear(starts[n.sequences], n.tokens);
    partials.resize(size_t(partial_rows * (dim + 2)));
    if (work < 32768) threads = 1;  // less than it takes to wake them
    parallel_for(int64_t(items.size()), threads, [&](int64_t i) { run(items[size_t(i)]); });
    parallel_for(int64_t(merges.size()), threads, [&](int64_t i) {
      merge(&items[size_t(merges[size_t(i)].first)], merges[size_t(i)].second);
    });
  }
};

}  // namespace
}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_API int64_t pagewire_attention(int dtype, const void* q, const void* k_cache,
                                        const void* v_cache, void* out, const int32_t* starts,
                                        const int32_t* seq_lens, const int32_t* block_table,
                                        const AttentionSizes* sizes, int threads) {
  const AttentionSizes& n = *sizes;
  for (int64_t r = 0; r < n.sequences; r++) {
    bool sound = starts[r] >= 0 && starts[r] <= starts[r + 1] && starts[r + 1] <= n.tokens &&
                 seq_lens[r] >= 0;
    int64_t blocks = sound ? (seq_lens[r] + n.block_size - 1) / n.block_size : 0;
    sound = sound && blocks <= n.table_columns &&
            (seq_lens[r] == 0 || starts[r + 1] - starts[r] <= seq_lens[r]);
    for (int64_t b = 0; sound && b < blocks; b++) {
      int32_t block = block_table[r * n.table_row + b];
      sound = block >= 0 && block < n.num_blocks;
    }
    if (!sound) return r;
  }
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    Attention<T> op{n, static_cast<const T*>(q), static_cast<const T*>(k_cache),
                    static_cast<const T*>(v_cache), static_cast<T*>(out), starts, seq_lens,
                    block_table};
    op.run_all(threads);
  });
  return -1;
}
