// Weights with a scale for each group of a row, and results of products with them. Included in a namespace (isa.h),
// after the lanes of a level.

constexpr int64_t kChunk = 32;                    // elements decoded at a time
constexpr int64_t kBlockBytes = 512 << 10;        // bytes of rows of x that are multiplied by a strip
constexpr int64_t kFetched = 4 << 10;             // prefetch distance in bytes
constexpr int64_t kWorthAThread = int64_t(1) << 16;  // least number of products that is worth a thread

// Bytes of a chunk: its codes, and their high bits.
constexpr int64_t codes_of_chunk(int bits) { return bits == 8 ? 32 : bits < 4 ? 8 : 16; }
constexpr int64_t high_of_chunk(int bits) { return bits == 6 ? 8 : bits == 3 || bits == 5 ? 4 : 0; }

// The properties of a weight for which code is compiled separately.
template <int B, bool P, bool O>
struct Form {
    static constexpr int kBits = B;
    static constexpr bool kPairs = P, kOffset = O;  // whether each chunk has two scales; whether there are offsets
};

// The scales and offsets of a row of a weight: one or two for each chunk.
struct RowScales {
    const float *scale, *offset;
};

// The addresses of rows of the weight.
class Weight {
public:
    explicit Weight(const GroupCall& call)
        : p_(call.p), d_(call.weight), codes_(p_.k / kChunk * codes_of_chunk(p_.bits)), high_(p_.k / kChunk * high_of_chunk(p_.bits)),
          groups_(p_.k / p_.scales.group), outers_(outers_of(p_)),
          each_(p_.scales.group > kChunk ? p_.scales.group / kChunk : 1), served_(groups_ * each_) {}

    const uint8_t* codes(int64_t row) const { return static_cast<const uint8_t*>(d_.codes) + row * codes_; }
    const uint8_t* high(int64_t row) const { return static_cast<const uint8_t*>(d_.high) + row * high_; }
    int64_t bytes() const { return codes_; }
    int64_t high_bytes() const { return high_; }

    // Prefetches the first lines of a row.
    HOP_ALONE void begin(int64_t row, int64_t bytes) const {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(codes(row) + line, 0, 3);
        if (high_) for (int64_t line = 0; line < bytes / 2; line += 64) __builtin_prefetch(high(row) + line, 0, 3);
    }

    // Prefetches the scales of some rows, possibly none.
    HOP_ALONE void fetch(int64_t row, int64_t rows) const {
        const hop_group_scales& s = p_.scales;
        const auto ask = [row, rows](const void* data, int64_t count, int32_t format) {
            const int64_t each = count * (format == HOP_FLOAT32 ? 4 : is_word(format) ? 2 : 1);
            const auto* at = static_cast<const char*>(data) + row * each;
            for (int64_t line = 0; line < rows * each; line += 64) __builtin_prefetch(at + line, 0, 3);
        };
        ask(d_.scale, groups_, s.format);
        if (p_.has_offset) ask(d_.offset, groups_, s.format);
        if (!s.outer) return;
        ask(d_.outer_scale, outers_, s.outer_format);
        if (p_.has_offset) ask(d_.outer_offset, outers_, s.outer_format);
    }

    // Computes the scales and offsets of some rows, in memory of floats(rows) floats.
    int64_t floats(int64_t rows) const { return rows * (2 * served_ + groups_ + outers_) + kMore; }
    HOP_ALONE void find(int64_t row, int64_t rows, float* memory) const {
        float* rest = memory + rows * 2 * served_;
        serve(row, rows, d_.scale, d_.outer_scale, memory, rest);
        if (p_.has_offset) serve(row, rows, d_.offset, d_.outer_offset, memory + rows * served_, rest);
    }
    RowScales found(int64_t row, int64_t rows, const float* memory) const {
        return {memory + row * served_, memory + (rows + row) * served_};
    }

private:
    static bool is_word(int32_t format) { return format == HOP_FLOAT16 || format == HOP_BFLOAT16; }
    static constexpr int64_t kMore = 16;  // whole lanes may be written past the end

    static int64_t outers_of(const hop_group_product& p) {
        const hop_group_scales& s = p.scales;
        return s.outer_format == HOP_NONE ? 0 : s.outer ? (p.k + s.outer - 1) / s.outer : 1;
    }

    HOP_ALONE void serve(int64_t row, int64_t rows, const void* inner, const void* outer, float* to, float* rest) const {
        const hop_group_scales& s = p_.scales;
        float *own = each_ == 1 ? to : rest, *over = rest + rows * groups_;
        if (!outers_) {
            numbers(s.format, inner, row * groups_, rows * groups_, own);
        } else if (!s.outer) {
            numbers(s.outer_format, outer, 0, 1, over);
            multiply(inner, row * groups_, rows * groups_, over, rows * groups_, own);
        } else {
            numbers(s.outer_format, outer, row * outers_, rows * outers_, over);
            const int64_t under = s.outer / s.group;
            if (groups_ == outers_ * under) multiply(inner, row * groups_, rows * groups_, over, under, own);
            else for (int64_t i = 0; i < rows; ++i) multiply(inner, (row + i) * groups_, groups_, over + i * outers_, under, own + i * groups_);
        }
        for (int64_t i = 0; each_ > 1 && i < rows * groups_; ++i)
            for (int64_t j = 0; j < each_; ++j) to[i * each_ + j] = own[i];
    }

    // Multiplies scales from `first` on by outer scales, each shared by `under` scales.
    HOP_ALONE void multiply(const void* inner, int64_t first, int64_t count, const float* over, int64_t under, float* to) const {
        const hop_group_scales& s = p_.scales;
        const bool is_signed = s.format == HOP_INT8;
        int64_t i = 0;
        if ((is_signed || s.format == HOP_UINT8) && !s.numbers && !s.divided && (under == 8 || under == 16)) {
            const auto* bytes = static_cast<const uint8_t*>(inner) + first;
            for (; i + 16 <= count; i += 16) {
                const Lanes number = under == 8 ? halves(over[i / 8], over[i / 8 + 1]) : all(over[i / 16]);
                store(to + i, times(number, from_bytes(bytes + i, is_signed)));
            }
        }
        numbers(s.format, inner, first + i, count - i, to + i);
        while (i < count) {
            const float number = over[i / under];
            const int64_t next = (i / under + 1) * under, last = next < count ? next : count;
            if (s.divided) for (; i < last; ++i) to[i] = to[i] / number;
            else for (; i < last; ++i) to[i] = number * to[i];
        }
    }

    HOP_ALONE void numbers(int32_t format, const void* data, int64_t first, int64_t count, float* to) const {
        if (format == HOP_FLOAT16) return from_halves(static_cast<const uint16_t*>(data) + first, count, to);
        const auto* bytes = static_cast<const uint8_t*>(data) + first;
        const auto* words = static_cast<const uint16_t*>(data) + first;
        if (format == HOP_FLOAT32) std::memcpy(to, static_cast<const float*>(data) + first, static_cast<size_t>(count) * sizeof(float));
        else if (format == HOP_BFLOAT16) for (int64_t i = 0; i < count; ++i) to[i] = from_bfloat16(words[i]);
        else if (p_.scales.numbers) for (int64_t i = 0; i < count; ++i) to[i] = p_.scales.numbers[bytes[i]];
        else if (format == HOP_INT8) for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(static_cast<int8_t>(bytes[i]));
        else for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(bytes[i]);
    }

    const hop_group_product& p_;
    const hop_group_data& d_;
    int64_t codes_, high_, groups_, outers_, each_, served_;  // bytes, and values, per row; chunks per group
};

// ---- results and memory

class Results {
public:
    explicit Results(const GroupCall& call) : p_(call.p), bias_(call.bias), y_(call.y) {}

    // The place of float32 results without a bias, which need no conversion; null for others.
    float* floats(int64_t row, int64_t column) const {
        return p_.output_format == HOP_FLOAT32 && !bias_ ? static_cast<float*>(y_) + row * p_.n + column : nullptr;
    }
    // Stores results of a row of x, from column `column` on.
    HOP_ALONE void put(int64_t row, int64_t column, const float* sums, int64_t count) const {
        for (int64_t j = 0; j < count; ++j) {
            const float sum = bias_ ? sums[j] + number(p_.bias_format, bias_, column + j) : sums[j];
            const int64_t at = row * p_.n + column + j;
            if (p_.output_format == HOP_FLOAT32) static_cast<float*>(y_)[at] = sum;
            else static_cast<uint16_t*>(y_)[at] = p_.output_format == HOP_BFLOAT16 ? to_bfloat16(sum) : to_float16(sum);
        }
    }

private:
    static float number(int32_t format, const void* data, int64_t at) {
        if (format == HOP_FLOAT32) return static_cast<const float*>(data)[at];
        const uint16_t word = static_cast<const uint16_t*>(data)[at];
        return format == HOP_BFLOAT16 ? from_bfloat16(word) : from_float16(word);
    }
    const hop_group_product& p_;
    const void* bias_;
    void* y_;
};

inline Scratch& memory_of_x() {
    static thread_local Scratch memory;
    return memory;
}
inline Scratch& memory_of_thread() {
    static thread_local Scratch memory;
    return memory;
}

// ---- forms

template <int Bits, class Run>
auto by_scales(const hop_group_product& p, Run&& run) {
    const bool pairs = p.scales.group < kChunk;
    if constexpr (Bits != 8)
        if (p.has_offset) return pairs ? run(Form<Bits, true, true>{}) : run(Form<Bits, false, true>{});
    return pairs ? run(Form<Bits, true, false>{}) : run(Form<Bits, false, false>{});
}

// Calls run with the form of a weight.
template <class Run>
auto by_form(const hop_group_product& p, Run&& run) {
    switch (p.bits) {
        case 2: return by_scales<2>(p, run);
        case 3: return by_scales<3>(p, run);
        case 4: return by_scales<4>(p, run);
        case 5: return by_scales<5>(p, run);
        case 6: return by_scales<6>(p, run);
        default: return by_scales<8>(p, run);
    }
}
