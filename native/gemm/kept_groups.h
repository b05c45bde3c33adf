// Included in a namespace (isa.h).

// Rows of a row block by the columns of a panel, over the groups of a chunk.
struct KeptGroups {
    const uint8_t *a, *b;     // tiles
    int64_t stride;           // bytes from a slice of `a` to the next
    int64_t groups, slices;   // of the chunk
    int64_t span;             // slices of a group,
    int quads;                // or the quads of one, if a slice has several
    const Side* lhs;          // from group to group: `lhs_step` of them
    int64_t lhs_step;
    const Side* rhs;
    bool first;  // y is what they make
    float* y;
};

// -0, to which groups are added: -0 + x is x, for each x.
inline void clear_rows(float* y, int rows, int tiles) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < tiles * kRows; ++j) y[i * kBlock + j] = -0.f;
}
