// Tests attention (hop_attend) with random operands of random sizes and strides, in buffers of exactly the required
// size, for sanitizers. All levels of instructions and numbers of threads must agree.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "buffers.h"

#include "hop.h"
#include "threads.h"

namespace {

constexpr int64_t kWords = 4;  // bytes of a float32

void set_strides(int64_t (&stride)[3], int64_t heads, int64_t tokens, int64_t width, bool tokens_first) {
    stride[0] = heads * tokens * width;
    stride[1] = tokens_first ? width : tokens * width;
    stride[2] = tokens_first ? heads * width : width;
}

Buffer codes(Chance& chance, int64_t count) {
    Buffer made(chance, count, 1);
    const bool lowest = chance.once_in(9);
    for (int64_t i = 0; i < count; ++i) made.data<uint8_t>()[i] = lowest ? 128 : static_cast<uint8_t>(chance.bits());
    return made;
}

Buffer scales(Chance& chance, int64_t count) {
    Buffer made(chance, count * kWords, kWords);
    const float size = std::ldexp(1.0f, static_cast<int>(chance.between(-12, -2)));
    const bool nasty = chance.once_in(5);
    for (int64_t i = 0; i < count; ++i) {
        made.data<float>()[i] = static_cast<float>(chance.real()) * size;
        if (nasty && chance.once_in(20)) made.data<float>()[i] = chance.one_of<float>({NAN, INFINITY, -1.0f, 0.0f, 1e30f});
    }
    return made;
}

struct Case {
    hop_attention a{};
    Buffer q, k, v, of_q, of_k, of_v, mask;

    explicit Case(Chance& chance) {
        a.batch = chance.between(1, 2), a.key_heads = chance.between(1, 3), a.heads = a.key_heads * chance.between(1, 3);
        a.queries = chance.once_in(3) ? 1 : chance.between(1, 70), a.keys = chance.between(1, 200);
        a.width = chance.between(1, 80), a.value_width = chance.between(1, 90);
        a.scale = 0.125f, a.is_causal = chance.once_in(3), a.per_token = chance.once_in(2);
        a.mask = a.is_causal ? HOP_MASK_NONE : chance.one_of<int32_t>({HOP_MASK_NONE, HOP_MASK_BOOL, HOP_MASK_FLOAT});
        a.result_dtype = chance.one_of<int32_t>({HOP_F32, HOP_BF16, HOP_F16});
        const bool tokens_first = chance.once_in(2);
        set_strides(a.q_stride, a.heads, a.queries, a.width, tokens_first);
        set_strides(a.k_stride, a.key_heads, a.keys, a.width, tokens_first);
        set_strides(a.v_stride, a.key_heads, a.keys, a.value_width, tokens_first);
        set_strides(a.q_scale_stride, a.heads, a.queries, 1, false);
        set_strides(a.k_scale_stride, a.key_heads, a.keys, 1, false);
        const int64_t values = a.per_token ? a.keys : a.value_width;
        set_strides(a.v_scale_stride, a.key_heads, values, 1, false);
        q = codes(chance, a.batch * a.q_stride[0]), k = codes(chance, a.batch * a.k_stride[0]);
        v = codes(chance, a.batch * a.v_stride[0]);
        of_q = scales(chance, a.batch * a.heads * a.queries), of_k = scales(chance, a.batch * a.key_heads * a.keys);
        of_v = scales(chance, a.batch * a.key_heads * values);
        if (a.mask) hide(chance);
    }

    void hide(Chance& chance) {
        a.mask_stride[1] = chance.once_in(2) ? a.queries * a.keys : 0;
        a.mask_stride[2] = chance.once_in(3) ? 0 : a.keys;
        const int64_t count = (a.mask_stride[1] ? a.heads : 1) * a.queries * a.keys;
        const bool floats = a.mask == HOP_MASK_FLOAT;
        mask = Buffer(chance, floats ? count * kWords : count, floats ? kWords : 1);
        for (int64_t i = 0; i < count; ++i) {
            if (floats) mask.data<float>()[i] = chance.once_in(4) ? -INFINITY : static_cast<float>(chance.real());
            else mask.data<uint8_t>()[i] = chance.once_in(2);
        }
    }

    Buffer run(Chance& chance, int threads) const {
        const int64_t size = a.result_dtype == HOP_F32 ? 4 : 2, count = a.batch * a.heads * a.queries * a.value_width;
        Buffer made(chance, count * size, size);
        made.fill(0x5a);
        if (hop_attend(&a, q.data<int8_t>(), of_q.data<float>(), k.data<int8_t>(), of_k.data<float>(), v.data<int8_t>(),
                       of_v.data<float>(), mask.data(), made.data(), threads) != HOP_OK) {
            std::printf("no result\n");
            std::exit(1);
        }
        for (int64_t i = 0; i < count; ++i) {  // NaN may have any sign and payload
            if (size == 4 && std::isnan(made.data<float>()[i])) made.data<uint32_t>()[i] = 0x7fc00000;
            if (size == 2 && (made.data<uint16_t>()[i] & 0x7fff) > (a.result_dtype == HOP_BF16 ? 0x7f80 : 0x7c00))
                made.data<uint16_t>()[i] = 0x7fff;
        }
        return made;
    }
};

}  // namespace

int main(int argc, char** argv) {
    const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0;
    const int64_t cases = argc > 2 ? std::strtoll(argv[2], nullptr, 10) : 300;
    const int best = hop_best_level();
    for (int64_t i = 0; i < cases; ++i) {
        Chance chance(seed * 1000003 + static_cast<uint64_t>(i));
        const Case c(chance);
        hop_use_level(0);
        const Buffer want = c.run(chance, 1);
        for (int level = 0; level <= best; ++level) {
            if (!hop_has_level(level)) continue;
            hop_use_level(level);
            const Buffer got = c.run(chance, static_cast<int>(chance.between(1, 3)));
            if (std::memcmp(want.data(), got.data(), want.bytes())) {
                std::printf("seed %llu, case %lld, level %d differs\n", static_cast<unsigned long long>(seed),
                            static_cast<long long>(i), level);
                return 1;
            }
        }
    }
    std::printf("%lld cases, levels 0 to %d: equal\n", static_cast<long long>(cases), best);
    return 0;
}
