// Causal attention over the paged KV cache: what is computed, and in which pieces.
#pragma once

#include <vector>

#include "api.h"
#include "cache_codes.h"
#include "parallel.h"

struct AttentionSizes {
  int64_t tokens, sequences, heads, kv_heads, head_dim, num_blocks, block_size;
  int64_t q_token, q_head;  // strides
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head, table_row;
  int64_t table_columns;
  int64_t window;  // 0: none
  float scale;
  float soft_cap;  // 0: none
};

namespace pagewire {

constexpr int64_t KEYS = 64;   // of a step of the softmax
constexpr int64_t SPAN = 512;  // keys that a row's sums run over, before they join those of others

struct AttentionItem {
  int64_t sequence, kv_head, kv_heads;
  int64_t first_token, tokens;     // of the flat batch
  int64_t first_position;          // absolute position of first_token
  int64_t key_begin, key_end;      // those that a token of it sees
  int64_t partial;                 // first row of its partial result; -1: writes the output
  int64_t begun = -1;              // first row of what joint items have left it; -1: nothing

  // Its query rows are ordered by KV head, token, and query head within the group.
  int64_t head_rows(int64_t group) const { return tokens * group; }
  int64_t rows(int64_t group) const { return kv_heads * head_rows(group); }
  // Calls f(row, token of the item, query head).
  template <class F>
  void for_rows(int64_t group, const F& f) const {
    int64_t row = 0;
    for (int64_t h = kv_head; h < kv_head + kv_heads; h++)
      for (int64_t token = 0; token < tokens; token++)
        for (int64_t i = 0; i < group; i++) f(row++, token, h * group + i);
  }
};

// Keys that several lone tokens share, because their block tables begin with the same blocks: they
// are read and transposed once for all of them. Each row does what it would do alone, in the same
// order, and its item goes on from there (Juravsky et al., arXiv:2402.05099, has the idea).
struct JointItem {
  struct Member {
    int64_t token;  // of the flat batch
    int64_t row;    // of partials: where the first of its query heads is left
  };
  int64_t sequence;  // whose block table is read
  int64_t kv_head, key_begin, key_end;
  std::vector<Member> members;
};

// Whether a row's result is the same to the bit in an item of its own and in one of many tokens.
bool is_batch_invariant(int dtype);

// Whether an item of so many tokens reads the cache directly, as decode does.
bool is_direct(int64_t tokens, int64_t group);

// How a batch is cut: the same for all layers of a step that fits() takes.
struct AttentionPlan {
  struct Merge {
    AttentionItem first;
    int64_t spans;
  };
  AttentionSizes made_for{};
  std::vector<JointItem> joints;  // to be done before the items
  std::vector<AttentionItem> items;
  std::vector<Merge> merges;
  int64_t partial_rows = 0, work = 0;

  bool fits(const AttentionSizes& n) const {
    const AttentionSizes& m = made_for;
    return n.window == m.window && n.heads == m.heads && n.kv_heads == m.kv_heads &&
           n.head_dim == m.head_dim;
  }
  void make(const AttentionSizes& n, const int32_t* starts, const int32_t* seq_lens,
            const int32_t* block_table, int threads);

 private:
  void share(AttentionItem& item, int64_t leader, int64_t end);
  void split_joints(int threads);
};

// The first sequence with a block or bounds that are out of range, or -1.
int64_t find_stray(const AttentionSizes& n, const int32_t* starts, const int32_t* seq_lens,
                   const int32_t* block_table);

// out is dense [tokens, heads, head_dim]; tokens of no sequence get zeros. C is the element type
// of a cache of codes.format.
template <class T, class C>
void attention(const AttentionSizes& n, const AttentionPlan& plan, const T* q, const C* k_cache,
               const C* v_cache, const CacheCodes& codes, T* out, const int32_t* starts,
               const int32_t* seq_lens, const int32_t* block_table, int threads);

}  // namespace pagewire
