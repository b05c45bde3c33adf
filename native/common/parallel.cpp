#include "common/parallel.h"

#include "hop.h"

#include <cstdlib>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace hop {
namespace {

std::atomic<hop_threads> run_on{nullptr};

// The threads of a pool do not survive fork, and a parallel region would wait for them forever.
std::atomic<bool> forked{false};
#if defined(__unix__) || defined(__APPLE__)
const int watched = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

}  // namespace

void run_parallel(int threads, void (*body)(void*, int, int), void* context) {
    const hop_threads run = run_on;
    if (threads <= 1 || !run || forked) return body(context, 0, 1);
    run(threads, body, context);
}

void Barrier::wait(int count) {
    arrived_.fetch_add(1, std::memory_order_acq_rel);
    for (int spins = 0; arrived_.load(std::memory_order_acquire) < count; ++spins) {
        if (spins > 4096) std::this_thread::yield();
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
}

namespace {
constexpr size_t kHuge = size_t(2) << 20;
constexpr size_t kKeep = size_t(64) << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

char* allocate(size_t bytes) {
#if defined(_WIN32)
    return static_cast<char*>(_aligned_malloc(bytes, 64));
#else
    void* p = nullptr;
    if (posix_memalign(&p, bytes >= kHuge ? kHuge : 64, bytes) != 0) return nullptr;
    use_huge_pages(p, bytes);
    return static_cast<char*>(p);
#endif
}

void release(char* data) {
#if defined(_WIN32)
    _aligned_free(data);
#else
    std::free(data);
#endif
}
}  // namespace

void use_huge_pages(void* data, size_t bytes) {
#if defined(__linux__)
    const auto begin = round_up(reinterpret_cast<uintptr_t>(data), kHuge);
    const auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

#if defined(__linux__)
namespace {
constexpr int kCollapse = 25;  // MADV_COLLAPSE, since Linux 6.1
constexpr size_t kSmall = size_t(32) << 10;

// Collapses to a huge page each 2 MB that a small tensor shares with its neighbors. The system leaves memory unchanged
// that the process does not use completely.
void gather_around(uintptr_t begin, uintptr_t end) {
    constexpr size_t kSeen = 4096;
    static std::atomic<uintptr_t> seen[kSeen];
    for (uintptr_t at = begin / kHuge; at <= (end - 1) / kHuge; ++at) {
        auto& slot = seen[at % kSeen];
        if (slot.load(std::memory_order_relaxed) == at) continue;
        slot.store(at, std::memory_order_relaxed);
        madvise(reinterpret_cast<void*>(at * kHuge), kHuge, kCollapse);
    }
}
}  // namespace
#endif

void gather_pages(const void* data, size_t bytes) {
#if defined(__linux__)
    constexpr size_t kSeen = 1024;
    static std::atomic<uint64_t> seen[kSeen];
    const auto at = reinterpret_cast<uintptr_t>(data);
    if (bytes < kSmall) return;
    if (bytes < 2 * kHuge) return gather_around(at, at + bytes);
    const uint64_t mark = static_cast<uint64_t>(at) * 31 + bytes;
    auto& slot = seen[(at >> 12) % kSeen];
    if (slot.load(std::memory_order_relaxed) == mark) return;
    slot.store(mark, std::memory_order_relaxed);
    const uintptr_t begin = round_up(at, kHuge), end = (at + bytes) / kHuge * kHuge;
    if (begin < end && madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0)
        madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#else
    (void)data, (void)bytes;
#endif
}

Scratch::~Scratch() { release(data_); }

char* Scratch::get(size_t bytes) {
    if (bytes <= size_) return data_;
    release(data_);
    size_ = round_up(bytes, bytes >= kHuge ? kHuge : 4096);
    data_ = allocate(size_);
    if (!data_) size_ = 0;
    return data_;
}

void Scratch::trim() {
    if (size_ <= kKeep) return;
    release(data_);
    data_ = nullptr;
    size_ = 0;
}

}  // namespace hop

void hop_use_threads(hop_threads run) { hop::run_on = run; }
