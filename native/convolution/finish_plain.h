// Replaces finish_avx512.h for other instruction sets. Included in a namespace (isa.h).

inline void store_rows(const hop_output& o, const Columns& c, const int32_t* sums, int rows, const int64_t* at,
                       void* output) {
    store_plainly(o, c, sums, rows, at, output);
}
