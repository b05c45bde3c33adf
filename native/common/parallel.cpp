#include "common/parallel.h"

#include <cstdlib>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace hop {
namespace {

// The entry points of libgomp, which LLVM's and Intel's runtimes offer as well.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
    int (*index)() = nullptr;
    int (*count)() = nullptr;

    OpenMP() {
#if defined(__unix__) || defined(__APPLE__)
        parallel = reinterpret_cast<decltype(parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
        index = reinterpret_cast<decltype(index)>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
        count = reinterpret_cast<decltype(count)>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
        // The threads of a pool do not survive fork, and libgomp would wait for them forever.
        pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
    }
    bool usable() const { return parallel && index && count && !forked; }
    static inline std::atomic<bool> forked{false};
};

const OpenMP& openmp() {
    static const OpenMP found;
    return found;
}

struct Region {
    void (*body)(void*, int, int);
    void* context;
};

}  // namespace

void run_parallel(int threads, void (*body)(void*, int, int), void* context) {
    if (threads <= 1 || !openmp().usable()) return body(context, 0, 1);
    Region region{body, context};
    openmp().parallel(
        [](void* data) {
            const auto& r = *static_cast<Region*>(data);
            r.body(r.context, openmp().index(), openmp().count());
        },
        &region, static_cast<unsigned>(threads), 0);
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
