// A sparse mixture of gated experts: each expert's products over the tokens that chose it.
//
// A token's sum runs over its experts in the order of their ids, and a product's row does not
// depend on the rows beside it, so neither does the result.

#include "gated.h"

// As kernels/cpu/library.py fills it.
struct Expert {
  PackedWeight gate_up, down;  // [2I, H] and [H, I]
};

struct ExpertChoices {
  const int64_t* ids;   // [tokens, chosen]
  const float* scales;  // the same
  int64_t tokens, chosen, experts;
};

namespace pagewire {
namespace {

// The places of ids that name each expert, in order: those of expert e are
// [first[e], first[e + 1]).
struct Places {
  std::vector<int64_t> first, place;

  void sort(const ExpertChoices& c) {
    int64_t places = c.tokens * c.chosen;
    first.assign(size_t(c.experts + 2), 0);
    place.resize(size_t(places));
    for (int64_t i = 0; i < places; i++) first[size_t(c.ids[i]) + 2]++;
    for (size_t e = 2; e < first.size(); e++) first[e] += first[e - 1];
    for (int64_t i = 0; i < places; i++) place[size_t(first[size_t(c.ids[i]) + 1]++)] = i;
  }
};

template <class T>
void mix(const ExpertChoices& c, const Expert* experts, int dtype, const T* x, int64_t x_row,
         int64_t activation, T* out, int threads) {
  struct Gathered;
  struct Inner;
  struct Mixed;
  int64_t hidden = experts->gate_up.in, inter = experts->down.in;
  thread_local Places places;
  places.sort(c);
  float* mixed = scratch<Mixed, float>(size_t(c.tokens * hidden));
  std::fill_n(mixed, c.tokens * hidden, 0.0f);
  for (int64_t e = 0; e < c.experts; e++) {
    const int64_t* place = places.place.data() + places.first[size_t(e)];
    int64_t rows = places.first[size_t(e) + 1] - places.first[size_t(e)];
    if (rows == 0) continue;
    T* gathered = scratch<Gathered, T>(size_t(rows * hidden));
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(gathered + r * hidden, x + place[r] / c.chosen * x_row, size_t(hidden) * sizeof(T));
    T* inner = scratch<Inner, T>(size_t(rows * inter));
    const Expert& expert = experts[e];
    gated_product(expert.gate_up, prepare(expert.gate_up, dtype, gathered, hidden, rows, threads),
                  activation, inner, threads);
    PreparedRows prepared = prepare(expert.down, dtype, inner, inter, rows, threads);
    product(expert.down, prepared, threads,
            [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
              float* to = mixed + place[row] / c.chosen * hidden + column;
              float scale = c.scales[place[row]];
              for (int64_t i = 0; i < columns; i++) to[i] += sums[i] * scale;
            });
  }
  for_rows(c.tokens, hidden, threads, [&](int64_t t) {
    store_columns(out + t * hidden, mixed + t * hidden, hidden);
  });
}

}  // namespace
}  // namespace pagewire

using namespace pagewire;

// x [tokens, H] with dense rows x_row apart -> out dense [tokens, H]. Returns -1, or the first
// token with an id out of range.
PAGEWIRE_API int64_t pagewire_experts(int dtype, const void* x, int64_t x_row,
                                      const Expert* experts, const ExpertChoices* choices,
                                      int64_t activation, void* out, int threads) {
  for (int64_t i = 0; i < choices->tokens * choices->chosen; i++)
    if (choices->ids[i] < 0 || choices->ids[i] >= choices->experts) return i / choices->chosen;
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    mix(*choices, experts, dtype, static_cast<const T*>(x), x_row, activation,
        static_cast<T*>(out), threads);
  });
  return -1;
}
