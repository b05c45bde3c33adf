// Optimizer steps (update.h) at one level.
namespace {
#include "quantize/elements.h"
#include HOP_HEADER(quantize/noise)
#include "update/run.h"
#if defined(HOP_IN_AVX512)
#include "quantize/decoding.h"
#include "update/adam_avx512.h"
#elif defined(HOP_IN_AVX2)
#include "quantize/decoding.h"
#include "update/adam_avx2.h"
#else
#include "update/plain.h"
#endif
}  // namespace

// Updates all elements, some steps of kStep at a time.
int update(const hop_update& u, int threads) {
    const int64_t parts = divide_up(u.count, kStep);
    const int used = worth(threads, u.count, kLarge / 4);
    Queue queue(parts, grain_of(parts, kStep, used));
    parallel(used, [&](int, int) {
        Lines lines;
        for (int64_t i, end; queue.take(i, end);) {
            const int64_t last = least(end * kStep, u.count);
            for (int64_t at = update_quickly(u, i * kStep, last, lines); at < last; at += kStep)
                update_part(u, at, least(kStep, last - at), lines);
        }
    });
    return HOP_OK;
}
