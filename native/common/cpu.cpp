#include "common/cpu.h"

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

Cpu detect() {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return HOP_PORTABLE;
    const bool plain = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!plain) return HOP_AVX2;
    if (!(__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"))) return HOP_AVX512_PLAIN;
    if (!__builtin_cpu_supports("avx512bf16")) return HOP_AVX512_VNNI;
    return has_amx() ? HOP_AMX_TILES : HOP_AVX512_BF16;
}
#else
Cpu detect() { return HOP_PORTABLE; }
#endif

std::atomic<int> asked{HOP_AMX_TILES};

}  // namespace

Cpu best_cpu() {
    static const Cpu found = detect();
    return found;
}

Level level() {
    constexpr Level of[] = {Level::portable, Level::avx2, Level::avx2, Level::avx512, Level::avx512_bf16, Level::amx};
    const int most = asked.load(std::memory_order_relaxed);
    return of[most < best_cpu() ? most : best_cpu()];
}

}  // namespace hop

int hop_version() { return 10; }
int hop_best_level() { return hop::best_cpu(); }
int hop_use_level(int level) { return hop::asked.exchange(level); }
