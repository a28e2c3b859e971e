// What kernels/cpu asks before it chooses a library.

#include "api.h"
#include "parallel.h"

// The highest library that this CPU runs: 0 the portable library, 1 x86-64-v3, 2 x86-64-v4.
PAGEWIRE_API int pagewire_cpu_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
            __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vl");
  return v4 ? 2 : v3 ? 1 : 0;
#else
  return 0;
#endif
}

PAGEWIRE_API int pagewire_has_threads(void) { return GOMP_parallel != nullptr; }

// Whether the CPU multiplies bfloat16 itself.
PAGEWIRE_API int pagewire_native_bfloat16(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return 0;
#endif
}
