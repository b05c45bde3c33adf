// What an instruction set without convolution_finish_avx512.h takes in its place. Included in a namespace (isa.h).

inline void store_rows(const hop_output& o, const Columns& c, const int32_t* sums, int rows, const int64_t* at,
                       void* output) {
    store_plainly(o, c, sums, rows, at, output);
}
