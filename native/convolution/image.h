// The image of a convolution's input: see convolution.h. Included in a namespace (isa.h).

constexpr int kSide = 16;

// out[j * out_stride + i] = in[i * in_stride + j]
inline void transpose_bytes(const uint8_t* in, int64_t in_stride, uint8_t* out, int64_t out_stride, int64_t rows,
                            int64_t columns) {
    for (int64_t j = 0; j < columns; j += kSide) {
        const int64_t width = columns - j < kSide ? columns - j : kSide;
        for (int64_t i = 0; i < rows; i += kSide) {
            const uint8_t* src = in + i * in_stride + j;
            uint8_t* dst = out + j * out_stride + i;
            if (rows - i >= kSide) {
                transpose_square(src, in_stride, dst, out_stride, width);
                continue;
            }
            for (int64_t a = 0; a < width; ++a)
                for (int64_t b = 0; b < rows - i; ++b) dst[a * out_stride + b] = src[b * in_stride + a];
        }
    }
}

// Builds the image of one example at a time.
class Image {
public:
    explicit Image(const Convolution& c) : c_(c), channels_(c.c.channels) {}
    int64_t line_bytes() const { return c_.strides[1] == 1 || channels_ == 1 ? 0 : c_.dims[2].size * channels_; }

    // Builds the band of `count` outputs from `first` on, for one example; `line` is memory for one line, channels
    // last.
    void build(int64_t example, int64_t first, int64_t count, uint8_t* image, uint8_t* line) const {
        const auto* input = static_cast<const uint8_t*>(c_.job.lhs.codes) + example * c_.strides[0];
        const auto zero = static_cast<int>(c_.zero(example) & 255);
        const Dimension &d = c_.dims[0], &h = c_.dims[1];
        for (int64_t fd = 0; fd < d.phases; ++fd)
            for (int64_t fh = 0; fh < h.phases; ++fh)
                for (int64_t qd = 0; qd < extent(0, count); ++qd)
                    for (int64_t qh = 0; qh < extent(1, count); ++qh) {
                        const int64_t z = at(0, qd, fd, first), y = at(1, qh, fh, first);
                        uint8_t* out =
                            image + fd * c_.phase_at[0] + fh * c_.phase_at[1] + qd * c_.at[0] + qh * c_.at[1];
                        const bool inside = z >= 0 && z < d.size && y >= 0 && y < h.size;
                        lines(inside ? input + z * c_.strides[2] + y * c_.strides[3] : nullptr, zero, first, count, out,
                              line);
                    }
    }

private:
    int64_t extent(int i, int64_t count) const { return c_.dims[i].extent(i == c_.outer ? count : c_.dims[i].outputs); }
    int64_t at(int i, int64_t q, int64_t phase, int64_t first) const {
        const Dimension& d = c_.dims[i];
        return ((i == c_.outer ? first * d.step : 0) + q) * d.every + d.phase_offset(phase) - d.padding;
    }

    // Writes one line in all its phases; `in` is null outside the input.
    void lines(const uint8_t* in, int zero, int64_t first, int64_t count, uint8_t* out, uint8_t* line) const {
        const Dimension& w = c_.dims[2];
        const int64_t extent_w = extent(2, count);
        int64_t stride = c_.strides[4];
        if (in && line_bytes() > 0) {
            int64_t from = at(2, 0, 0, first), to = from + extent_w * w.every;
            from = from < 0 ? 0 : from, to = to > w.size ? w.size : to;
            if (from < to) made(in + from * stride, to - from, line);
            in = line - from * channels_, stride = channels_;
        }
        for (int64_t phase = 0; phase < w.phases; ++phase, out += c_.phase_at[2]) {
            int64_t begin = extent_w, end = extent_w;
            if (in) {
                const int64_t x = at(2, 0, phase, first);
                begin = x < 0 ? ceil_div(-x, w.every) : 0;
                end = w.size > x ? ceil_div(w.size - x, w.every) : 0;
                end = end > extent_w ? extent_w : end;
                begin = begin > end ? end : begin;
                const uint8_t* src = in + (x + begin * w.every) * stride;
                if (w.every == 1 && stride == channels_) {
                    std::memcpy(out + begin * channels_, src, static_cast<size_t>((end - begin) * channels_));
                } else {
                    for (int64_t q = begin; q < end; ++q, src += w.every * stride)
                        std::memcpy(out + q * channels_, src, static_cast<size_t>(channels_));
                }
            } else {
                begin = end = 0;
            }
            std::memset(out, zero, static_cast<size_t>(begin * channels_));
            std::memset(out + end * channels_, zero, static_cast<size_t>((extent_w - end) * channels_));
        }
    }

    // Writes some pixels of a line, channels last.
    void made(const uint8_t* in, int64_t width, uint8_t* line) const {
        const int64_t by_channel = c_.strides[1], by_pixel = c_.strides[4];
        if (by_pixel == 1) return transpose_bytes(in, by_channel, line, channels_, channels_, width);
        for (int64_t x = 0; x < width; ++x)
            for (int64_t channel = 0; channel < channels_; ++channel)
                line[x * channels_ + channel] = in[x * by_pixel + channel * by_channel];
    }

    const Convolution& c_;
    int64_t channels_;
};
