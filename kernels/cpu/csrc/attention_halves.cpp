// Attention in float32 over caches of 16-bit floats.

#include "attention_paged.h"

namespace pagewire {

PAGEWIRE_INSTANTIATE(float, bf16)
PAGEWIRE_INSTANTIATE(float, f16)

}  // namespace pagewire
