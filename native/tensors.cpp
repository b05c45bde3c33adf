// Tensors of PyTorch by their handles: whether they are what a call was described for, and where they lie.
#include <cstdint>

#include "hop.h"

namespace {

hop_torch torch_is{};

// What PyTorch calls a handle is the address of a pointer to the tensor's implementation.
struct Tensor {
    const void* implementation;
    void* handle() { return &implementation; }
};

bool fits(const hop_form& form, Tensor t, const void** data) {
    int64_t dim, *sizes, *strides, offset, bytes;
    int32_t dtype, device;
    void *h = t.handle(), *address;
    if (torch_is.dim(h, &dim) || torch_is.dtype(h, &dtype) || torch_is.device(h, &device)) return false;
    if (dim != form.dim || dtype != form.dtype || device != form.device) return false;
    if (torch_is.sizes(h, &sizes) || torch_is.strides(h, &strides)) return false;
    for (int64_t d = 0; d < dim; d++)
        if (sizes[d] != form.sizes[d] || (strides[d] != form.strides[d] && sizes[d] != 1)) return false;
    if (torch_is.offset(h, &offset) || torch_is.bytes(h, &bytes) || torch_is.data(h, &address)) return false;
    if (offset < 0 || !address || offset * form.item + form.extent > bytes) return false;
    *data = address;
    return true;
}

// The addresses of the tensors that are given; false if one is not what it was described as.
template <int n>
bool all_fit(const hop_form* forms, const void* const (&given)[n], const void* (&data)[n]) {
    for (int i = 0; i < n; i++) {
        data[i] = nullptr;
        if ((given[i] != nullptr) != (forms[i].item != 0)) return false;
        if (given[i] && !fits(forms[i], {given[i]}, &data[i])) return false;
    }
    return true;
}

}  // namespace

void hop_know_torch(const hop_torch* torch) { torch_is = *torch; }

int hop_multiply_tensors(
    const hop_product* product, const hop_form* forms, int threads, const void* lhs_codes, const void* lhs_scale,
    const void* lhs_zero, const void* lhs_fold, const void* rhs_codes, const void* rhs_scale, const void* rhs_zero,
    const void* rhs_fold, const void* bias, void* output) {
    const void* const given[] = {lhs_codes, lhs_scale, lhs_zero, lhs_fold, rhs_codes, rhs_scale, rhs_zero, rhs_fold, bias};
    const void* d[9];
    if (!all_fit(forms, given, d)) return HOP_MISFIT;
    return hop_multiply(product, threads, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], d[8], nullptr, nullptr, output);
}

int hop_convolve_tensors(
    const hop_convolution* convolution, const hop_form* forms, int threads, const void* input, const void* input_scale,
    const void* input_zero, const void* weight, const void* weight_scale, const void* bias, const void* output_scale,
    const void* output_zero, void* output) {
    const void* const given[] = {input, input_scale, input_zero, weight, weight_scale, bias, output_scale, output_zero};
    const void* d[8];
    if (!all_fit(forms, given, d)) return HOP_MISFIT;
    return hop_convolve(convolution, threads, d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7], output);
}
