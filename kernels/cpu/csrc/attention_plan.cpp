// How attention's work is cut: items of (sequence, KV head, tile of query tokens, span of keys).
//
// All the query heads of a KV head go together, so each key and value is read once for them.
// A lone token's long context is cut into spans at fixed positions that are merged at the end,
// so that a result depends on neither the batch nor the threads.

#include <algorithm>

#include "attention.h"
#include "attention_sharing.h"

namespace pagewire {

using Item = AttentionItem;

namespace {

constexpr int64_t DIRECT_ROWS = 12;  // up to here rows read the cache directly
// Query rows (tokens x heads) of a prefill item: many, to widen a key seldom, but a short chunk
// still makes several items.
constexpr int64_t MIN_TILE_ROWS = 48, MAX_TILE_ROWS = 192, TILES = 4;
constexpr int64_t MIN_JOINT_ROWS = 24;

}  // namespace

bool is_direct(int64_t tokens, int64_t group) {
  return tokens == 1 || tokens * group <= DIRECT_ROWS;
}

void AttentionPlan::make(const AttentionSizes& n, const int32_t* starts, const int32_t* seq_lens,
                         const int32_t* block_table, int threads) {
  int64_t group = n.heads / n.kv_heads;
  made_for = n;
  joints.clear();
  items.clear();
  merges.clear();
  partial_rows = work = 0;
  // A token's heads lie side by side: with work enough for all threads, a direct item takes
  // them together and reads memory in one run.
  int64_t together = n.sequences >= 4 * threads ? n.kv_heads : 1;
  Sharing sharing;
  sharing.find(n, starts, seq_lens, block_table);
  // Prefill sequences, which come last, hold the longest items: hand those out first.
  for (int64_t r = n.sequences - 1; r >= 0; r--) {
    int64_t query_len = starts[r + 1] - starts[r], seq_len = seq_lens[r];
    if (seq_len == 0 || query_len == 0) continue;
    int64_t seen = n.window > 0 ? std::min(seq_len, n.window + query_len - 1) : seq_len;
    work += query_len * seen * n.heads * n.head_dim;
    int64_t tile_rows = std::clamp(query_len * group / TILES, MIN_TILE_ROWS, MAX_TILE_ROWS);
    int64_t tile_tokens = std::max<int64_t>(1, tile_rows / group);
    for (int64_t end = query_len; end > 0; end -= tile_tokens) {
      int64_t begin = std::max<int64_t>(0, end - tile_tokens);
      int64_t kv_heads = is_direct(end - begin, group) ? together : 1;
      int64_t position = seq_len - query_len + begin;
      int64_t first_key = n.window > 0 ? std::max<int64_t>(0, position + 1 - n.window) : 0;
      Item item{r, 0, kv_heads, starts[r] + begin, end - begin, position, first_key,
                seq_len - query_len + end, -1};
      int64_t first_span = first_key / SPAN;
      int64_t spans = query_len == 1 ? (seq_len + SPAN - 1) / SPAN - first_span : 1;
      for (item.kv_head = 0; item.kv_head < n.kv_heads; item.kv_head += kv_heads) {
        int64_t rows = item.rows(group), first_row = partial_rows;
        if (spans > 1) partial_rows += spans * rows;
        for (int64_t s = first_span; s < first_span + spans; s++) {
          Item span = item;
          if (spans > 1) {
            span.key_begin = std::max(first_key, s * SPAN);
            span.key_end = std::min(seq_len, (s + 1) * SPAN);
            span.partial = first_row + (s - first_span) * rows;
            if (s == first_span) merges.push_back({span, spans});
          }
          int64_t shared = std::min(sharing.keys_of(r), span.key_end);
          if (shared > span.key_begin) share(span, sharing.leader_of(r), shared);
          if (span.key_begin < span.key_end) items.push_back(span);
        }
      }
    }
  }
  split_joints(threads);
}

// Leaves the keys below `end`, which are the leader's too, to joint items.
void AttentionPlan::share(Item& item, int64_t leader, int64_t end) {
  int64_t group = made_for.heads / made_for.kv_heads, row = item.partial;
  if (end < item.key_end) {
    row = item.begun = partial_rows;
    partial_rows += item.rows(group);
  }
  for (int64_t h = item.kv_head; h < item.kv_head + item.kv_heads; h++, row += group) {
    auto joint = std::find_if(joints.begin(), joints.end(), [&](const JointItem& j) {
      return j.sequence == leader && j.kv_head == h && j.key_begin == item.key_begin;
    });
    if (joint == joints.end())
      joint = joints.insert(joint, JointItem{leader, h, item.key_begin, end, {}});
    joint->members.push_back({item.first_token, row});
  }
  item.key_begin = end;
}

// Into as many as all threads can share, but not so many that keys are transposed for a few rows.
void AttentionPlan::split_joints(int threads) {
  int64_t group = made_for.heads / made_for.kv_heads, count = int64_t(joints.size());
  for (int64_t i = 0; i < count; i++) {
    int64_t members = int64_t(joints[size_t(i)].members.size()), rows = members * group;
    int64_t least = (rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
    int64_t wanted = (2 * threads + count - 1) / count;
    int64_t pieces = std::max(least, std::min(wanted, rows / MIN_JOINT_ROWS));
    if (threads <= 1) pieces = least;
    for (int64_t piece = pieces - 1; piece > 0; piece--) {
      JointItem part = joints[size_t(i)];
      auto from = part.members.begin();
      part.members.assign(from + piece * members / pieces, from + (piece + 1) * members / pieces);
      joints.push_back(part);
    }
    joints[size_t(i)].members.resize(size_t(members / pieces));
  }
}

int64_t find_stray(const AttentionSizes& n, const int32_t* starts, const int32_t* seq_lens,
                   const int32_t* block_table) {
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
  return -1;
}

}  // namespace pagewire
