// Parallel work in which each thread has its own part.
#pragma once
#include <atomic>
#include <cstdint>

namespace hop {

// Distributes items 0..size-1: each thread begins with its own part, so that its cache still contains the data of the
// last call, and then takes items of other threads.
class Parts {
public:
    Parts(int64_t size, int threads) : size_(size), threads_(threads > kMost ? kMost : threads) {
        for (int i = 0; i < threads_; ++i) next_[i].at.store(begin(i), std::memory_order_relaxed);
    }
    int64_t take(int thread) {
        for (int i = 0; i < threads_; ++i) {
            const int part = (thread + i) % threads_;
            if (next_[part].at.load(std::memory_order_relaxed) >= begin(part + 1)) continue;
            const int64_t found = next_[part].at.fetch_add(1, std::memory_order_relaxed);
            if (found < begin(part + 1)) return found;
        }
        return -1;
    }

private:
    static constexpr int kMost = 256;
    struct alignas(64) Next {
        std::atomic<int64_t> at;
    };
    int64_t begin(int part) const { return size_ * part / threads_; }
    int64_t size_;
    int threads_;
    Next next_[kMost];
};

}  // namespace hop
