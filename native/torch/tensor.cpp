#include "torch/tensor.h"

#include <array>
#include <cstring>

#include "hop.h"

namespace hop::torch {
namespace {

struct Dtypes {
    int32_t of[HOP_INT32 + 1];
    Dtypes() {
        for (int32_t& d : of) d = -1;
        of[HOP_INT8] = aoti_torch_dtype_int8(), of[HOP_UINT8] = aoti_torch_dtype_uint8();
        of[HOP_E4M3] = aoti_torch_dtype_float8_e4m3fn(), of[HOP_E5M2] = aoti_torch_dtype_float8_e5m2();
        of[HOP_FLOAT32] = aoti_torch_dtype_float32(), of[HOP_BFLOAT16] = aoti_torch_dtype_bfloat16();
        of[HOP_FLOAT16] = aoti_torch_dtype_float16(), of[HOP_INT32] = aoti_torch_dtype_int32();
    }
};

const Dtypes& dtypes() {
    static const Dtypes known;
    return known;
}

// Returns the items of a list handle, and frees the list.
std::vector<StableIValue> items(StableIValue value) {
    const auto list = reinterpret_cast<StableListHandle>(value);
    size_t count = 0;
    check(torch_list_size(list, &count));
    std::vector<StableIValue> found(count);
    for (size_t i = 0; i < count; ++i) check(torch_list_get_item(list, i, &found[i]));
    check(torch_delete_list(list));
    return found;
}

}  // namespace

int format_of(int32_t dtype) {
    const auto& of = dtypes().of;
    for (int f = 1; f <= HOP_INT32; ++f)
        if (of[f] == dtype) return f;
    return HOP_NONE;
}

int32_t dtype_of(int format) { return dtypes().of[format]; }

std::string to_string(const int64_t* values, size_t count) {
    std::string text = "(";
    for (size_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
    return text + (count == 1 ? ",)" : ")");
}

int64_t elements(const Sizes& shape) {
    int64_t n = 1;
    for (const int64_t size : shape)
        if (size < 0) fail("shape must have no negative sizes, got " + to_string(shape));
    if (is_too_large(shape.data(), static_cast<int64_t>(shape.size()))) fail("shape is too large, got " + to_string(shape));
    for (const int64_t size : shape) n *= size;
    return n;
}

int64_t View::numel() const {
    int64_t n = 1;
    for (int64_t d = 0; d < dim; ++d) n *= sizes[d];
    return n;
}

bool View::is_contiguous() const {
    int64_t next = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
        if (sizes[d] == 0) return true;
        if (sizes[d] == 1) continue;
        if (strides[d] != next) return false;
        next *= sizes[d];
    }
    return true;
}

bool is_too_large(const int64_t* sizes, int64_t dim) {
    int64_t n = 1;
    for (int64_t d = 0; d < dim; ++d) {
        if (sizes[d] > kMostElements / n) return true;
        if (sizes[d] > 0) n *= sizes[d];
    }
    return false;
}

View view(const char* name, const Tensor& x) {
    View v;
    v.name = name;
    if (!x) return v;
    int32_t device, layout;
    check(aoti_torch_get_device_type(x.get(), &device));
    check(aoti_torch_get_layout(x.get(), &layout));
    if (device != aoti_torch_device_type_cpu() || layout != aoti_torch_layout_strided())
        fail(std::string(name) + " must be a strided tensor on the CPU");
    int64_t *sizes, *strides, offset, bytes;
    check(aoti_torch_get_dim(x.get(), &v.dim));
    check(aoti_torch_get_sizes(x.get(), &sizes));
    check(aoti_torch_get_strides(x.get(), &strides));
    check(aoti_torch_get_dtype(x.get(), &v.dtype));
    v.sizes = sizes, v.strides = strides;
    static const int64_t none = 0;
    if (v.dim == 0) v.sizes = v.strides = &none;
    if (is_too_large(v.sizes, v.dim)) fail(std::string(name) + " is too large, of shape " + v.shape());
    int64_t last = 0, end = 0;
    bool overflows = false;
    for (int64_t d = 0; d < v.dim; ++d) {
        if (sizes[d] == 0) return v;
        int64_t along;
        overflows |= __builtin_mul_overflow(sizes[d] - 1, strides[d], &along) || __builtin_add_overflow(last, along, &last);
    }
    check(aoti_torch_get_storage_offset(x.get(), &offset));
    check(aoti_torch_get_storage_size(x.get(), &bytes));
    const auto item = static_cast<int64_t>(aoti_torch_dtype_element_size(v.dtype));
    overflows |= __builtin_add_overflow(last, 1, &end) || __builtin_add_overflow(end, offset, &end);
    overflows |= __builtin_mul_overflow(end, item, &end);
    if (offset < 0 || overflows || end > bytes)
        fail(std::string("the storage of ") + name + " has " + std::to_string(bytes) +
             " bytes, too few for a tensor of shape " + v.shape() + ", strides " +
             to_string(strides, static_cast<size_t>(v.dim)) + " and offset " + std::to_string(offset) +
             ": it was resized, freed or replaced after the tensor was created; create the tensor again");
    check(torch_get_const_data_ptr(x.get(), &v.data));
    if (!v.data) fail(std::string("the storage of ") + name + " was freed");
    return v;
}

Tensor contiguous(Tensor x) {
    std::array<StableIValue, 2> stack{reinterpret_cast<StableIValue>(x.release()), 0};
    const int32_t format = aoti_torch_memory_format_contiguous_format();
    std::memcpy(&stack[1], &format, sizeof(format));
    check(torch_call_dispatcher("aten::contiguous", "", stack.data(), kTorch));
    return Tensor(reinterpret_cast<AtenTensorHandle>(stack[0]));
}

Tensor empty(const int64_t* sizes, const int64_t* strides, int64_t dim, int32_t dtype) {
    AtenTensorHandle made;
    if (aoti_torch_empty_strided(dim, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &made))
        fail("no memory for a result of shape " + to_string(sizes, static_cast<size_t>(dim)));
    return Tensor(made);
}

Tensor empty(const Sizes& sizes, int32_t dtype) {
    Sizes strides(sizes.size());
    int64_t next = 1;
    for (size_t d = sizes.size(); d-- > 0;) {
        strides[d] = next;
        next *= sizes[d] > 1 ? sizes[d] : 1;
    }
    return empty(sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype);
}

void* data_of(const Tensor& x) {
    void* data;
    check(aoti_torch_get_data_ptr(x.get(), &data));
    return data;
}

int threads() {
    uint32_t count = 1;
    check(torch_get_num_threads(&count));
    return static_cast<int>(count);
}

double Stack::real() {
    const StableIValue value = next();
    double x;
    std::memcpy(&x, &value, sizeof(x));
    return x;
}

std::string Stack::text() {
    const auto handle = reinterpret_cast<StringHandle>(next());
    size_t length = 0;
    const char* data = nullptr;
    check(torch_string_length(handle, &length));
    check(torch_string_c_str(handle, &data));
    std::string found(data, length);
    check(torch_delete_string(handle));
    return found;
}

Sizes Stack::sizes() {
    Sizes found;
    for (const StableIValue value : items(next())) found.push_back(static_cast<int64_t>(value));
    return found;
}

std::vector<double> Stack::reals() {
    std::vector<double> found;
    for (const StableIValue value : items(next())) {
        double x;
        std::memcpy(&x, &value, sizeof(x));
        found.push_back(x);
    }
    return found;
}

std::vector<Tensor> Stack::tensors() {
    std::vector<Tensor> found;
    for (const StableIValue value : items(next())) found.emplace_back(reinterpret_cast<AtenTensorHandle>(value));
    return found;
}

void Stack::give(std::vector<Tensor> list) {
    StableListHandle made;
    check(torch_new_list_reserve_size(list.size(), &made));
    for (Tensor& x : list) check(torch_list_push_back(made, reinterpret_cast<StableIValue>(x.release())));
    values_[0] = reinterpret_cast<StableIValue>(made);
}

}  // namespace hop::torch
