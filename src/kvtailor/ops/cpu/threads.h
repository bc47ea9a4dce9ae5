// Work that torch's own threads share.
#pragma once

#include <stdint.h>

typedef void (*Body)(int64_t begin, int64_t end, void* context);
// torch_parallel_for of torch's stable C interface (torch/csrc/stable/c/shim.h).
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

template <class Each> struct Shared {
  const Each& each;
  int64_t count, run, next, thread;

  // Whoever is free takes the next run of pieces: a thread that a neighbour holds up holds up no other.
  static void work(int64_t, int64_t, void* context) {
    Shared& shared = *(Shared*)context;
    const int64_t mine = __atomic_fetch_add(&shared.thread, 1, __ATOMIC_RELAXED);
    for (int64_t i; (i = __atomic_fetch_add(&shared.next, shared.run, __ATOMIC_RELAXED)) < shared.count;)
      shared.each(i, i + shared.run < shared.count ? i + shared.run : shared.count, mine);
  }
};

constexpr int64_t PIECES = 8;  // runs for each thread

// Calls `each` with runs of the numbers below `count`, as begin and end, and with the number of the thread, on so many
// threads; not 0 where torch fails. What a piece asks for ahead of time is read by the next one, so runs are long.
template <class Each>
static inline int32_t share_out_runs(int64_t count, int64_t threads, ParallelFor parallel_for, const Each& each) {
  const int64_t most = PIECES * threads;
  Shared<Each> shared{each, count, (count + most - 1) / most, 0, 0};
  if (threads > 1) return parallel_for(0, threads, 1, Shared<Each>::work, &shared);
  Shared<Each>::work(0, 1, &shared);
  return 0;
}

// The same with every number alone.
template <class Each>
static inline int32_t share_out(int64_t count, int64_t threads, ParallelFor parallel_for, const Each& each) {
  return share_out_runs(count, threads, parallel_for, [&](int64_t begin, int64_t end, int64_t thread) {
    for (int64_t i = begin; i < end; i++) each(i, thread);
  });
}
