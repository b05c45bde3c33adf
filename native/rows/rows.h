// A call of hop_compute_rows, and how its elements are split into pieces for threads.
#pragma once
#include <memory>
#include <new>

#include "functions/functions.h"
#include "functions/polynomials.h"
#include "quantize/quantize.h"

namespace hop {

struct RowsCall {
    const hop_rows& r;
    const void *x, *other;
    const float *weight, *bias;  // float32, or nullptr
    const float* table;          // results of the function by the word of x, or nullptr
    QuantizeCall q;              // without x
    void* result;
    int threads;

    bool sums() const { return r.operation >= HOP_LAYER_NORM; }
};

// Part of a row of blocks.
struct Piece {
    int64_t row, col, cols;
    int64_t first, count;  // blocks of the tensor
};

// The pieces of a row of blocks: strips; if scales are given, also parts of a wide block.
struct Pieces {
    const hop_blocks& g;
    // Blocks of a row; blocks of a piece; pieces of a block wider than kColumns (else 1); pieces of a row of blocks.
    int64_t across, width, per_block, per_row;

    Pieces(const hop_blocks& blocks, bool given) : g(blocks) {
        const Strips strips(g);
        across = strips.across, width = strips.width;
        per_block = given ? divide_up(least(g.tile_cols, g.cols), kColumns) : 1;
        per_row = strips.per_row * per_block;
    }
    int64_t rows() const { return g.batch * g.rows; }
    int64_t most() const { return per_block > 1 ? kColumns : least(g.cols, width * g.tile_cols); }  // columns of a piece
    Piece at(int64_t row, int64_t i) const {
        const int64_t block = i / per_block * width, down = divide_up(g.rows, g.tile_rows);
        const int64_t block_row = row / g.rows * down + row % g.rows / g.tile_rows;
        Piece p;
        p.row = row;
        p.first = block_row * across + block;
        p.count = least(width, across - block);
        p.col = block * g.tile_cols;
        p.cols = least(p.count * g.tile_cols, g.cols - p.col);
        if (per_block > 1) {
            const int64_t done = i % per_block * kColumns;
            p.col += least(done, p.cols);
            p.cols = done < p.cols ? least(kColumns, p.cols - done) : 0;
        }
        return p;
    }
};

HOP_AT_EACH_LEVEL(int compute_rows(RowsCall c, const void* weight, const void* bias);)

}  // namespace hop
