// Parallel work on the host's threads (hop_use_threads): PyTorch's threads are shared, so that none spins while others
// work.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace hop {

// Calls body(context, index, count) on up to `threads` threads, with index 0..count-1; returns when all have returned.
void run_parallel(int threads, void (*body)(void*, int, int), void* context);

template <class Body>
void parallel(int threads, Body&& body) {
    using B = std::remove_reference_t<Body>;
    run_parallel(
        threads, [](void* context, int index, int count) { (*static_cast<B*>(context))(index, count); },
        const_cast<std::remove_const_t<B>*>(&body));
}

// Waits for all `count` threads of a parallel region; can be used once.
class Barrier {
public:
    void wait(int count);

private:
    std::atomic<int> arrived_{0};
};

// Distributes items 0..size-1 to threads: `grain` at a time, and the last 2 · threads · grain one at a time, so that
// all threads finish at about the same time.
class Queue {
public:
    explicit Queue(int64_t size, int64_t grain = 1, int threads = 0) : size_(size), grain_(grain) {
        const int64_t many = size - 2 * threads * grain;
        grains_ = threads == 0 ? size : many > 0 ? many / grain : 0;
    }
    bool take(int64_t& begin, int64_t& end) {
        const int64_t at = next_.fetch_add(1, std::memory_order_relaxed), singles = at - grains_;
        begin = singles < 0 ? at * grain_ : grains_ * grain_ + singles;
        end = singles < 0 ? begin + grain_ : begin + 1;
        if (end > size_) end = size_;
        return begin < size_;
    }

private:
    std::atomic<int64_t> next_{0};
    int64_t size_, grain_, grains_;
};

// The number of threads that pay off for `work` units, if each thread needs at least `least` of them.
inline int worth(int threads, int64_t work, int64_t least) {
    const int64_t most = work / (least > 0 ? least : 1);
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}

// A thread-local buffer that keeps its memory between calls, up to a limit; 64-byte aligned, on huge pages.
class Scratch {
public:
    ~Scratch();
    char* get(size_t bytes);  // nullptr if out of memory
    void trim();              // frees memory above the limit

private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

void use_huge_pages(void* data, size_t bytes);  // for memory that has not been written yet

// The same for memory in use, the first time that it is passed. A weight that every call reads is then read 6 to 15 %
// faster, above all in packages, whose constants are on small pages. Takes 0.4 ms per megabyte, once; does nothing if
// the system does not support it. The contents do not change. Next to a small tensor, the pages may include other
// memory.
void gather_pages(const void* data, size_t bytes);

}  // namespace hop
