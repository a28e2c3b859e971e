// Which lone tokens of a batch have block tables that begin alike.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace pagewire {

class Sharing {
 public:
  // Lone tokens only, and no windows: a chunk of a prompt has tiles of its own.
  void find(const AttentionSizes& n, const int32_t* starts, const int32_t* seq_lens,
            const int32_t* block_table) {
    sequences_.assign(size_t(n.sequences), {});
    if (n.window > 0) return;
    auto lone = [&](int64_t r) { return starts[r + 1] - starts[r] == 1 && seq_lens[r] > LEAST_KEYS; };
    std::vector<Candidate> alike;
    for (int64_t leader = 0; leader < n.sequences; leader++) {
      if (!lone(leader) || sequences_[size_t(leader)].leader >= 0) continue;
      const int32_t* blocks = block_table + leader * n.table_row;
      alike.clear();
      for (int64_t r = leader + 1; r < n.sequences; r++) {
        const int32_t* others = block_table + r * n.table_row;
        if (!lone(r) || sequences_[size_t(r)].leader >= 0 || blocks[0] != others[0]) continue;
        // A token's own key is its last one, and no one else's.
        int64_t most = std::min(seq_lens[leader], seq_lens[r]) - 1, same = 1;
        while ((same + 1) * n.block_size <= most && blocks[same] == others[same]) same++;
        int64_t keys = std::min(same * n.block_size, most) / KEYS * KEYS;
        if (keys >= LEAST_KEYS) alike.push_back({keys, r});
      }
      join(leader, alike);
    }
  }

  // How many keys of a sequence are also its leader's: 0, or a multiple of KEYS.
  int64_t keys_of(int64_t r) const { return sequences_.empty() ? 0 : sequences_[size_t(r)].keys; }
  int64_t leader_of(int64_t r) const { return sequences_[size_t(r)].leader; }

 private:
  static constexpr int64_t LEAST_KEYS = 128;  // for fewer it is not worth its while
  static constexpr int64_t LEAST_MEMBERS = 3;

  struct Candidate {
    int64_t keys, sequence;
  };
  struct Sequence {
    int64_t leader = -1, keys = 0;
  };

  // Those with whom the most keys need not be read again.
  void join(int64_t leader, std::vector<Candidate>& alike) {
    std::sort(alike.begin(), alike.end(), [](const Candidate& a, const Candidate& b) {
      return a.keys != b.keys ? a.keys > b.keys : a.sequence < b.sequence;
    });
    size_t best = 0;
    for (size_t i = 0; i < alike.size(); i++)
      if (int64_t(i + 1) * alike[i].keys > int64_t(best) * (best > 0 ? alike[best - 1].keys : 0))
        best = i + 1;
    if (int64_t(best) + 1 < LEAST_MEMBERS) return;
    int64_t keys = alike[best - 1].keys;
    sequences_[size_t(leader)] = {leader, keys};
    for (size_t i = 0; i < best; i++) sequences_[size_t(alike[i].sequence)] = {leader, keys};
  }

  std::vector<Sequence> sequences_;
};

}  // namespace pagewire
