#include "common/cpu.h"

#include <atomic>

#include "hop.h"

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__AARCH64EL__)
#include "common/isa.h"
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#endif

#if defined(__linux__) && defined(__x86_64__)
// Whether trapping AVX-VNNI instructions are emulated. Only tests load a library that defines this
// (native/tests/emulation/avx_vnni.cpp).
extern "C" __attribute__((weak, visibility("default"))) int hop_emulates_avx_vnni();
#endif

namespace hop {
namespace {

#if defined(__x86_64__)
// What CPUID returns for leaf 7, which CPUs with AVX2 have.
struct Features {
    unsigned a, b, c, d;
    explicit Features(unsigned subleaf) { __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(subleaf)); }
};

bool has_amx() {
#if defined(__linux__)
    const unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // bf16, tile, int8
    if ((Features(0).d & wanted) != wanted) return false;
    constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

// Requires AVX2: the operating system needs no support beyond the AVX2 registers.
bool has_avx_vnni() {
#if defined(__linux__)
    if (hop_emulates_avx_vnni && hop_emulates_avx_vnni()) return true;
#endif
    return Features(0).a >= 1 && (Features(1).a >> 4 & 1) != 0;  // subleaf 0: the number of the last one
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}

Cpu detect() {
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) return HOP_PORTABLE;
    if (!HOP_HAS_AVX512 || !has_avx512()) return has_avx_vnni() ? HOP_AVX_VNNI : HOP_AVX2;
    if (!(__builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni"))) return HOP_AVX512_PLAIN;
    if (!__builtin_cpu_supports("avx512bf16")) return HOP_AVX512_VNNI;
    return has_amx() ? HOP_AMX_TILES : HOP_AVX512_BF16;
}
constexpr Cpu kMost = HOP_AMX_TILES;
constexpr Level kLevels[] = {Level::portable, Level::avx2, Level::avx_vnni, Level::avx512_plain, Level::avx512, Level::avx512_bf16, Level::amx};

bool has(int cpu) {
    static const bool vnni = best_cpu() >= HOP_AVX2 && has_avx_vnni();
    return cpu >= 0 && cpu <= best_cpu() && (cpu != HOP_AVX_VNNI || vnni);
}
#elif defined(__AARCH64EL__)
// Support for dot products of four bytes, for int8 tiles, and for bfloat16 tiles.
struct Features {
    bool dotprod = false, i8mm = false, bf16 = false;
};

#if defined(__linux__)
Features features() {
    const unsigned long own = getauxval(AT_HWCAP), more = getauxval(AT_HWCAP2);  // bits as in recent versions of asm/hwcap.h
    return {(own >> 20 & 1) != 0, (more >> 13 & 1) != 0, (more >> 14 & 1) != 0};
}
#elif defined(__APPLE__)
bool has(const char* name) {
    int found = 0;
    size_t size = sizeof(found);
    return sysctlbyname(name, &found, &size, nullptr, 0) == 0 && found != 0;
}
Features features() {
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_I8MM"), has("hw.optional.arm.FEAT_BF16")};
}
#else
Features features() { return {}; }
#endif

Cpu detect() {
    const Features f = features();
    if (!f.dotprod || !HOP_NEON_TARGETS) return HOP_NEON;
    if (!f.i8mm) return HOP_NEON_DOTPROD;
    return f.bf16 ? HOP_NEON_BF16 : HOP_NEON_I8MM;
}
constexpr Cpu kMost = HOP_NEON_BF16;
constexpr Level kLevels[] = {Level::portable, Level::neon, Level::neon_dotprod, Level::neon_i8mm, Level::neon_bf16};
bool has(int cpu) { return cpu >= 0 && cpu <= best_cpu(); }
#else
Cpu detect() { return HOP_PORTABLE; }
constexpr Cpu kMost = HOP_PORTABLE;
constexpr Level kLevels[] = {Level::portable};
bool has(int cpu) { return cpu == HOP_PORTABLE; }
#endif

std::atomic<int> asked{kMost};
std::atomic<int> reorders{0};

}  // namespace

Cpu best_cpu() {
    static const Cpu found = detect();
    return found;
}

Level level() {
    int most = asked.load(std::memory_order_relaxed);
    if (most > best_cpu()) most = best_cpu();
    while (most > 0 && !has(most)) --most;
    if (most < 0) most = 0;
    return kLevels[most];
}

bool reorders_few_rows() { return reorders.load(std::memory_order_relaxed) != 0; }

}  // namespace hop

int hop_version() { return 15; }
int hop_best_level() { return hop::best_cpu(); }
int hop_lacks_avx512() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return !HOP_HAS_AVX512 && hop::has_avx512();
#else
    return 0;
#endif
}
int hop_has_level(int level) { return hop::has(level); }
int hop_use_level(int level) { return hop::asked.exchange(level); }
int hop_reorder_few_rows(int yes) { return hop::reorders.exchange(yes != 0); }
