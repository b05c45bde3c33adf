// The part of PyTorch's C interface that the binding uses (torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h). It is the same in every version from 2.10 on, so one library works with all of them, and
// is built without PyTorch. tests/kernels/test_native_operators.py compares the declarations with those of the
// installed PyTorch.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {

struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct StringOpaque;
using StringHandle = StringOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
struct TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;
using AOTITorchError = int32_t;  // 0, or an error code
using StableIValue = uint64_t;
using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

AOTITorchError aoti_torch_get_dim(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle, int64_t**);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_layout(AtenTensorHandle, int32_t*);
AOTITorchError aoti_torch_get_storage_offset(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_storage_size(AtenTensorHandle, int64_t*);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle, void**);
AOTITorchError torch_get_const_data_ptr(AtenTensorHandle, const void**);

AOTITorchError aoti_torch_empty_strided(
    int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device_type, int32_t device_index,
    AtenTensorHandle* out);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle);

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_layout_strided();
int32_t aoti_torch_memory_format_contiguous_format();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float8_e4m3fn();
int32_t aoti_torch_dtype_float8_e5m2();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
size_t aoti_torch_dtype_element_size(int32_t dtype);

AOTITorchError torch_string_length(StringHandle, size_t*);
AOTITorchError torch_string_c_str(StringHandle, const char**);
AOTITorchError torch_delete_string(StringHandle);

AOTITorchError torch_new_list_reserve_size(size_t, StableListHandle*);
AOTITorchError torch_list_push_back(StableListHandle, StableIValue);
AOTITorchError torch_list_size(StableListHandle, size_t*);
AOTITorchError torch_list_get_item(StableListHandle, size_t, StableIValue*);
AOTITorchError torch_delete_list(StableListHandle);

AOTITorchError torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t version);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain, ParallelFunc, void* context);
AOTITorchError torch_get_num_threads(uint32_t*);

AOTITorchError aoti_torch_library_init_def(const char* ns, const char* file, uint32_t line, TorchLibraryHandle*);
AOTITorchError aoti_torch_library_init_impl(
    const char* ns, const char* key, const char* file, uint32_t line, TorchLibraryHandle*);
AOTITorchError aoti_torch_library_def(TorchLibraryHandle, const char* schema);
AOTITorchError torch_library_impl(
    TorchLibraryHandle, const char* name, void (*)(StableIValue*, uint64_t, uint64_t), uint64_t version);
AOTITorchError aoti_torch_delete_library_object(TorchLibraryHandle);

}  // extern "C"

// The version of the interface, 2.11.
constexpr uint64_t kTorch = uint64_t(2) << 56 | uint64_t(11) << 48;
