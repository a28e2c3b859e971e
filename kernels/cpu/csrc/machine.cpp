// What kernels/cpu asks before it chooses a library.

#include <cstring>

#include "api.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

// Compilers learnt the name of this feature later than its instructions. Its registers are
// AVX2's: where the system saves those, it saves these.
bool has_avx_vnni() {
  unsigned most, a, b, c, d;
  if (!__get_cpuid_count(7, 0, &most, &b, &c, &d) || most < 1) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

}  // namespace
#endif

// Whether this CPU runs the library of a name in kernels/cpu/build.py: 1 or 0, or -1 for a name
// that is not known here.
PAGEWIRE_API int pagewire_cpu_runs(const char* name) {
  struct Variant {
    const char* name;
    bool runs;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vl");
  bool dots = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
  const Variant variants[] = {{"portable", true},
                              {"avx2", avx2},
                              {"avx_vnni", avx2 && has_avx_vnni()},
                              {"avx512", avx512},
                              {"avx512_bf16", dots}};
#else
  const Variant variants[] = {{"portable", true}};
#endif
  for (const Variant& variant : variants)
    if (std::strcmp(name, variant.name) == 0) return variant.runs;
  return -1;
}
