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

// Whether a tensor has the shape, the dtype and the device of a form.
bool is_of(const hop_form& form, Tensor t) {
    int64_t dim, *sizes;
    int32_t dtype, device;
    void* h = t.handle();
    if (torch_is.dim(h, &dim) || torch_is.dtype(h, &dtype) || torch_is.device(h, &device)) return false;
    if (dim != form.dim || dtype != form.dtype || device != form.device) return false;
    if (torch_is.sizes(h, &sizes)) return false;
    for (int64_t d = 0; d < dim; d++)
        if (sizes[d] != form.sizes[d]) return false;
    return true;
}

bool fits(const hop_form& form, Tensor t, const void** data) {
    int64_t *strides, offset, bytes;
    void *h = t.handle(), *address;
    if (!is_of(form, t) || torch_is.strides(h, &strides)) return false;
    for (int64_t d = 0; d < form.dim; d++)
        if (strides[d] != form.strides[d] && form.sizes[d] != 1) return false;
    if (torch_is.offset(h, &offset) || torch_is.bytes(h, &bytes) || torch_is.data(h, &address)) return false;
    if (offset < 0 || !address || offset * form.item + form.extent > bytes) return false;
    *data = address;
    return true;
}

// The bytes of an element of a dtype, as PyTorch numbers them; 0 of those that are not known here.
int64_t item_size(int32_t dtype) {
    static const int8_t sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 4, 8};
    return dtype >= 0 && dtype < int32_t(sizeof sizes) ? sizes[dtype] : 0;
}

// Whether the storage of a tensor is known to hold all of its elements.
bool holds(Tensor t) {
    int64_t dim, *sizes, *strides, offset, bytes;
    int32_t dtype;
    void* h = t.handle();
    if (torch_is.dim(h, &dim) || torch_is.dtype(h, &dtype) || torch_is.offset(h, &offset) || torch_is.bytes(h, &bytes) ||
        torch_is.sizes(h, &sizes) || torch_is.strides(h, &strides))
        return false;
    int64_t last = 0;
    for (int64_t d = 0; d < dim; d++) {
        if (sizes[d] == 0) return true;
        last += (sizes[d] - 1) * strides[d];
    }
    const int64_t item = item_size(dtype);
    return item && offset >= 0 && (offset + last + 1) * item <= bytes;
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

int hop_all_fit(int count, const hop_form* forms, const void* const* implementations) {
    for (int i = 0; i < count; i++) {
        if (forms && !is_of(forms[i], {implementations[i]})) return 0;
        if (!holds({implementations[i]})) return 0;
    }
    return 1;
}

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
