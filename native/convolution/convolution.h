// Data structures of convolutions that all instruction sets share.
//
// The input is copied to an image: channels last, with the border filled with the code of 0. The elements that an
// output pixel multiplies then have the same offsets from its first element for all pixels. An input that already has
// this form is read in place. There are two ways to multiply an image:
//
//     windows    tiles of 16 pixels are loaded from the image itself, 64 channels of one kernel element at a time. Pixels
//                run on from line to line, and results between two lines of outputs are dropped. With strides, the image
//                is split into phases with every stride-th element each, so that successive pixels are adjacent
//     rows       the elements that each pixel multiplies are gathered into one row: works with any number of channels, and
//                computes only the outputs
//
// In depthwise convolutions, pixels multiply elements of the image directly, four taps at a time.
#pragma once
#include "common/parts.h"
#include "gemm/product.h"

namespace hop {

// One slice of a sum: the offset of its 64 codes from the first code of each row, and of its tiles in a panel.
struct Step {
    int64_t lhs, rhs;
};

// One dimension of an image.
struct Dimension {
    int64_t size, outputs, kernel, stride, padding, dilation;
    int64_t every = 1;              // distance in the padded input between adjacent elements of the image
    int64_t phases = 1, period = 1;  // number of phases; and distance between successive taps of the same phase
    int64_t step = 1;               // distance in the image between adjacent outputs
    int64_t span = 0;               // distance from the first tap to the last

    void split(bool into_phases);
    int64_t tap_phase(int64_t tap) const { return tap % period; }
    int64_t tap_at(int64_t tap) const { return tap * dilation / every; }
    int64_t phase_offset(int64_t phase) const { return phase * dilation % every; }
    int64_t extent(int64_t count) const { return (count - 1) * step + span + 1; }
    bool inside() const { return padding == 0 && (outputs - 1) * stride + (kernel - 1) * dilation < size; }
};

// The images that an engine reads as windows: none; uint8 inputs read in place, if no row is dropped; all.
enum class Windows { none, flat, all };

// A call and the values derived from it.
struct Convolution {
    hop_convolution c;
    Job job;  // the equivalent product over all pixels and all outputs
    Dimension dims[3];
    int64_t batch, pixels;  // output pixels of one example
    int64_t strides[5];     // input strides, in bytes

    // Groups with few channels are merged and multiplied together, with zeros between them.
    int64_t units, merged, inputs, outputs;  // units, groups in each unit, inputs and outputs of a unit
    int64_t taps, panels, slices;            // panels of a unit, slices of its sum; depthwise slices have four taps

    bool depthwise = false;
    bool windows = false, borrowed = false;  // borrowed: the input is the image
    int outer = 2, inner = 2;  // the first and the last dimension with outputs; the first is cut into bands
    int64_t band = 1, examples = 1;          // outputs of a band, and examples, that are processed at a time
    int64_t row_groups = 1, bands = 1, shares = 1;  // a share is a subset of the panels
    int64_t at[3], phase_at[3], example_at = 0, row_at = 0, image_bytes = 0;  // row_at: distance between rows
    int64_t band_rows = 0, blocks = 0;  // rows of one example's band; blocks that are processed at a time

    Convolution(const hop_convolution& convolution, int threads);
    void plan(Windows allowed);
    int64_t lhs_steps(Step* steps) const;

    int64_t zero(int64_t example) const;  // the code of 0
    bool is_ready() const {  // whether the weight's tiles can be used without conversion
        return units == 1 && merged == 1 && job.p.rhs.layout == HOP_TILED && job.p.rhs.format == HOP_INT8;
    }
    int64_t row_stride() const { return slices * kSlice; }  // of gathered rows
    int64_t rows_of(int64_t count) const;  // of one example's band of `count` outputs

private:
    void flatten();
    void lay_out();
    void cut(int threads);
};

inline int64_t Convolution::zero(int64_t example) const {
    const hop_operand& o = job.p.lhs;
    if (o.zero_format == HOP_NONE) return o.zero;
    const int64_t i = example / o.scale.rows * o.scale.row_stride;
    return o.zero_format == HOP_INT8 ? static_cast<const int8_t*>(job.lhs.zero)[i]
                                     : static_cast<const uint8_t*>(job.lhs.zero)[i];
}

inline int64_t Convolution::rows_of(int64_t count) const {
    if (!windows) return count * (pixels / dims[outer].outputs);
    int64_t rows = 1 + (count - 1) * (at[outer] / row_at);
    for (int i = outer + 1; i < 3; ++i) rows += (dims[i].outputs - 1) * (at[i] / row_at);
    return rows;
}

inline int64_t Convolution::lhs_steps(Step* steps) const {
    if (!windows) {
        for (int64_t s = 0; s < slices; ++s) steps[s] = {s * kSlice, s * 2 * kTile};
        return slices;
    }
    Step* next = steps;
    for (int64_t slice = 0; slice < inputs / kSlice; ++slice)  // taps of the same channels read the same lines
        for (int64_t tap = 0; tap < taps; ++tap) {
            const int64_t of[3] = {tap / (c.kernel[1] * c.kernel[2]), tap / c.kernel[2] % c.kernel[1],
                                   tap % c.kernel[2]};
            int64_t lhs = slice * kSlice;
            for (int i = 0; i < 3; ++i) lhs += dims[i].tap_phase(of[i]) * phase_at[i] + dims[i].tap_at(of[i]) * at[i];
            *next++ = {lhs, (tap * (inputs / kSlice) + slice) * 2 * kTile};
        }
    return next - steps;
}

namespace amx { int convolution(Convolution&); }
namespace avx512 { int convolution(Convolution&); }
namespace avx512_plain { int convolution(Convolution&); }
namespace avx_vnni { int convolution(Convolution&); }
namespace avx2 { int convolution(Convolution&); }
namespace neon_i8mm { int convolution(Convolution&); }
namespace neon_dotprod { int convolution(Convolution&); }
namespace neon { int convolution(Convolution&); }
namespace portable { int convolution(Convolution&); }

}  // namespace hop
