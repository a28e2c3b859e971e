// What kernels/cpu asks before it chooses a library.

#include <cerrno>
#include <cstring>

#include "api.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Tile registers with products of bfloat16 and of bytes, which the system can save.
bool has_amx() {
  constexpr unsigned XGETBV = 1u << 27, AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25;
  constexpr unsigned PRODUCTS = AMX_BF16 | AMX_TILE | AMX_INT8, SAVED = 1u << 17 | 1u << 18;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & XGETBV)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & PRODUCTS) != PRODUCTS) return false;
  asm volatile("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  return (a & SAVED) == SAVED;
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
  bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  bool dots = vnni && __builtin_cpu_supports("avx512bf16");
  const Variant variants[] = {{"portable", true},
                              {"avx2", avx2},
                              {"avx_vnni", avx2 && has_avx_vnni()},
                              {"avx512", avx512},
                              {"avx512_vnni", vnni},
                              {"avx512_bf16", dots},
                              {"amx", dots && has_amx()}};
#else
  const Variant variants[] = {{"portable", true}};
#endif
  for (const Variant& variant : variants)
    if (std::strcmp(name, variant.name) == 0) return variant.runs;
  return -1;
}

// Asks the system to let this process use tile registers, for the rest of its life and that of its
// children. 0, or the errno of the refusal: threads with too small a stack for signals, for one.
PAGEWIRE_API int pagewire_request_tiles(void) {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl and XCR0
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}
