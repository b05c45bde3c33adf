// Transposes matrices with elements of 1, 2 or 4 bytes.
#include <algorithm>
#include <cstring>

#include "hop.h"
#include "common/parallel.h"

namespace hop {
namespace {
#include "common/transpose.h"
#include "common/transpose_lines.h"

template <class T>
void transpose(int64_t batch, int64_t rows, int64_t cols, const T* in, T* out, int threads) {
    constexpr int64_t kSide = kLine / sizeof(T);
    const int64_t across = (cols + kSide - 1) / kSide;
    Queue queue(batch * across);
    parallel(worth(threads, batch * rows * cols, 65536), [&](int, int) {
        for (int64_t at, end; queue.take(at, end);) {
            const int64_t first = at % across * kSide, width = std::min(kSide, cols - first);
            const T* from = in + at / across * rows * cols + first;
            T* to = out + at / across * rows * cols + first * rows;
            int64_t i = 0;
            for (; width == kSide && i + kSide <= rows; i += kSide) {
                for (int64_t k = 0; i + 2 * kSide <= rows && k < kSide; ++k) {  // hardware does not prefetch such
                                                                                // strides
                    __builtin_prefetch(from + (i + kSide + k) * cols, 0);
                    __builtin_prefetch(to + k * rows + i + kSide, 1);
                }
                transpose_lines(from + i * cols, cols, to + i, rows);
            }
            for (; i < rows; ++i)
                for (int64_t j = 0; j < width; ++j) to[j * rows + i] = from[i * cols + j];
        }
    });
}

}  // namespace
}  // namespace hop

int hop_transpose(int64_t batch, int64_t rows, int64_t cols, int32_t bytes, const void* in, void* out, int32_t threads) {
    const auto run = [&](auto of) {
        using T = decltype(of);
        hop::transpose(batch, rows, cols, static_cast<const T*>(in), static_cast<T*>(out), threads);
        return HOP_OK;
    };
    switch (bytes) {
        case 1: return run(uint8_t{});
        case 2: return run(uint16_t{});
        case 4: return run(uint32_t{});
        default: return HOP_UNSUPPORTED;
    }
}
