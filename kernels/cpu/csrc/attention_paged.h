// Causal attention over the paged KV cache, read in place through the block table.
//
// Keys pass in steps of up to KEYS with an online softmax. Few query rows (decode): keys and values
// are read straight from the cache. Many rows (prefill): a step's keys and values are widened to
// float32 tiles once and multiplied by register-blocked products. In bfloat16, where the CPU
// multiplies it, both ways use its dot products, and weights are rounded to it. Keys before the
// window of an item's first token are not read. Codes of 8-bit caches are turned into floats on
// the way; their scales multiply the scores of keys, and the weights of values.

#pragma once

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "attention_direct.h"
#include "attention_tiles.h"

namespace pagewire {

using Item = AttentionItem;

namespace {

#if defined(__AVX512BF16__)
template <class T>
constexpr bool DOTS = std::is_same_v<T, bf16>;
#else
template <class T>
constexpr bool DOTS = false;
#endif

int64_t padded(int64_t n) { return (n + 2 * W - 1) / (2 * W) * (2 * W); }

template <class T, class C>
struct Attention {
  static constexpr bool HAS_SCALES = !std::is_same_v<C, T>;
  const AttentionSizes& n;
  const T* q;
  const C *k_cache, *v_cache;
  const CacheCodes& codes;
  T* out;
  const int32_t *starts, *seq_lens, *block_table;
  int64_t group = n.heads / n.kv_heads;
  int64_t dim = padded(n.head_dim);
  float* partials = nullptr;  // per row: peak, total, acc[dim]

  void locate(const Item& item, int64_t key, int64_t count, const C** keys, const C** values) const {
    const int32_t* table = block_table + item.sequence * n.table_row;
    int64_t index = key / n.block_size, slot = key % n.block_size;
    for (int64_t j = 0; j < count; index++, slot = 0) {
      const C* key_block = k_cache + table[index] * n.k_block + item.kv_head * n.k_head;
      const C* value_block = v_cache + table[index] * n.v_block + item.kv_head * n.v_head;
      for (; j < count && slot < n.block_size; j++, slot++) {
        keys[j] = key_block + slot * n.k_slot;
        values[j] = value_block + slot * n.v_slot;
      }
    }
  }

  // The scales of a step's keys and values, and zeros after them; null where there are none.
  const StepScales* find_scales(const Item& item, int64_t kv_head, int64_t key, int64_t count,
                                StepScales& to) const {
    if constexpr (!HAS_SCALES) return nullptr;
    if constexpr (std::is_same_v<C, e4m3>) {
      std::fill_n(to.keys, KEYS, codes.k_scale[kv_head]);
      std::fill_n(to.values, KEYS, codes.v_scale[kv_head]);
    } else {
      const int32_t* table = block_table + item.sequence * n.table_row;
      int64_t index = key / n.block_size, slot = key % n.block_size;
      for (int64_t j = 0; j < count; index++, slot = 0) {
        int64_t taken = std::min(count - j, n.block_size - slot);
        const float* k = codes.k_scale + table[index] * codes.k_block + kv_head * codes.k_head;
        const float* v = codes.v_scale + table[index] * codes.v_block + kv_head * codes.v_head;
        std::copy_n(k + slot, taken, to.keys + j);
        std::copy_n(v + slot, taken, to.values + j);
        j += taken;
      }
      std::fill(to.keys + count, to.keys + KEYS, 0.0f);
      std::fill(to.values + count, to.values + KEYS, 0.0f);
    }
    return &to;
  }

  // A sequence's blocks are scattered, so the hardware does not see the next one coming.
  void fetch(const C* const* rows, int64_t count, int64_t width) const {
    for (int64_t j = 0; j < count; j++)
      for (int64_t d = 0; d < width; d += 64 / int64_t(sizeof(C))) __builtin_prefetch(rows[j] + d);
  }

  Visible visible_keys(const Item& item, int64_t row, int64_t key, int64_t count) const {
    int64_t end = item.first_position + item.token(row, group) + 1;
    int64_t begin = n.window > 0 ? end - n.window : 0;
    return {std::clamp<int64_t>(begin - key, 0, count), std::clamp<int64_t>(end - key, 0, count)};
  }

  template <int MR>
  void direct_step(const Item& item, const Rows& rows, int64_t row, int64_t key, int64_t count,
                   const C* const* keys, const C* const* values, const StepScales* scales) const {
    constexpr int U = MR <= 2 ? 4 : MR == 3 ? 3 : 2;
    const float* q_rows = rows.q + row * dim;
    float* scores = rows.scores + row * KEYS;
    int64_t j = 0;
    for (; j + U <= count; j += U)
      few_rows::dot<MR, U>(q_rows, dim, keys + j, n.head_dim, scores + j);
    for (; j < count; j++) few_rows::dot<MR, 1>(q_rows, dim, keys + j, n.head_dim, scores + j);
    PAGEWIRE_UNROLL
    for (int m = 0; m < MR; m++)
      rows.soften(row + m, visible_keys(item, row + m, key, count), count, scales);
    few_rows::accumulate<MR>(scores, values, count, n.head_dim, rows.acc + row * dim, dim);
  }

  void direct(const Item& item, const Rows& rows) const {
    const C *keys[KEYS], *values[KEYS];
    StepScales memory;
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS) {
      int64_t count = std::min(KEYS, item.key_end - key);
      locate(item, key, count, keys, values);
      fetch(keys, count, item.kv_heads * n.k_head);
      fetch(values, count, item.kv_heads * n.v_head);
      int64_t row = 0;
      for (int64_t h = 1; h <= item.kv_heads; h++) {
        int64_t end = h * item.head_rows(group);
        const StepScales* scales = find_scales(item, item.kv_head + h - 1, key, count, memory);
        for (; row + 4 < end; row += 3)
          direct_step<3>(item, rows, row, key, count, keys, values, scales);
        switch (end - row) {
          case 4: direct_step<4>(item, rows, row, key, count, keys, values, scales); break;
          case 3: direct_step<3>(item, rows, row, key, count, keys, values, scales); break;
          case 2: direct_step<2>(item, rows, row, key, count, keys, values, scales); break;
          case 1: direct_step<1>(item, rows, row, key, count, keys, values, scales); break;
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
  void widen(const C* from, float* to) const {
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
    const C *keys[KEYS], *values[KEYS];
    StepScales memory;
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
      const StepScales* scales = find_scales(item, item.kv_head, key, count, memory);
      for (int64_t row = 0; row < num_rows; row++)
        rows.soften(row, visible_keys(item, row, key, count), count, scales);
      multiply(rows.scores, KEYS, value_tile, dim, rows.acc, dim, num_rows, dim, count, true);
    }
  }

#if defined(__AVX512BF16__)
  // next: the item that the thread runs after this one, or null.
  void direct_dots(const Item& item, const Item* next, const Rows& rows) const {
    const C *keys[2][KEYS], *values[2][KEYS];
    StepScales memory;
    int64_t now = 0;
    locate_step(item, item.key_begin, keys[now], values[now]);
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS, now ^= 1) {
      int64_t count = std::min(KEYS, item.key_end - key), coming = 0;
      const C **next_keys = keys[now ^ 1], **next_values = values[now ^ 1];
      // A sequence's blocks are scattered, so the hardware does not see the next one coming.
      if (key + KEYS < item.key_end)
        coming = locate_step(item, key + KEYS, next_keys, next_values);
      else if (next != nullptr)
        coming = locate_step(*next, next->key_begin, next_keys, next_values);
      dots::Fetcher<C> fetch_keys(next_keys, coming, item.kv_heads * n.k_head);
      dots::Fetcher<C> fetch_values(next_values, coming, item.kv_heads * n.v_head);
      for (int64_t h = 0; h < item.kv_heads; h++) {
        int64_t end = (h + 1) * item.head_rows(group);
        const StepScales* scales = find_scales(item, item.kv_head + h, key, count, memory);
        for (int64_t row = h * item.head_rows(group); row < end;) {
          int64_t pieces = (end - row + dots::MOST_ROWS - 1) / dots::MOST_ROWS;
          int64_t height = (end - row + pieces - 1) / pieces;
          dots::with_rows<dots::MOST_ROWS>(height, [&](auto rows_at_once) {
            constexpr int M = decltype(rows_at_once)::value;
            for (int64_t j = 0; j < count; j += W)
              dots::multiply_keys<M>(rows.short_q + row * dim, dim, keys[now] + j, fetch_keys,
                                     n.head_dim, rows.scores + row * KEYS + j);
            for (int m = 0; m < M; m++)
              rows.soften_short(row + m, visible_keys(item, row + m, key, count), count, scales);
            dots::add_values<M>(rows.weights + row * KEYS, values[now], fetch_values, count,
                                n.head_dim, rows.acc + row * dim, dim);
          });
          row += height;
        }
        for (int64_t j = 0; j < KEYS; j++) {
          keys[now][j] += n.k_head;
          values[now][j] += n.v_head;
        }
      }
    }
  }

  // All KEYS pointers: those past the item's end repeat its last key, whose scores are not used.
  // Returns how many there are up to its end.
  int64_t locate_step(const Item& item, int64_t key, const C** keys, const C** values) const {
    int64_t count = std::min(KEYS, item.key_end - key);
    locate(item, key, count, keys, values);
    std::fill(keys + count, keys + KEYS, keys[count - 1]);
    std::fill(values + count, values + KEYS, values[count - 1]);
    return count;
  }

  // visible(row, key, count): what a row sees of a step; later rows see no less.
  template <class See>
  void tiled_dots(const Item& item, const Rows& rows, int64_t num_rows, const See& visible) const {
    constexpr int HEIGHT = 12;
    struct KeyTile;
    struct ValueTile;
    bf16* key_tile = scratch<KeyTile, bf16>(size_t(dim * KEYS));
    bf16* value_tile = scratch<ValueTile, bf16>(size_t(dim * KEYS));
    const C *keys[KEYS], *values[KEYS];
    StepScales memory;
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS) {
      int64_t count = std::min(KEYS, item.key_end - key);
      locate_step(item, key, keys, values);
      dots::pack_keys(keys, count, n.head_dim, dim, key_tile);
      dots::pack_values(values, count, n.head_dim, value_tile);
      const StepScales* scales = find_scales(item, item.kv_head, key, count, memory);
      for (int64_t row = 0; row < num_rows; row += HEIGHT) {
        int64_t height = std::min<int64_t>(HEIGHT, num_rows - row);
        int64_t seen = visible(row + height - 1, key, count).end;
        if (seen == 0) continue;
        dots::with_rows<HEIGHT>(height, [&](auto rows_at_once) {
          constexpr int M = decltype(rows_at_once)::value;
          for (int64_t panel = 0; panel * 32 < seen; panel++)
            dots::multiply_tile<M>(rows.short_q + row * dim, dim, key_tile + panel * dim * 32,
                                   (n.head_dim + 1) / 2, rows.scores + row * KEYS + panel * 32,
                                   KEYS, false);
          for (int m = 0; m < M; m++)
            rows.soften_short(row + m, visible(row + m, key, count), seen, scales);
          for (int64_t d = 0; d < dim; d += 32)
            dots::multiply_tile<M>(rows.weights + row * KEYS, KEYS, value_tile + d * KEYS,
                                   (seen + 1) / 2, rows.acc + row * dim + d, dim, true);
        });
      }
    }
  }

  void run_joint(const JointItem& joint) const {
    int64_t num_rows = int64_t(joint.members.size()) * group;
    Rows rows = fresh_rows(num_rows);
    for (int64_t row = 0; row < num_rows; row++)
      load_query(rows, row, joint.members[size_t(row / group)].token,
                 joint.kv_head * group + row % group);
    Item item{joint.sequence, joint.kv_head, 1, 0, 1, 0, joint.key_begin, joint.key_end, -1};
    tiled_dots(item, rows, num_rows,
               [](int64_t, int64_t, int64_t count) { return Visible{0, count}; });
    for (int64_t row = 0; row < num_rows; row++)
      leave(rows, row, joint.members[size_t(row / group)].row + row % group);
  }
#endif

  // Rows that have seen nothing, without queries.
  Rows fresh_rows(int64_t num_rows) const {
    struct RowMemory;
    struct ShortMemory;
    int64_t floats = 2 * dim + KEYS + 2;
    float* memory = scratch<RowMemory, float>(size_t(num_rows * floats));
    Rows rows;
    rows.dim = dim;
    rows.soft_cap = n.soft_cap;
    rows.scale = n.scale;
    rows.q = memory;
    rows.acc = rows.q + num_rows * dim;
    rows.scores = rows.acc + num_rows * dim;
    rows.peak = rows.scores + num_rows * KEYS;
    rows.total = rows.peak + num_rows;
    std::fill(rows.acc, rows.scores, 0.0f);
    std::fill_n(rows.peak, num_rows, -INF);
    std::fill_n(rows.total, num_rows, 0.0f);
    rows.short_q = rows.weights = nullptr;
    if constexpr (DOTS<T>) {
      rows.short_q = scratch<ShortMemory, bf16>(size_t(num_rows * (dim + KEYS)));
      rows.weights = rows.short_q + num_rows * dim;
    }
    return rows;
  }

  void load_query(const Rows& rows, int64_t row, int64_t token, int64_t head) const {
    const T* from = q + token * n.q_token + head * n.q_head;
    if constexpr (DOTS<T>) {
      std::copy_n(from, n.head_dim, rows.short_q + row * dim);
      std::fill(rows.short_q + row * dim + n.head_dim, rows.short_q + (row + 1) * dim, bf16{});
    } else {
      float* to = rows.q + row * dim;
      for (int64_t d = 0; d < n.head_dim; d++) to[d] = to_float(from[d]) * n.scale;
      std::fill(to + n.head_dim, to + dim, 0.0f);
    }
  }

  // What a row has so far, into a row of partials, and back.
  void leave(const Rows& rows, int64_t row, int64_t at) const {
    float* partial = partials + at * (dim + 2);
    partial[0] = rows.peak[row];
    partial[1] = rows.total[row];
    std::copy_n(rows.acc + row * dim, dim, partial + 2);
  }
  void resume(const Rows& rows, int64_t row, int64_t at) const {
    const float* partial = partials + at * (dim + 2);
    rows.peak[row] = partial[0];
    rows.total[row] = partial[1];
    std::copy_n(partial + 2, dim, rows.acc + row * dim);
  }

  // next: the item that the thread runs after this one, or null.
  void run(const Item& item, const Item* next) {
    int64_t num_rows = item.rows(group);
    Rows rows = fresh_rows(num_rows);
    for (int64_t row = 0; row < num_rows; row++) {
      load_query(rows, row, item.first_token + item.token(row, group), item.head(row, group));
      if (item.begun >= 0) resume(rows, row, item.begun + row);
    }
#if defined(__AVX512BF16__)
    if constexpr (DOTS<T>) {
      if (is_direct(item.tokens, group))
        direct_dots(item, next, rows);
      else
        // Rows are in the order of their positions.
        tiled_dots(item, rows, num_rows, [&](int64_t row, int64_t key, int64_t count) {
          return visible_keys(item, row, key, count);
        });
    } else
#endif
    if (is_direct(item.tokens, group))
      direct(item, rows);
    else
      tiled(item, rows);
    for (int64_t row = 0; row < num_rows; row++) {
      if (item.partial < 0)
        write(item, row, rows.acc + row * dim, rows.total[row]);
      else
        leave(rows, row, item.partial + row);
    }
  }

  void write(const Item& item, int64_t row, const float* acc, float total) const {
    int64_t token = item.first_token + item.token(row, group);
    T* to = out + (token * n.heads + item.head(row, group)) * n.head_dim;
    float inverse = 1.0f / total;
    int64_t d = 0;
    for (; d + W <= n.head_dim; d += W) store(to + d, load(acc + d) * inverse);
    for (; d < n.head_dim; d++) from_float(acc[d] * inverse, to + d);
  }

  // first is the first of the spans of one token, whose partial results lie in key order.
  void merge(const Item& first, int64_t spans) const {
    struct MergeMemory;
    float* acc = scratch<MergeMemory, float>(size_t(dim));
    int64_t num_rows = first.rows(group), span_floats = num_rows * (dim + 2);
    for (int64_t row = 0; row < num_rows; row++) {
      const float* partial = partials + (first.partial + row) * (dim + 2);
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
      write(first, row, acc, total);
    }
  }

  void clear(int64_t first_token, int64_t end_token) const {
    int64_t width = n.heads * n.head_dim;
    if (end_token > first_token)
      std::memset(static_cast<void*>(out + first_token * width), 0,
                  size_t((end_token - first_token) * width) * sizeof(T));
  }

  void run_all(const AttentionPlan& plan, int threads) {
    for (int64_t r = 0; r < n.sequences; r++)
      if (seq_lens[r] == 0) clear(starts[r], starts[r + 1]);
    clear(0, n.sequences ? starts[0] : n.tokens);
    if (n.sequences) clear(starts[n.sequences], n.tokens);
    struct Partials;
    partials = scratch<Partials, float>(size_t(plan.partial_rows * (dim + 2)));
    if (plan.work < 32768) threads = 1;  // less than it takes to hand it out
#if defined(__AVX512BF16__)
    if constexpr (DOTS<T>)
      parallel_for(int64_t(plan.joints.size()), threads,
                   [&](int64_t i) { run_joint(plan.joints[size_t(i)]); });
#endif
    const Item* items = plan.items.data();
    parallel_ranges(int64_t(plan.items.size()), threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) run(items[i], i + 1 < end ? items + i + 1 : nullptr);
    });
    parallel_for(int64_t(plan.merges.size()), threads, [&](int64_t i) {
      merge(plan.merges[size_t(i)].first, plan.merges[size_t(i)].spans);
    });
  }
};

}  // namespace

template <class T, class C>
void attention(const AttentionSizes& n, const AttentionPlan& plan, const T* q, const C* k_cache,
               const C* v_cache, const CacheCodes& codes, T* out, const int32_t* starts,
               const int32_t* seq_lens, const int32_t* block_table, int threads) {
  Attention<T, C> op{n, q, k_cache, v_cache, codes, out, starts, seq_lens, block_table};
  op.run_all(plan, threads);
}

#define PAGEWIRE_INSTANTIATE(T, C)                                                              \
  template void attention<T, C>(const AttentionSizes&, const AttentionPlan&, const T*,          \
                                const C*, const C*, const CacheCodes&, T*, const int32_t*,      \
                                const int32_t*, const int32_t*, int);

}  // namespace pagewire
