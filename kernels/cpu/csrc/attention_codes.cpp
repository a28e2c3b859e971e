// Attention over caches of 8-bit codes.

#include "attention_paged.h"

namespace pagewire {

PAGEWIRE_INSTANTIATE(float, e4m3)
PAGEWIRE_INSTANTIATE(bf16, e4m3)
PAGEWIRE_INSTANTIATE(f16, e4m3)
PAGEWIRE_INSTANTIATE(float, int8)
PAGEWIRE_INSTANTIATE(bf16, int8)
PAGEWIRE_INSTANTIATE(f16, int8)

}  // namespace pagewire
