#include "cpu.h"

#include <atomic>

#include "hop.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hop {
namespace {

#if defined(__x86_64__)
bool has_amx() {
#if defined(__linux__)
    unsigned a, b, c, d;
    __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
    if ((d & wanted) != wanted) return false;
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

Level detect() {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return Level::portable;
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
    if (!avx512) return Level::avx2;
    return __builtin_cpu_supports("avx512bf16") && has_amx() ? Level::amx : Level::avx512;
}
#else
Level detect() { return Level::portable; }
#endif

std::atomic<int> asked{static_cast<int>(Level::amx)};

}  // namespace

Level best_level() {
    static const Level found = detect();
    return found;
}

Level level() {
    const int most = asked.load(std::memory_order_relaxed);
    return most < static_cast<int>(best_level()) ? static_cast<Level>(most) : best_level();
}

}  // namespace hop

int hop_version() { return 5; }
int hop_best_level() { return static_cast<int>(hop::best_level()); }
int hop_use_level(int level) { return hop::asked.exchange(level); }
