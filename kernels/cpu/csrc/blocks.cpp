// The residual blocks of a decoder, from the first to the last, in one call.
//
// A block adds to the residual what its branch makes of the normed residual:
//     attention: norm -> qkv product -> RoPE, KV write -> attention -> output product -> add
//     MLP:       norm -> gate-up product -> SiLU-mul -> down product -> add
// What lies between lives in memory of the calling thread that is kept from step to step.

#include "attention.h"
#include "elementwise.h"
#include "product.h"

enum BlockKind : int64_t { ATTENTION_BLOCK = 0, MLP_BLOCK = 1 };

// As kernels/cpu/library.py fills it.
struct Block {
  int64_t kind;
  const void* norm;      // [H], in the model's dtype
  PackedWeight in, out;  // qkv and output; gate-up and down
  // Of attention: cos_sin float32 [max_positions, rotary_dim], the strides are the cache's.
  const float* cos_sin;
  void *k_cache, *v_cache;
  int64_t heads, kv_heads, head_dim, rotary_dim, max_positions, num_blocks, block_size;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  float scale, eps;
};

// The step's flat batch.
struct BlockBatch {
  int64_t tokens, sequences, table_row, table_columns;
  const int64_t *positions, *slots;
  const int32_t *starts, *seq_lens, *block_table;
};

namespace pagewire {
namespace {

template <class T>
struct Blocks {
  const BlockBatch& batch;
  int dtype;
  T* residual;  // [tokens, hidden], dense
  int64_t hidden;
  int threads;
  AttentionPlan& plan;

  T* normed() const {
    struct Normed;
    return scratch<Normed, T>(size_t(batch.tokens * hidden));
  }

  PreparedRows norm(const Block& block) const {
    T* to = normed();
    for_rows(batch.tokens, hidden, threads, [&](int64_t t) {
      normalize(residual + t * hidden, static_cast<const T*>(block.norm), to + t * hidden, hidden,
                block.eps);
    });
    return prepare(block.in, dtype, to, hidden, batch.tokens, threads);
  }

  void add(const PackedWeight& w, const T* x) const {
    PreparedRows rows = prepare(w, dtype, x, w.in, batch.tokens, threads);
    product(w, rows, threads, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
      T* to = residual + row * hidden + column;
      int64_t i = 0;
      for (; i + W <= columns; i += W) store(to + i, load(to + i) + load(sums + i));
      for (; i < columns; i++) from_float(to_float(to[i]) + sums[i], to + i);
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
    T *k_cache = static_cast<T*>(block.k_cache), *v_cache = static_cast<T*>(block.v_cache);
    rope_and_cache(rope_sizes(block), qkv, k, v, batch.positions, block.cos_sin, k_cache, v_cache,
                   batch.slots, threads);
    T* attended = scratch<Attended, T>(size_t(batch.tokens * block.out.in));
    AttentionSizes sizes = attention_sizes(block);
    sizes.q_token = width;
    sizes.q_head = dim;
    attention(sizes, plan, qkv, k_cache, v_cache, attended, batch.starts, batch.seq_lens,
              batch.block_table, threads);
    add(block.out, attended);
  }

  void mlp_block(const Block& block) const {
    struct Hidden;
    int64_t inter = block.out.in;
    T* act = scratch<Hidden, T>(size_t(batch.tokens * inter));
    PreparedRows x = norm(block);
    if (inter % PANEL == 0)
      gate_and_up(block, x, act);
    else
      gate_then_up(block, x, act);
    add(block.out, act);
  }

  // A panel of gates, and at once the panel of ups that it meets.
  void gate_and_up(const Block& block, const PreparedRows& x, T* act) const {
    const PackedWeight& w = block.in;
    int64_t inter = block.out.in, panels = inter / PANEL;
    for_panels(panels, x.count, 2 * w.in, threads, [&](int64_t panel, int64_t row, int64_t rows) {
      alignas(64) float gates[ROW_BLOCK * PANEL], ups[ROW_BLOCK * PANEL];
      const char* from = static_cast<const char*>(x.data) + row * x.row_bytes;
      multiply_panel(w, panel, from, x.row_bytes, rows, gates);
      multiply_panel(w, panels + panel, from, x.row_bytes, rows, ups);
      vf bias[4] = {};
      if (w.bias != nullptr)
        for (int i = 0; i < 4; i++)
          bias[i] = load(w.bias + (i / 2) * inter + panel * PANEL + (i % 2) * W);
      for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < 2; i++) {
          int64_t at = r * PANEL + i * W;
          store(act + (row + r) * inter + panel * PANEL + i * W,
                silu(load(gates + at) + bias[i]) * (load(ups + at) + bias[2 + i]));
        }
    });
  }

  void gate_then_up(const Block& block, const PreparedRows& x, T* act) const {
    struct GateUp;
    int64_t inter = block.out.in, width = block.in.out;
    T* gate_up = scratch<GateUp, T>(size_t(batch.tokens * width));
    product(block.in, x, threads, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
      store_columns(gate_up + row * width + column, sums, columns);
    });
    for_rows(batch.tokens, inter, threads, [&](int64_t t) {
      silu_mul_row(gate_up + t * width, gate_up + t * width + inter, act + t * inter, inter);
    });
  }

  AttentionSizes attention_sizes(const Block& b) const {
    return {batch.tokens, batch.sequences, b.heads, b.kv_heads, b.head_dim, b.num_blocks,
            b.block_size, 0, 0, b.k_block, b.k_slot, b.k_head, b.v_block, b.v_slot, b.v_head,
            batch.table_row, batch.table_columns, b.scale};
  }

  RopeSizes rope_sizes(const Block& b) const {
    int64_t width = b.in.out, dim = b.head_dim;
    return {batch.tokens, b.heads, b.kv_heads, dim, b.rotary_dim, b.max_positions, b.num_blocks,
            b.block_size, width, dim, width, dim, width, dim, b.k_block, b.k_slot, b.k_head,
            b.v_block, b.v_slot, b.v_head};
  }

  // As pagewire_run_blocks. All blocks share one geometry of cache and heads.
  int64_t run(const Block* blocks, int64_t num_blocks) const {
    const Block* planned = nullptr;
    for (int64_t i = 0; i < num_blocks; i++) {
      if (blocks[i].kind == ATTENTION_BLOCK && planned == nullptr) {
        planned = blocks + i;
        int64_t stray = find_stray(rope_sizes(*planned), batch.positions, batch.slots);
        if (stray >= 0) return stray;
        AttentionSizes sizes = attention_sizes(*planned);
        stray = find_stray(sizes, batch.starts, batch.seq_lens, batch.block_table);
        if (stray >= 0) return batch.tokens + stray;
        plan.make(sizes, batch.starts, batch.seq_lens, threads);
      }
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
  thread_local AttentionPlan plan;
  int64_t stray = -1;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    Blocks<T> run{*batch, dtype, static_cast<T*>(residual), hidden, threads, plan};
    stray = run.run(blocks, num_blocks);
  });
  return stray;
}
