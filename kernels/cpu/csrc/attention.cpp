// Attention as Python calls it; attention_paged.h computes it.

#include "attention.h"

namespace pagewire {

bool shares_keys(int dtype) {
#if defined(__AVX512BF16__)
  return dtype == BFLOAT16;  // whose prefill and decode take the same steps
#else
  (void)dtype;
  return false;
#endif
}

}  // namespace pagewire

using namespace pagewire;

PAGEWIRE_API int64_t pagewire_attention(int dtype, const void* q, const void* k_cache,
                                        const void* v_cache, const CacheCodes* codes, void* out,
                                        const int32_t* starts, const int32_t* seq_lens,
                                        const int32_t* block_table, const AttentionSizes* sizes,
                                        int threads) {
  int64_t stray = find_stray(*sizes, starts, seq_lens, block_table);
  if (stray >= 0) return stray;
  thread_local AttentionPlan plan;
  plan.make(*sizes, starts, seq_lens, shares_keys(dtype) ? block_table : nullptr, threads);
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
