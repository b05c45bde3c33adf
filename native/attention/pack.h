// Keys and values of a head, packed into lines of columns of four bytes, [columns / kLanes][quads][kLanes][4], padded
// with zeros. Included in a namespace, after the dot products of a level.
//
// Queries and weights are RowCodes: bytes of 0 to 255, for which 128 is added to a query's code, or int16, for which
// the codes of lines are widened. A quad is four bytes, with kTogether codes.

using LineCode = std::make_signed_t<RowCode>;
constexpr int kTogether = 4 / sizeof(RowCode), kLine = 4 * kLanes, kOffset = sizeof(RowCode) == 1 ? 128 : 0;

HOP_INLINE int64_t line_count(int64_t columns) { return divide_up(columns, kLanes); }

// Columns are tokens: kTogether elements of a token are adjacent.
static HOP_ALONE void pack_keys(const int8_t* k, int64_t stride, int64_t tokens, int64_t width, int64_t lines, uint8_t* out) {
    const int64_t whole = width / kTogether, quads_of = divide_up(width, kTogether);
    const auto put = [](const int8_t* from, int64_t n, uint8_t* to) HOP_INLINED {
        LineCode part[kTogether] = {};
        for (int64_t i = 0; i < n; ++i) part[i] = from[i];
        std::memcpy(to, part, 4);
    };
    for (int64_t p = 0; p < lines; ++p, out += quads_of * kLine) {
        const int64_t first = p * kLanes, there = least(kLanes, tokens - first);
        int64_t done = 0;
        if (there == kLanes) done = transpose_tokens(k + first * stride, stride, whole, out);
        else std::memset(out, 0, size_t(quads_of * kLine));
        for (int64_t i = 0; i < there; ++i) {
            const int8_t* from = k + (first + i) * stride;
            uint8_t* to = out + 4 * i;
            for (int64_t c = done; c < whole; ++c) put(from + kTogether * c, kTogether, to + c * kLine);
            if (width % kTogether) put(from + kTogether * whole, width % kTogether, to + whole * kLine);
        }
    }
}

// The (negative) contribution of the queries' offset to the sum of each token.
static HOP_ALONE void sum_keys(const uint8_t* packed, int64_t quads_of, int64_t lines, int32_t* out) {
    if (kOffset == 0) return void(std::memset(out, 0, size_t(lines * kLanes) * sizeof(int32_t)));
    RowCode ones[kTogether];
    for (RowCode& one : ones) one = 1;
    const Four one = four(ones);
    for (int64_t p = 0; p < lines; ++p) {
        Ints sum{};
        for (int64_t c = 0; c < quads_of; ++c) sum = dot(sum, one, quads(packed + (p * quads_of + c) * kLine));
        store_as(out + p * kLanes, sum * -kOffset);
    }
}

// Columns are channels: kTogether tokens of a channel are adjacent, in the first `quads` of `quads_of` quads.
static HOP_ALONE void pack_values(const int8_t* v, int64_t stride, int64_t tokens, int64_t width, int64_t quads, int64_t quads_of, uint8_t* out) {
    int8_t part[kTogether][kLanes];
    for (int64_t c = 0; c < quads; ++c) {
        for (int64_t p = 0; p < line_count(width); ++p) {
            const int64_t there = least(kLanes, width - p * kLanes);
            const int8_t* rows[kTogether];
            for (int t = 0; t < kTogether; ++t) {
                const int64_t token = kTogether * c + t;
                rows[t] = v + token * stride + p * kLanes;
                if (token < tokens && there == kLanes) continue;
                std::memset(part[t], 0, kLanes);
                if (token < tokens) std::memcpy(part[t], rows[t], size_t(there));
                rows[t] = part[t];
            }
            interleave(rows, out + (p * quads_of + c) * kLine);
        }
    }
}
