// Causal attention over the paged KV cache, read in place through the block table.
//
// Keys pass in steps of up to KEYS with an online softmax. In bfloat16, where the CPU multiplies
// it, its dot products are used, from packed tiles, but few query rows take values straight from
// the cache; weights are rounded to it (attention_dots.h). All else is float32
// (attention_tiles.h). Keys before the window of an item's first token are not read. Codes of
// 8-bit caches are turned into floats on the way; their scales multiply the scores of keys, and
// the weights of values.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "attention.h"
#include "attention_rows.h"

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

  // The scales of keys and values [first, count) of the step at `key`, and zeros around them; null
  // where there are none.
  const StepScales* find_scales(const Item& item, int64_t kv_head, int64_t key, int64_t first,
                                int64_t count, StepScales& to) const {
    if constexpr (!IS_CODE<C>) return nullptr;
    if constexpr (std::is_same_v<C, e4m3>) {
      std::fill_n(to.keys, KEYS, codes.k_scale[kv_head]);
      std::fill_n(to.values, KEYS, codes.v_scale[kv_head]);
    } else {
      const int32_t* table = block_table + item.sequence * n.table_row;
      int64_t index = (key + first) / n.block_size, slot = (key + first) % n.block_size;
      for (int64_t j = first; j < count; index++, slot = 0) {
        int64_t taken = std::min(count - j, n.block_size - slot);
        const float* k = codes.k_scale + table[index] * codes.k_block + kv_head * codes.k_head;
        const float* v = codes.v_scale + table[index] * codes.v_block + kv_head * codes.v_head;
        std::copy_n(k + slot, taken, to.keys + j);
        std::copy_n(v + slot, taken, to.values + j);
        j += taken;
      }
      std::fill(to.keys, to.keys + first, 0.0f);
      std::fill(to.values, to.values + first, 0.0f);
      std::fill(to.keys + count, to.keys + KEYS, 0.0f);
      std::fill(to.values + count, to.values + KEYS, 0.0f);
    }
    return &to;
  }

  Visible visible_keys(int64_t position, int64_t key, int64_t count) const {
    int64_t end = position + 1;
    int64_t begin = n.window > 0 ? end - n.window : 0;
    return {std::clamp<int64_t>(begin - key, 0, count), std::clamp<int64_t>(end - key, 0, count)};
  }

  // Pointers to keys and values [first, count) of the step at `key`, which begin where the item's
  // do. The others of KEYS repeat the nearest one, and their scores are not looked at.
  struct Step {
    const C *keys[KEYS], *values[KEYS];
    int64_t first = 0, count = 0;
  };

  void locate_step(const Item& item, int64_t key, Step& step) const {
    step.first = std::max(item.key_begin - key, int64_t(0));
    step.count = std::min(KEYS, item.key_end - key);
    locate(item, key + step.first, step.count - step.first, step.keys + step.first,
           step.values + step.first);
    for (const C** of : {step.keys, step.values}) {
      std::fill(of, of + step.first, of[step.first]);
      std::fill(of + step.count, of + KEYS, of[step.count - 1]);
    }
  }

  // The step after the one at `key`, of this item or of the next one, which begins at next_key.
  void locate_next(const Item& item, int64_t key, const Item* next, int64_t next_key,
                   Step& coming) const {
    coming.first = coming.count = 0;
    // A sequence's blocks are scattered, so the hardware does not see them coming.
    if (key + KEYS < item.key_end)
      locate_step(item, key + KEYS, coming);
    else if (next != nullptr)
      locate_step(*next, next_key, coming);
  }

  static int64_t first_step(const Item& item) { return item.key_begin / KEYS * KEYS; }

  // In float32, in steps at multiples of KEYS, so that a key's lane and the order of sums do not
  // depend on where a window begins. next: the item that the thread runs after this one, or null;
  // visible(row, key, count): what a row sees of a step, later rows no less and from no earlier
  // on; end_span(): called between spans.
  template <class See, class EndSpan>
  void run_steps(const Item& item, const Item* next, const Rows& rows, int64_t head_rows,
                 const See& visible, const EndSpan& end_span) const {
    struct KeyTile;
    struct ValueTile;
    float* key_tile = scratch<KeyTile, float>(size_t(dim * KEYS));
    float* value_tile = scratch<ValueTile, float>(size_t(dim * KEYS));
    Step steps[2];
    StepScales memory;
    int64_t now = 0;
    locate_step(item, first_step(item), steps[now]);
    for (int64_t key = first_step(item); key < item.key_end; key += KEYS, now ^= 1) {
      Step &step = steps[now], &coming = steps[now ^ 1];
      locate_next(item, key, next, next == nullptr ? 0 : first_step(*next), coming);
      int64_t num_coming = coming.count - coming.first;
      Fetcher<C> fetch_keys(coming.keys + coming.first, num_coming, item.kv_heads * n.k_head);
      Fetcher<C> fetch_values(coming.values + coming.first, num_coming, item.kv_heads * n.v_head);
      for (int64_t h = 0; h < item.kv_heads; h++) {
        const StepScales* scales =
            find_scales(item, item.kv_head + h, key, step.first, step.count, memory);
        int64_t packed = std::min(KEYS, (step.count + 4 * W - 1) / (4 * W) * (4 * W));
        tiles::pack_keys(step.keys, packed, n.head_dim, dim, fetch_keys, key_tile);
        bool is_wide = head_rows > tiles::HEIGHT;
        if (is_wide)
          tiles::widen(step.values, step.first, step.count, n.head_dim, dim, fetch_values,
                       value_tile);
        for (int64_t row = h * head_rows, end = row + head_rows; row < end;) {
          int64_t blocks = (end - row + tiles::HEIGHT - 1) / tiles::HEIGHT;
          int64_t height = (end - row + blocks - 1) / blocks;
          with_rows<tiles::HEIGHT>(height, [&](auto rows_at_once) {
            constexpr int M = decltype(rows_at_once)::value;
            int64_t begin = visible(row, key, step.count).begin;
            int64_t seen = visible(row + M - 1, key, step.count).end;
            if (begin >= seen) return;
            tiles::multiply_keys<M>(rows.q + row * dim, dim, key_tile, seen, n.head_dim,
                                    rows.scores + row * KEYS);
            Visible of_rows[M];
            for (int m = 0; m < M; m++) of_rows[m] = visible(row + m, key, step.count);
            rows.soften(row, M, of_rows, seen, scales);
            const float* weights = rows.scores + row * KEYS;
            float* acc = rows.acc + row * dim;
            if (is_wide)
              tiles::add_tile<M>(weights, value_tile, begin, seen, n.head_dim, acc, dim);
            else
              tiles::add_values<M>(weights, step.values, fetch_values, begin, seen, n.head_dim,
                                   acc, dim);
          });
          row += height;
        }
        for (int64_t j = 0; j < KEYS; j++) {
          step.keys[j] += n.k_head;
          step.values[j] += n.v_head;
        }
      }
      if ((key + KEYS) % SPAN == 0 && key + KEYS < item.key_end) end_span();
    }
  }

#if defined(__AVX512BF16__)
  // next: the item that the thread runs after this one, or null. A step takes the keys of all its
  // KV heads and then the values, and fetches the other of the two meanwhile.
  void direct_dots(const Item& item, const Item* next, const Rows& rows) const {
    struct KeyTile;
    bf16* key_tile = scratch<KeyTile, bf16>(size_t(dim * KEYS));
    int64_t head_rows = item.head_rows(group);
    Step steps[2];
    StepScales memory;
    int64_t now = 0;
    locate_step(item, item.key_begin, steps[now]);
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS, now ^= 1) {
      Step &step = steps[now], &coming = steps[now ^ 1];
      int64_t count = step.count;
      locate_next(item, key, next, next == nullptr ? 0 : next->key_begin, coming);
      NearFetcher<C> fetch_values(step.values, count, item.kv_heads * n.v_head);
      for (int64_t h = 0; h < item.kv_heads; h++) {
        HeadRows keys = of_head(step.keys, h * n.k_head);
        dots::pack_keys(keys.data(), count, n.head_dim, dim, fetch_values, key_tile);
        for_pieces(h * head_rows, head_rows, [&](int64_t row, auto rows_at_once) {
          constexpr int M = decltype(rows_at_once)::value;
          dots::multiply_keys<M>(rows.short_q + row * dim, dim, key_tile, (n.head_dim + 1) / 2,
                                 fetch_values, rows.scores + row * KEYS);
        });
      }
      for (int64_t h = 0; h < item.kv_heads; h++) {
        const StepScales* scales = find_scales(item, item.kv_head + h, key, 0, count, memory);
        for (int64_t row = h * head_rows; row < (h + 1) * head_rows; row++)
          rows.soften_short(row, visible_keys(rows.positions[row], key, count), count, scales);
      }
      NearFetcher<C> fetch_keys(coming.keys, coming.count, item.kv_heads * n.k_head);
      for (int64_t h = 0; h < item.kv_heads; h++) {
        HeadRows values = of_head(step.values, h * n.v_head);
        for_pieces(h * head_rows, head_rows, [&](int64_t row, auto rows_at_once) {
          constexpr int M = decltype(rows_at_once)::value;
          dots::add_values<M>(rows.weights + row * KEYS, values.data(), fetch_keys, count,
                              n.head_dim, rows.acc + row * dim, dim);
        });
      }
    }
  }

  using HeadRows = std::array<const C*, KEYS>;

  static HeadRows of_head(const C* const* rows, int64_t offset) {
    HeadRows moved;
    for (size_t j = 0; j < size_t(KEYS); j++) moved[j] = rows[j] + offset;
    return moved;
  }

  // Calls f(row, std::integral_constant<int, M>) for pieces of M rows, of about the same size.
  template <class F>
  static void for_pieces(int64_t row, int64_t num_rows, const F& f) {
    for (int64_t end = row + num_rows; row < end;) {
      int64_t pieces = (end - row + dots::MOST_ROWS - 1) / dots::MOST_ROWS;
      int64_t height = (end - row + pieces - 1) / pieces;
      with_rows<dots::MOST_ROWS>(height, [&](auto rows_at_once) { f(row, rows_at_once); });
      row += height;
    }
  }

  // visible(row, key, count): what a row sees of a step; later rows see no less.
  template <class See>
  void tiled_dots(const Item& item, const Rows& rows, int64_t num_rows, const See& visible) const {
    constexpr int HEIGHT = 12;
    struct KeyTile;
    struct ValueTile;
    bf16* key_tile = scratch<KeyTile, bf16>(size_t(dim * KEYS));
    bf16* value_tile = scratch<ValueTile, bf16>(size_t(dim * KEYS));
    Step step;
    StepScales memory;
    for (int64_t key = item.key_begin; key < item.key_end; key += KEYS) {
      locate_step(item, key, step);
      int64_t count = step.count;
      NearFetcher<C> nothing(nullptr, 0, 0);
      dots::pack_keys(step.keys, count, n.head_dim, dim, nothing, key_tile);
      dots::pack_values(step.values, count, n.head_dim, value_tile);
      const StepScales* scales = find_scales(item, item.kv_head, key, 0, count, memory);
      for (int64_t row = 0; row < num_rows; row += HEIGHT) {
        int64_t height = std::min<int64_t>(HEIGHT, num_rows - row);
        int64_t seen = visible(row + height - 1, key, count).end;
        if (seen == 0) continue;
        with_rows<HEIGHT>(height, [&](auto rows_at_once) {
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

#endif

  void run_joint(const JointItem& joint) const {
    int64_t num_rows = int64_t(joint.members.size()) * group;
    Rows rows = fresh_rows(num_rows);
    for (int64_t row = 0; row < num_rows; row++)
      load_query(rows, row, joint.members[size_t(row / group)].token,
                 joint.kv_head * group + row % group);
    Item item{joint.sequence, joint.kv_head, 1, 0, 1, 0, joint.key_begin, joint.key_end, -1};
    auto all = [](int64_t, int64_t, int64_t count) { return Visible{0, count}; };
#if defined(__AVX512BF16__)
    if constexpr (DOTS<T>)
      tiled_dots(item, rows, num_rows, all);
    else
#endif
      run_steps(item, nullptr, rows, num_rows, all, [] {});
    for (int64_t row = 0; row < num_rows; row++)
      leave(rows, row, partial_row(joint.members[size_t(row / group)].row + row % group));
  }

  // Rows that have seen nothing, without queries.
  Rows fresh_rows(int64_t num_rows) const {
    struct RowMemory;
    struct ShortMemory;
    struct Positions;
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
    rows.positions = scratch<Positions, int64_t>(size_t(num_rows));
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
      for (int64_t d = 0; d < dim; d += W)
        store(to + d, load_some(from + d, n.head_dim - d) * n.scale);
    }
  }

  float* partial_row(int64_t row) const { return partials + row * Partial::floats(dim); }

  // What a row has so far, as a Partial, and back.
  void leave(const Rows& rows, int64_t row, float* partial) const {
    partial[0] = rows.peak[row];
    partial[1] = rows.total[row];
    std::copy_n(rows.acc + row * dim, dim, partial + 2);
  }
  void resume(const Rows& rows, int64_t row, const float* partial) const {
    rows.peak[row] = partial[0];
    rows.total[row] = partial[1];
    std::copy_n(partial + 2, dim, rows.acc + row * dim);
  }

  // Joins what rows have of each span, in the order in which a lone token's spans are merged.
  class SpanSums {
   public:
    SpanSums(const Attention& op, const Rows& rows, int64_t num_rows)
        : op_(op), rows_(rows), num_rows_(num_rows), width_(Partial::floats(op.dim)) {}

    void end_span() {
      struct SpanMemory;
      if (joined_ == nullptr) {
        joined_ = scratch<SpanMemory, float>(size_t((num_rows_ + 1) * width_));
        for (int64_t row = 0; row < num_rows_; row++) Partial::clear(joined_ + row * width_, op_.dim);
      }
      float* of_row = joined_ + num_rows_ * width_;
      for (int64_t row = 0; row < num_rows_; row++) {
        op_.leave(rows_, row, of_row);
        Partial::join(joined_ + row * width_, of_row, op_.dim);
        Partial::clear(of_row, op_.dim);
        op_.resume(rows_, row, of_row);
      }
    }

    // Leaves the sums of all spans in the rows.
    void finish() {
      if (joined_ == nullptr) return;
      end_span();
      for (int64_t row = 0; row < num_rows_; row++) op_.resume(rows_, row, joined_ + row * width_);
    }

   private:
    const Attention& op_;
    const Rows& rows_;
    int64_t num_rows_, width_;
    float* joined_ = nullptr;
  };

  // next: the item that the thread runs after this one, or null.
  void run(const Item& item, const Item* next) {
    int64_t num_rows = item.rows(group);
    Rows rows = fresh_rows(num_rows);
    item.for_rows(group, [&](int64_t row, int64_t token, int64_t head) {
      load_query(rows, row, item.first_token + token, head);
      rows.positions[row] = item.first_position + token;
      if (item.begun >= 0) resume(rows, row, partial_row(item.begun + row));
    });
    // Rows are in the order of their positions.
    auto visible = [&](int64_t row, int64_t key, int64_t count) {
      return visible_keys(rows.positions[row], key, count);
    };
#if defined(__AVX512BF16__)
    if constexpr (DOTS<T>) {
      if (is_direct(item.tokens, group))
        direct_dots(item, next, rows);
      else
        tiled_dots(item, rows, num_rows, visible);
    } else
#endif
    {
      SpanSums sums(*this, rows, num_rows);
      run_steps(item, next, rows, item.head_rows(group), visible, [&] { sums.end_span(); });
      sums.finish();
    }
    item.for_rows(group, [&](int64_t row, int64_t token, int64_t head) {
      if (item.partial < 0)
        write(item.first_token + token, head, rows.acc + row * dim, rows.total[row]);
      else
        leave(rows, row, partial_row(item.partial + row));
    });
  }

  void write(int64_t token, int64_t head, const float* acc, float total) const {
    T* to = out + (token * n.heads + head) * n.head_dim;
    float inverse = 1.0f / total;
    int64_t d = 0;
    for (; d + W <= n.head_dim; d += W) store(to + d, load(acc + d) * inverse);
    for (; d < n.head_dim; d++) from_float(acc[d] * inverse, to + d);
  }

  // first is the first of the spans of one token, whose partial results lie in key order.
  void merge(const Item& first, int64_t spans) const {
    struct MergeMemory;
    float* all = scratch<MergeMemory, float>(size_t(Partial::floats(dim)));
    int64_t num_rows = first.rows(group);
    first.for_rows(group, [&](int64_t row, int64_t token, int64_t head) {
      Partial::clear(all, dim);
      for (int64_t s = 0; s < spans; s++)
        Partial::join(all, partial_row(first.partial + s * num_rows + row), dim);
      write(first.first_token + token, head, all + 2, all[1]);
    });
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
    partials = scratch<Partials, float>(size_t(plan.partial_rows * Partial::floats(dim)));
    if (plan.work < 32768) threads = 1;  // less than it takes to hand it out
    parallel_for(int64_t(plan.joints.size()), threads,
                 [&](int64_t i) { run_joint(plan.joints[size_t(i)]); });
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
