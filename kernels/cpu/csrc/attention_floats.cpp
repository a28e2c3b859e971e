// Attention over caches of the tensors' own dtype.

#include "attention_paged.h"

namespace pagewire {

PAGEWIRE_INSTANTIATE(float, float)
PAGEWIRE_INSTANTIATE(bf16, bf16)
PAGEWIRE_INSTANTIATE(f16, f16)

}  // namespace pagewire
