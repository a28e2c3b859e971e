// Attention as Python calls it; attention_paged.h computes it.

#include "attention.h"

namespace pagewire {

bool is_batch_invariant(int dtype) {
#if defined(__AVX512BF16__)
  return dtype != BFLOAT16;  // whose tiles sum over all keys, not over spans
#else
  (void)dtype;
  return true;
#endif
}

}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_API int pagewire_attention_is_batch_invariant(int dtype) {
  return is_batch_invariant(dtype);
}

PAGEWIRE_API int64_t pagewire_attention(int dtype, const void* q, const void* k_cache,
                                        const void* v_cache, const CacheCodes* codes, void* out,
                                        const int32_t* starts, const int32_t* seq_lens,
                                        const int32_t* block_table, const AttentionSizes* sizes,
                                        int threads) {
  int64_t stray = find_stray(*sizes, starts, seq_lens, block_table);
  if (stray >= 0) return stray;
  thread_local AttentionPlan plan;
  plan.make(*sizes, starts, seq_lens, block_table, threads);
  with_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    with_cache(codes->format, element, [&](auto cached) {
      using C = decltype(cached);
      attention(*sizes, plan, static_cast<const T*>(q), static_cast<const C*>(k_cache),
                static_cast<const C*>(v_cache), *codes, static_cast<T*>(out), starts, seq_lens,
                block_table, threads);
    });
  });
  return -1;
}
