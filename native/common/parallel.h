// Work shared among threads: those of the host (hop_use_threads), so that PyTorch's threads and ours are the same, and
// none spins while others work.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace hop {

// Calls body(context, index, count) on `threads` threads at most, index 0..count-1; returns when all have returned.
void run_parallel(int threads, void (*body)(void*, int, int), void* context);

template <class Body>
void parallel(int threads, Body&& body) {
    using B = std::remove_reference_t<Body>;
    run_parallel(
        threads, [](void* context, int index, int count) { (*static_cast<B*>(context))(index, count); },
        const_cast<std::remove_const_t<B>*>(&body));
}

// Waits for all `count` threads of a parallel region; used once.
class Barrier {
public:
    void wait(int count);

private:
    std::atomic<int> arrived_{0};
};

// Items 0..size-1, each taken by one thread: `grain` at a time, but of the last 2 · threads · grain each by itself, so that
// threads end together.
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

// Threads worth starting for `work` units of which `least` are worth one.
inline int worth(int threads, int64_t work, int64_t least) {
    const int64_t most = work / (least > 0 ? least : 1);
    return most < 1 ? 1 : most < threads ? static_cast<int>(most) : threads;
}

// A buffer of this thread's own that keeps its memory from call to call, up to a limit; 64-byte aligned, on huge pages.
class Scratch {
public:
    ~Scratch();
    char* get(size_t bytes);  // nullptr if there is no memory
    void trim();              // gives back what is above the limit

private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

void use_huge_pages(void* data, size_t bytes);  // for memory that was not written yet

// The same for memory in use, the first time that it is seen: a weight that is read in every call, in a package above all,
// whose constants lie on small pages, is read in 6 to 15 % less time. It takes 0.4 ms for each megabyte, once; where the
// system cannot, nothing happens. What lies there does not change; beside a small tensor it may be memory of others.
void gather_pages(const void* data, size_t bytes);

}  // namespace hop
