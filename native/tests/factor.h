// A random operand of a product.
#pragma once
#include <vector>

#include "buffers.h"
#include "numbers.h"

constexpr int64_t kAll = int64_t(1) << 62;  // a block with all elements

// One value per block, as described by hop_scale, with its data.
struct Blocks {
    hop_scale at{HOP_NONE, 1.f, 1, kAll, 0, 0};
    Buffer data;

    int64_t index(int64_t row, int64_t k) const { return row / at.rows * at.row_stride + k / at.ks * at.k_stride; }
    // Chooses strides; returns the number of elements that they span.
    int64_t lay_out(Chance& chance, int64_t rows, int64_t k) {
        const int64_t down = (rows + at.rows - 1) / at.rows, across = at.ks == kAll ? 1 : (k + at.ks - 1) / at.ks;
        if (chance.once_in(3)) at.row_stride = 1, at.k_stride = down + chance.below(2);
        else at.k_stride = 1, at.row_stride = across + chance.below(2);
        if (down == 1 && chance.once_in(2)) at.row_stride = 0;
        if (across == 1 && chance.once_in(2)) at.k_stride = 0;
        return down == 0 || across == 0 ? 0 : (down - 1) * at.row_stride + (across - 1) * at.k_stride + 1;
    }
};

struct Factor {
    hop_operand o{};
    int64_t rows = 0, k = 0;
    Blocks scale, fold;
    Buffer codes, tiled, zero;
    hop_steps steps{};            // between the members of a batch
    int64_t member = 0;           // the batch member to read
    std::vector<double> numbers;  // of that member, in units of the scale

    int64_t at(int64_t row, int64_t i) const { return row * o.row_stride + i * o.k_stride; }
    int32_t zero_at(int64_t row, int64_t i) const {
        return o.zero_format == HOP_NONE ? o.zero
                                         : static_cast<int32_t>(element(
                                               o.zero_format, zero.data() + member * steps.zero, scale.index(row, i)));
    }
    int32_t sum_of_codes(int64_t of_batch, int64_t row) const {
        int32_t sum = 0;
        for (int64_t i = 0; i < k; ++i)
            sum += static_cast<int32_t>(element(o.format, codes.data() + of_batch * steps.codes, at(row, i)));
        return sum;
    }
    void choose(int64_t of_batch) {
        member = of_batch;
        numbers.resize(static_cast<size_t>(rows * k));
        for (int64_t i = 0; i < rows * k; ++i) numbers[static_cast<size_t>(i)] = decoded(i / k, i % k);
    }
    double number(int64_t row, int64_t i) const { return numbers[static_cast<size_t>(row * k + i)]; }
    double decoded(int64_t row, int64_t i) const {
        const double x = element(o.format, codes.data() + member * steps.codes, at(row, i)) - zero_at(row, i);
        const double y = o.fold.format == HOP_NONE
                             ? x
                             : x * element(o.fold.format, fold.data.data() + member * steps.fold, fold.index(row, i));
        return rounded(y, 60, -1074, 128);  // bfloat16 has no larger exponents
    }
    float scale_at(int64_t row, int64_t i) const {
        if (o.scale.format == HOP_NONE || (k == 0 && o.scale.ks < kAll)) return 1.f;  // there are no blocks
        return static_cast<float>(
                   element(o.scale.format, scale.data.data() + member * steps.scale, scale.index(row, i))) *
               o.scale.factor;
    }
    const void* data() const { return o.layout == HOP_TILED ? tiled.data() : codes.data(); }
};

inline float random_scale(Chance& chance, bool nasty) {
    if (nasty && chance.once_in(8))
        return chance.one_of({0.f, -0.f, 0x1p-140f, -0x1.8p-130f, 1e30f, INFINITY, -INFINITY, NAN});
    return static_cast<float>(std::ldexp(chance.real() + 0.5, static_cast<int>(chance.between(-12, 4))) *
                              (chance.once_in(8) ? -1 : 1));
}

// Fills codes; infinite or NaN ones only if `nasty`. Long runs of the largest code make sums large.
inline void fill_codes(Chance& chance, Factor& f, bool nasty) {
    const int format = f.o.format;
    auto* bytes = f.codes.data<uint8_t>();
    const int64_t kind = chance.below(4);
    for (size_t i = 0; i < f.codes.bytes(); ++i) {
        auto byte = static_cast<uint8_t>(kind == 0 && format == HOP_INT8 ? 0x80
                                         : kind == 1 && whole(format)    ? 0xff
                                                                         : chance.bits());
        if (!nasty && format == HOP_E4M3 && (byte & 127) == 127) byte ^= 1;
        if (!nasty && format == HOP_E5M2 && (byte & 127) >= 124) byte ^= 64;
        bytes[i] = byte;
    }
    if (format != HOP_BFLOAT16) return;
    for (size_t i = 0; i < f.codes.bytes() / 2; ++i) {
        const auto bits = static_cast<uint32_t>(chance.bits());
        const uint32_t exponent =
            nasty && chance.once_in(4) ? chance.one_of<uint32_t>({0, 1, 254, 255}) : 110 + bits % 24;
        f.codes.data<uint16_t>()[i] = static_cast<uint16_t>((bits >> 8 & 0x807f) | exponent << 7);
    }
}

// The size of a batch of operands of `bytes` bytes, either shared or one after another; sets the step.
inline int64_t batched(Chance& chance, int64_t batch, int64_t bytes, int64_t unit, int64_t& step) {
    step = batch == 1 || chance.once_in(4) ? 0 : bytes + chance.below(3) * unit;
    return bytes == 0 ? 0 : (batch - 1) * step + bytes;
}

// `group`: the number of k that share a scale, in at least one operand; kAll if all do.
inline Factor random_factor(Chance& chance, int format, int64_t batch, int64_t rows, int64_t k, int64_t group,
                            bool integers, bool nasty) {
    Factor f;
    f.rows = rows, f.k = k;
    f.o.format = format;
    const int unit = bytes_of(format);
    const int64_t pad = chance.once_in(2) ? chance.below(20) : 0;
    f.o.row_stride = k + pad, f.o.k_stride = 1;
    if (narrow(format)) f.o.row_stride += f.o.row_stride & 1;
    else if (chance.once_in(4)) f.o.k_stride = rows + pad, f.o.row_stride = 1;
    else if (chance.once_in(6)) f.o.k_stride = 3, f.o.row_stride = 3 * k + pad;
    const int64_t span = rows && k ? f.at(rows - 1, k - 1) + 1 : 0;
    const int64_t bytes = narrow(format) ? (span + 1) / 2 : span * unit;
    f.codes = Buffer(chance, batched(chance, batch, bytes, unit, f.steps.codes), unit);
    fill_codes(chance, f, nasty);

    f.scale.at.rows = chance.one_of<int64_t>({1, 1, 1, 2, 3, 16, 32, 128, kAll});
    f.scale.at.ks = group;
    if (chance.once_in(8)) f.scale.at.factor = 0.37f;
    const int64_t blocks = f.scale.lay_out(chance, rows, k);
    if (!chance.once_in(4)) {
        f.scale.at.format = HOP_FLOAT32;
        f.scale.data = Buffer(chance, batched(chance, batch, blocks * 4, 4, f.steps.scale), 4);
        for (size_t i = 0; i < f.scale.data.bytes() / 4; ++i)
            f.scale.data.data<float>()[i] = random_scale(chance, nasty);
    }
    const bool may = integers || format == HOP_UINT4;
    if (may && chance.once_in(3)) {
        f.o.zero_format = integers ? chance.one_of({HOP_INT8, HOP_UINT8}) : HOP_UINT8;
        f.zero = Buffer(chance, batched(chance, batch, blocks, 1, f.steps.zero), 1);
        for (size_t i = 0; i < f.zero.bytes(); ++i)
            f.zero.data<uint8_t>()[i] =
                static_cast<uint8_t>(narrow(format) && !nasty ? chance.below(16) : chance.bits());
    } else if (may && chance.once_in(3)) {
        f.o.zero = static_cast<int32_t>(narrow(format)       ? chance.below(16)
                                        : format == HOP_INT8 ? chance.between(-128, 127)
                                                             : chance.below(256));
    }
    f.o.scale = f.scale.at;

    const bool small = format == HOP_E2M1, folds = !integers && (small || format == HOP_E4M3 || format == HOP_E5M2);
    if (folds && chance.once_in(2)) {
        f.fold.at.format =
            small ? chance.one_of({HOP_E4M3, HOP_E8M0, HOP_FLOAT32}) : chance.one_of({HOP_E8M0, HOP_FLOAT32});
        f.fold.at.rows = chance.one_of<int64_t>({1, 1, 16, 32, kAll});
        f.fold.at.ks = chance.one_of<int64_t>({4, 16, 32, 32, 128, kAll});
        const int64_t count = f.fold.lay_out(chance, rows, k);
        const int64_t each = bytes_of(f.fold.at.format);
        f.fold.data = Buffer(chance, batched(chance, batch, count * each, each, f.steps.fold), each);
        for (size_t i = 0; i < f.fold.data.bytes() / static_cast<size_t>(each); ++i) {
            const auto exponent =
                static_cast<int>(nasty && chance.once_in(4) ? chance.below(256) : chance.between(117, 135));
            const bool signed_too = small && nasty && chance.once_in(2);
            if (f.fold.at.format == HOP_FLOAT32)
                f.fold.data.data<float>()[i] = static_cast<float>(std::ldexp(chance.once_in(9) ? 0
                                                                             : signed_too      ? -1.25
                                                                                               : 1,
                                                                             exponent - 127));
            else if (f.fold.at.format == HOP_E8M0) f.fold.data.data<uint8_t>()[i] = static_cast<uint8_t>(exponent);
            else f.fold.data.data<uint8_t>()[i] = static_cast<uint8_t>(nasty ? chance.bits() : chance.below(127));
        }
        f.o.fold = f.fold.at;
    } else {
        f.o.fold = hop_scale{HOP_NONE, 1.f, 1, kAll, 0, 0};
    }
    return f;
}
