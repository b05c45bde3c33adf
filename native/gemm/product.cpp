#include "gemm/product.h"

#include <atomic>
#include <cstring>

#include "common/cpu.h"
#include "common/isa.h"
#include "gemm/few_sums.h"

namespace hop {
namespace {

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

int64_t group_of(const hop_product& p) {
    int64_t group = p.k;
    for (const hop_operand* o : {&p.lhs, &p.rhs})
        if (o->scale.format != HOP_NONE || o->zero_format != HOP_NONE) group = smaller(group, o->scale.ks);
    return group > 0 ? group : 1;
}

constexpr int64_t kWhole = int64_t(1) << 40;  // blocks of at least this many k contain all k

bool is_factor(const hop_operand& o) { return o.format >= HOP_INT8 && o.format <= HOP_E5M2; }

}  // namespace

Job::Job(const hop_product& product, int count) : p(product), threads(count) {
    slices = ceil_div(p.k, kSlice);
    if (slices == 0) {  // an empty sum, computed from tiles of zeros
        slices = 1;
        p.rhs.layout = HOP_STRIDED;
        for (hop_operand* o : {&p.lhs, &p.rhs})
            if (o->scale.ks < kWhole) o->scale.format = o->zero_format = HOP_NONE;  // there are no blocks
    }
    group = group_of(p);
    groups = ceil_div(p.k, group);
    if (groups < 1) groups = 1;
}

}  // namespace hop

using namespace hop;

const char* hop_product_declines(const hop_product* p) {
    const int64_t group = group_of(*p);
    if (group < p->k && group != 16 && group != 32 && group % kSlice)
        return "scales along the summed dimension have groups other than 16, 32 or multiples of 64";
    for (const hop_operand* o : {&p->lhs, &p->rhs}) {
        if (o->fold.format != HOP_NONE && o->fold.ks < p->k && o->fold.ks % 4)
            return "block scales along the summed dimension have blocks below four elements";
        if (o->scale.ks < p->k && o->scale.ks % group) return "the two factors have different groups along the summed dimension";
    }
    if (!is_factor(p->rhs)) return "the right factor is not quantized";
    const bool sum = p->output.format == HOP_INT32 || p->output.bias_format == HOP_INT32 ||
                     ((p->output.format == HOP_INT8 || p->output.format == HOP_UINT8) && p->output.requantize != HOP_DIVISION &&
                      p->output.requantize != HOP_RECIPROCAL);
    if (sum && group < p->k) return "codes or an integer bias need one sum, but each group has its own";
    if (by_integers(*p)) return nullptr;
    if (sum) return "codes or an integer bias need a sum of integers";
    if (p->lhs.format != HOP_BFLOAT16 && (!is_factor(p->lhs) || is_integer(p->lhs.format)))
        return "the left factor is neither bfloat16 nor an 8-bit or 4-bit float";
    if (p->rhs.format != HOP_UINT4 && (p->rhs.zero_format != HOP_NONE || p->rhs.zero != 0))
        return "only uint4 codes that are converted to bfloat16 have zero points";
    return nullptr;
}

namespace {

#include "gemm/narrow_tile.h"

#if defined(__x86_64__)
constexpr Level kLastOfFewSums = Level::avx512_plain;
#else
constexpr Level kLastOfFewSums = Level::portable;
#endif

hop_data step(const hop_data& data, const hop_steps& by, int64_t i) {
    const auto at = [i](const void* p, int64_t bytes) -> const void* {
        return p ? static_cast<const char*>(p) + i * bytes : nullptr;
    };
    return {at(data.codes, by.codes), at(data.scale, by.scale), at(data.zero, by.zero), at(data.fold, by.fold), nullptr};
}

int multiply(Job& job) {
    // Measured with AVX2 and in plain C++; levels above avx512_plain pack.
    if (takes_few_sums(job) && level() <= kLastOfFewSums) {
#if defined(__x86_64__)
        if (level() > Level::portable) return avx2::few_sums(job), HOP_OK;
#endif
        return portable::few_sums(job), HOP_OK;
    }
    const bool integers = by_integers(job.p);
    switch (level()) {
#if HOP_HAS_AVX512
        case Level::amx: return integers ? amx::integers(job) : amx::floats(job);
        case Level::avx512_bf16:
            if (job.p.lhs.format == HOP_FLOAT32 || job.p.lhs.format == HOP_FLOAT16) return avx512_plain::floats(job);
            return integers ? avx512::integers(job) : avx512_bf16::floats(job);
        case Level::avx512: return integers ? avx512::integers(job) : avx512_plain::floats(job);
        case Level::avx512_plain: return integers ? avx512_plain::integers(job) : avx512_plain::floats(job);
#endif
#if defined(__x86_64__)
        case Level::avx_vnni: return integers ? avx_vnni::integers(job) : avx2::floats(job);
        case Level::avx2: return integers ? avx2::integers(job) : avx2::floats(job);
#elif defined(__AARCH64EL__)
#if HOP_NEON_TARGETS
        case Level::neon_bf16: return integers ? neon_i8mm::integers(job) : neon_bf16::floats(job);
        case Level::neon_i8mm: return integers ? neon_i8mm::integers(job) : neon::floats(job);
        case Level::neon_dotprod: return integers ? neon_dotprod::integers(job) : neon::floats(job);
#endif
        case Level::neon: return integers ? neon::integers(job) : neon::floats(job);
#endif
        default: return integers ? portable::integers(job) : portable::floats(job);
    }
}

}  // namespace

int hop_multiply(const hop_product* product, int threads, const hop_data* lhs, const hop_data* rhs, const void* bias,
                 const void* output_scale, const void* output_zero, void* output) {
    if (product->m == 0 || product->n == 0) return HOP_OK;
    const int64_t batch = product->batch < 1 ? 1 : product->batch;
    std::atomic<int> error{HOP_OK};
    const auto member = [&](int64_t i, int own_threads) {
        Job job(*product, own_threads);
        job.lhs = step(*lhs, product->lhs_step, i);
        job.rhs = step(*rhs, product->rhs_step, i);
        if (rhs->sums) job.rhs.sums = rhs->sums + i * product->n;
        job.bias = bias, job.output_scale = output_scale, job.output_zero = output_zero;
        job.output = static_cast<char*>(output) + i * product->output_step;
        if (const int found = multiply(job)) error = found;
    };
    if (batch < threads) {
        for (int64_t i = 0; i < batch; ++i) member(i, threads);
        return error;
    }
    Queue queue(batch);
    const int64_t work = product->m * product->n * product->k / 1024 + 1;
    parallel(worth(threads, batch * work, 1024), [&](int, int) {
        for (int64_t begin, end; queue.take(begin, end);) member(begin, 1);
    });
    return error;
}

int hop_pack(const hop_operand* operand, int64_t rows, int64_t k, int threads, const void* codes, void* tiled) {
    const bool narrow = is_narrow(operand->format);
    const int64_t slices = ceil_div(k, kSlice), tiles = ceil_div(rows, kBlock) * 2 * slices;
    use_huge_pages(tiled, static_cast<size_t>(tiles * (narrow ? kTile / 2 : kTile)));
    Queue queue(tiles, 64);
    parallel(worth(threads, tiles, 64), [&](int, int) {
        int64_t begin, end;
        uint8_t tile[kTile];
        while (queue.take(begin, end))
            for (int64_t i = begin; i < end; ++i) {
                const int64_t first = i / (2 * slices) * kBlock + i % 2 * kRows, slice = i / 2 % slices;
                pack_tile(*operand, codes, rows, k, first, slice, tile);
                auto* out = static_cast<uint8_t*>(tiled) + i * (narrow ? kTile / 2 : kTile);
                if (narrow) narrow_tile(tile, out);
                else std::memcpy(out, tile, kTile);
            }
    });
    return HOP_OK;
}
