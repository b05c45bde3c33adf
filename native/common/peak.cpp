// Measures the throughput of the matrix unit and of memory: the two limits of a roofline.
#include <atomic>
#include <chrono>
#include <cstring>

#include "common/cpu.h"
#include "hop.h"
#include "common/parallel.h"

#if HOP_HAS_AVX512
#include <immintrin.h>

#include "common/isa.h"

HOP_BEGIN_TARGET(HOP_TARGET_AMX)
namespace hop {
namespace amx {

#include "common/registers_amx.h"

// Multiplies tiles that stay in registers.
void multiply_tiles(int64_t count) {
    const Registers registers(16, 16);
    alignas(64) uint8_t tile[1024] = {};
    written();
    _tile_loadd(4, tile, 64);
    _tile_loadd(5, tile, 64);
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile, 64);
    for (int64_t i = 0; i < count; ++i) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
    }
}

}  // namespace amx
}  // namespace hop
HOP_END_TARGET
#endif

namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class Work>
double timed(int threads, Work work) {
    hop::Barrier ready, done;
    double begin = 0;
    hop::parallel(threads, [&](int index, int team) {
        ready.wait(team);
        if (index == 0) begin = seconds();
        work(index, team);
        done.wait(team);
    });
    return seconds() - begin;
}

}  // namespace

double hop_peak(int threads) {
#if HOP_HAS_AVX512
    if (hop::level() == hop::Level::amx) {
        constexpr int64_t count = 200000;
        std::atomic<int> team{1};
        const double time = timed(threads, [&](int, int size) {
            team = size;
            hop::amx::multiply_tiles(count);
        });
        return 2.0 * 4 * 16 * 16 * 64 * count * team / time;
    }
#endif
    (void)threads;
    return 0;
}

double hop_bandwidth(int threads, const void* data, int64_t bytes) {
    std::atomic<uint64_t> sink{0};
    const double time = timed(threads, [&](int index, int team) {
        const auto* words = static_cast<const uint64_t*>(data);
        const int64_t size = bytes / 8, first = size * index / team, last = size * (index + 1) / team;
        uint64_t sums[16] = {};
        int64_t i = first;
        for (; i + 16 <= last; i += 16)
            for (int j = 0; j < 16; ++j) sums[j] += words[i + j];
        for (int j = 0; j < 16; ++j) sink += sums[j];
    });
    return static_cast<double>(bytes) / time;
}
