// What kernels/cpu asks before it chooses a library.

#include "api.h"

// The highest library that this CPU runs: 0 the portable library, 1 x86-64-v3, 2 x86-64-v4,
// 3 with bfloat16 and int8 dot products too.
PAGEWIRE_API int pagewire_cpu_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl");
  bool dots = v4 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  return dots ? 3 : v4 ? 2 : v3 ? 1 : 0;
#else
  return 0;
#endif
}
