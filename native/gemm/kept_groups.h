// Included in a namespace (isa.h).

// Rows of a row block by columns of a panel, over the groups of a chunk.
struct KeptGroups {
    const uint8_t *a, *b;     // tiles
    int64_t stride;           // bytes from a slice of `a` to the next
    int64_t groups, slices;   // of the chunk
    int64_t span;             // slices of a group,
    int quads;                // or quads of a group, if a slice has several groups
    const Side* lhs;          // `lhs_step` entries for each group
    int64_t lhs_step;
    const Side* rhs;
    bool first;  // overwrite y instead of adding
    float* y;
};

// Sets rows to -0, the neutral element of addition: -0 + x is x for every x.
inline void clear_rows(float* y, int rows, int tiles) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < tiles * kRows; ++j) y[i * kBlock + j] = -0.f;
}
