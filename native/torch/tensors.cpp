// Tensors of PyTorch by their handles: whether they match a call's description, and their addresses.
#include <cstdint>

#include "hop.h"
#include "torch/shim.h"

namespace {

// PyTorch's handles are the addresses of pointers to the tensor's implementation.
struct Tensor {
    const void* implementation;
    AtenTensorHandle handle() { return reinterpret_cast<AtenTensorHandle>(&implementation); }
};

// Whether a tensor has the shape, dtype and device of a form.
bool is_of(const hop_form& form, Tensor t) {
    int64_t dim, *sizes;
    int32_t dtype, device;
    const AtenTensorHandle h = t.handle();
    if (aoti_torch_get_dim(h, &dim) || aoti_torch_get_dtype(h, &dtype) || aoti_torch_get_device_type(h, &device)) return false;
    if (dim != form.dim || dtype != form.dtype || device != form.device) return false;
    if (aoti_torch_get_sizes(h, &sizes)) return false;
    for (int64_t d = 0; d < dim; d++)
        if (sizes[d] != form.sizes[d]) return false;
    return true;
}

// The bytes of an element of a dtype, in PyTorch's numbering; 0 for dtypes that are not known here.
int64_t item_size(int32_t dtype) {
    static const int8_t sizes[] = {1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 4, 8};
    return dtype >= 0 && dtype < int32_t(sizeof sizes) ? sizes[dtype] : 0;
}

// Whether the storage of a tensor is known to contain all of its elements.
bool holds(Tensor t) {
    int64_t dim, *sizes, *strides, offset, bytes;
    int32_t dtype;
    const AtenTensorHandle h = t.handle();
    if (aoti_torch_get_dim(h, &dim) || aoti_torch_get_dtype(h, &dtype) || aoti_torch_get_storage_offset(h, &offset) || aoti_torch_get_storage_size(h, &bytes) ||
        aoti_torch_get_sizes(h, &sizes) || aoti_torch_get_strides(h, &strides))
        return false;
    int64_t last = 0;
    for (int64_t d = 0; d < dim; d++) {
        if (sizes[d] == 0) return true;
        last += (sizes[d] - 1) * strides[d];
    }
    const int64_t item = item_size(dtype);
    return item && offset >= 0 && (offset + last + 1) * item <= bytes;
}

}  // namespace

int hop_all_fit(int count, const hop_form* forms, const void* const* implementations) {
    for (int i = 0; i < count; i++) {
        if (forms && !is_of(forms[i], {implementations[i]})) return 0;
        if (!holds({implementations[i]})) return 0;
    }
    return 1;
}
