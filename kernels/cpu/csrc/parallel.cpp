// The pool behind parallel.h.

#include "parallel.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace pagewire {
namespace {

// How often a waiting thread looks before it sleeps. Between two loops of a step lie about
// 0.2 to 5 us; between two steps, where the cores belong to others, much more.
constexpr int WORKER_SPINS = 2000;
constexpr int CALLER_SPINS = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  bool try_enter() { return !busy_.exchange(true, std::memory_order_acquire); }
  void leave() { busy_.store(false, std::memory_order_release); }

  void run(int64_t n, int threads, void (*body)(void*, int64_t, int64_t), void* data) {
    while (workers_ < threads - 1) start_worker();
    body_ = body;
    data_ = data;
    threads_.store(threads, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    word_.store(uint64_t(n) << 24, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> hold(mutex_);
      work_.notify_all();
    }
    take_part();
    for (int spin = 0; spin < CALLER_SPINS; spin++) {
      if (done_.load(std::memory_order_acquire) == n) return;
      pause();
    }
    // Somebody lost its core in the middle of a range. An idle core may run it.
    std::unique_lock<std::mutex> hold(mutex_);
    caller_waits_.store(true, std::memory_order_seq_cst);
    finished_.wait(hold, [&] { return done_.load(std::memory_order_seq_cst) == n; });
    caller_waits_.store(false, std::memory_order_relaxed);
  }

 private:
  // A loop's state in one word, so that a range is always claimed of the loop that is current:
  // its number of items, and how many are handed out.
  static int64_t items(uint64_t word) { return int64_t(word >> 24); }
  static int64_t next(uint64_t word) { return int64_t(word & uint64_t(MOST_ITEMS)); }

  bool has_work() const {
    uint64_t word = word_.load(std::memory_order_seq_cst);
    return next(word) < items(word);
  }

  void take_part() {
    uint64_t word = word_.load(std::memory_order_acquire);
    for (;;) {
      int64_t n = items(word), begin = next(word);
      if (begin >= n) return;
      int64_t share = (n - begin) / (2 * threads_.load(std::memory_order_relaxed));
      int64_t count = share > 1 ? share : 1;
      if (!word_.compare_exchange_weak(word, word + uint64_t(count), std::memory_order_acq_rel,
                                       std::memory_order_acquire))
        continue;
      // The loop cannot end before this range has, so its body stands still.
      body_(data_, begin, begin + count);
      if (done_.fetch_add(count, std::memory_order_seq_cst) + count == n &&
          caller_waits_.load(std::memory_order_seq_cst)) {
        std::lock_guard<std::mutex> hold(mutex_);
        finished_.notify_one();
      }
      word = word_.load(std::memory_order_acquire);
    }
  }

  void work(int index) {
    for (int spin = 0;;) {
      if (index + 1 < threads_.load(std::memory_order_relaxed) && has_work()) {
        take_part();
        spin = 0;
      } else if (++spin < WORKER_SPINS) {
        pause();
      } else {
        std::unique_lock<std::mutex> hold(mutex_);
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        work_.wait(hold, [&] { return index + 1 < threads_ && has_work(); });
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
        spin = 0;
      }
    }
  }

  void start_worker() {
    // Signals are the business of the program's own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this, index = workers_] { work(index); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    workers_++;
  }

  std::atomic<bool> busy_{false};
  int workers_ = 0;  // of the one who entered
  void (*body_)(void*, int64_t, int64_t) = nullptr;
  void* data_ = nullptr;
  std::mutex mutex_;
  std::condition_variable work_, finished_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> caller_waits_{false};
  alignas(64) std::atomic<uint64_t> word_{0};
  std::atomic<int> threads_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

// Never destroyed: its threads outlive everything.
Pool* pool = nullptr;

Pool& the_pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    pool = new Pool;
    // A forked child has none of the threads.
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  });
  return *pool;
}

}  // namespace

void run_loop(int64_t n, int threads, void (*body)(void*, int64_t, int64_t), void* data) {
  Pool& p = the_pool();
  if (!p.try_enter()) return body(data, 0, n);
  p.run(n, threads < n ? threads : int(n), body, data);
  p.leave();
}

}  // namespace pagewire
