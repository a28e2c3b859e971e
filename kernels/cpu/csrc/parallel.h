// Loops over torch's own OpenMP threads.
//
// torch brings libgomp into the process. Calling its entry point directly shares torch's
// thread pool, whatever compiler builds this file; a second OpenMP runtime would fight it
// for the cores. The symbols are weak: where no runtime has them, loops run on one thread,
// and pagewire_has_threads tells.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

extern "C" {
__attribute__((weak)) void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned);
__attribute__((weak)) int omp_in_parallel(void);
}

namespace pagewire {

// Calls body(i) once for each i in [0, n), in no order, on at most `threads` threads.
template <class Body>
void parallel_for(int64_t n, int threads, const Body& body) {
  if (threads > n) threads = int(n);
  if (threads <= 1 || GOMP_parallel == nullptr || (omp_in_parallel != nullptr && omp_in_parallel())) {
    for (int64_t i = 0; i < n; i++) body(i);
    return;
  }
  struct Loop {
    const Body& body;
    int64_t n;
    std::atomic<int64_t> next;
  } loop{body, n, {0}};
  auto run = [](void* data) {
    Loop& shared = *static_cast<Loop*>(data);
    for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.n;)
      shared.body(i);
  };
  GOMP_parallel(run, &loop, unsigned(threads), 0);
}

// Memory of the calling thread that lives until its next call, for one purpose each.
template <class Tag, class T>
T* scratch(size_t n) {
  thread_local std::vector<T> memory;
  if (memory.size() < n) memory.resize(n);
  return memory.data();
}

}  // namespace pagewire
