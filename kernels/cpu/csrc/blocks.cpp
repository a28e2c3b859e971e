// The residual blocks of a decoder, from the first to the last, in one call.
//
// A block adds to the residual what its branch makes of the normed residual:
//     attention: norm -> qkv product -> head norms, RoPE, KV write -> attention -> output product
//                -> norm -> add
//     MLP:       norm -> gate-up product -> act(gate) * up -> down product -> norm -> add
// where norms and RoPE may be left out. What lies between lives in memory of the calling thread that is kept from step to step.

#include "attention.h"
#include "gated.h"

enum BlockKind : int64_t { ATTENTION_BLOCK = 0, MLP_BLOCK = 1 };

// As kernels/cpu/library.py fills it.
struct Block {
  int64_t kind;
  // In the model's dtype, or null. Those of q and k are [head_dim], or [heads or kv_heads,
  // head_dim] with row_norms.
  const void *norm, *post_norm, *q_norm, *k_norm;
  PackedWeight in, out;  // qkv and output; gate-up and down
  int64_t activation;    // of an MLP
  // Of attention: cos_sin float32 [max_positions, rotary_dim] (null and 0: no rotation), the
  // strides are the cache's.
  const float* cos_sin;
  void *k_cache, *v_cache;
  CacheCodes codes;
  int64_t heads, kv_heads, head_dim, rotary_dim, max_positions, num_blocks, block_size;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  int64_t window, row_norms;
  float scale, soft_cap, eps;
};

// The step's flat batch.
struct BlockBatch {
  int64_t tokens, sequences, table_row, table_columns;
  const int64_t *positions, *slots;
  const int32_t *starts, *seq_lens, *block_table;
};

namespace pagewire {
namespace {

// The plans of a step, one for each kind of attention in it.
class Plans {
 public:
  void clear() { used_ = 0; }

  const AttentionPlan& of(const AttentionSizes& n, const BlockBatch& batch, int threads) {
    for (size_t i = 0; i < used_; i++)
      if (plans_[i].fits(n)) return plans_[i];
    if (used_ == plans_.size()) plans_.emplace_back();
    plans_[used_].make(n, batch.starts, batch.seq_lens, batch.block_table, threads);
    return plans_[used_++];
  }

 private:
  std::vector<AttentionPlan> plans_;
  size_t used_ = 0;
};

template <class T>
struct Blocks {
  const BlockBatch& batch;
  int dtype;
  T* residual;  // [tokens, hidden], dense
  int64_t hidden;
  int threads;
  Plans& plans;

  T* normed() const {
    struct Normed;
    return scratch<Normed, T>(size_t(batch.tokens * hidden));
  }

  PreparedRows norm(const Block& block) const {
    const T* weight = static_cast<const T*>(block.norm);
    if (weight == nullptr)
      return prepare(block.in, dtype, residual, hidden, batch.tokens, threads);
    if (!reads_directly(block.in, dtype))
      return prepare_rows(block.in, batch.tokens, threads, [&](int64_t t) {
        struct Row;
        T* x = scratch<Row, T>(size_t(hidden));
        normalize(residual + t * hidden, weight, x, hidden, block.eps);
        return x;
      });
    T* x = normed();
    for_rows(batch.tokens, hidden, threads, [&](int64_t t) {
      normalize(residual + t * hidden, weight, x + t * hidden, hidden, block.eps);
    });
    return prepare(block.in, dtype, x, hidden, batch.tokens, threads);
  }

  // The branch's end: the product of x, normed if it is to be, joins the residual.
  void add(const Block& block, const T* x) const {
    const PackedWeight& w = block.out;
    PreparedRows rows = prepare(w, dtype, x, w.in, batch.tokens, threads);
    if (block.post_norm != nullptr) return add_normed(block, rows);
    product(w, rows, threads, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
      add_columns(residual + row * hidden + column, sums, columns);
    });
  }

  void add_normed(const Block& block, const PreparedRows& x) const {
    T* branch = normed();
    product(block.out, x, threads,
            [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
              store_columns(branch + row * hidden + column, sums, columns);
            });
    for_rows(batch.tokens, hidden, threads, [&](int64_t t) {
      T* of_row = branch + t * hidden;
      normalize(of_row, static_cast<const T*>(block.post_norm), of_row, hidden, block.eps);
      pagewire::add(of_row, residual + t * hidden, hidden);
    });
  }

  // All heads of q as one row, and all of k.
  void norm_rows(const Block& block, T* q, T* k, int64_t width) const {
    int64_t q_size = block.heads * block.head_dim, k_size = block.kv_heads * block.head_dim;
    for_rows(batch.tokens, q_size + k_size, threads, [&](int64_t t) {
      T *q_row = q + t * width, *k_row = k + t * width;
      normalize(q_row, static_cast<const T*>(block.q_norm), q_row, q_size, block.eps);
      normalize(k_row, static_cast<const T*>(block.k_norm), k_row, k_size, block.eps);
    });
  }

  void attention_block(const Block& block) const {
    struct Fused;
    struct Attended;
    T* qkv = scratch<Fused, T>(size_t(batch.tokens * block.in.out));
    product(block.in, norm(block), threads,
            [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
              store_columns(qkv + row * block.in.out + column, sums, columns);
            });
    int64_t dim = block.head_dim, width = block.in.out;
    T *k = qkv + block.heads * dim, *v = k + block.kv_heads * dim;
    HeadNorms norms{block.q_norm, block.k_norm, block.eps};
    if (block.row_norms) {
      norm_rows(block, qkv, k, width);
      norms.q = norms.k = nullptr;
    }
    T* attended = scratch<Attended, T>(size_t(batch.tokens * block.out.in));
    AttentionSizes sizes = attention_sizes(block);
    sizes.q_token = width;
    sizes.q_head = dim;
    with_cache(block.codes.format, T{}, [&](auto cached) {
      using C = decltype(cached);
      C *k_cache = static_cast<C*>(block.k_cache), *v_cache = static_cast<C*>(block.v_cache);
      rope_and_cache(rope_sizes(block), norms, qkv, k, v, batch.positions, block.cos_sin, k_cache,
                     v_cache, block.codes, batch.slots, threads);
      attention(sizes, plans.of(sizes, batch, threads), static_cast<const T*>(qkv),
                static_cast<const C*>(k_cache), static_cast<const C*>(v_cache), block.codes,
                attended, batch.starts, batch.seq_lens, batch.block_table, threads);
    });
    add(block, attended);
  }

  void mlp_block(const Block& block) const {
    struct Hidden;
    T* act = scratch<Hidden, T>(size_t(batch.tokens * block.out.in));
    gated_product(block.in, norm(block), block.activation, act, threads);
    add(block, act);
  }

  AttentionSizes attention_sizes(const Block& b) const {
    return {batch.tokens, batch.sequences, b.heads, b.kv_heads, b.head_dim, b.num_blocks,
            b.block_size, 0, 0, b.k_block, b.k_slot, b.k_head, b.v_block, b.v_slot, b.v_head,
            batch.table_row, batch.table_columns, b.window, b.scale, b.soft_cap};
  }

  RopeSizes rope_sizes(const Block& b) const {
    int64_t width = b.in.out, dim = b.head_dim;
    return {batch.tokens, b.heads, b.kv_heads, dim, b.rotary_dim, b.max_positions, b.num_blocks,
            b.block_size, width, dim, width, dim, width, dim, b.k_block, b.k_slot, b.k_head,
            b.v_block, b.v_slot, b.v_head};
  }

  // As pagewire_run_blocks. All blocks share one geometry of cache.
  int64_t find_stray_input(const Block* blocks, int64_t num_blocks) const {
    const Block* first = nullptr;
    int64_t max_positions = INT64_MAX;
    for (const Block* b = blocks; b < blocks + num_blocks; b++) {
      if (b->kind != ATTENTION_BLOCK) continue;
      if (first == nullptr) first = b;
      max_positions = std::min(max_positions, b->max_positions);
    }
    if (first == nullptr) return -1;
    RopeSizes rope = rope_sizes(*first);
    rope.max_positions = max_positions;
    int64_t stray = find_stray(rope, batch.positions, batch.slots);
    if (stray >= 0) return stray;
    stray = find_stray(attention_sizes(*first), batch.starts, batch.seq_lens, batch.block_table);
    return stray < 0 ? -1 : batch.tokens + stray;
  }

  int64_t run(const Block* blocks, int64_t num_blocks) const {
    int64_t stray = find_stray_input(blocks, num_blocks);
    if (stray >= 0) return stray;
    plans.clear();
    for (int64_t i = 0; i < num_blocks; i++) {
      if (blocks[i].kind == ATTENTION_BLOCK)
        attention_block(blocks[i]);
      else
        mlp_block(blocks[i]);
    }
    return -1;
  }
};

}  // namespace
}  // namespace pagewire

using namespace pagewire;

// Returns -1; or a token whose position or slot, or tokens + a sequence whose block or bounds, are
// out of range, in which case nothing was written.
PAGEWIRE_API int64_t pagewire_run_blocks(int dtype, const Block* blocks, int64_t num_blocks,
                                         const BlockBatch* batch, void* residual, int64_t hidden,
                                         int threads) {
  thread_local Plans plans;
  int64_t stray = -1;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    Blocks<T> run{*batch, dtype, static_cast<T*>(residual), hidden, threads, plans};
    stray = run.run(blocks, num_blocks);
  });
  return stray;
}
