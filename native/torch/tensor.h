// Tensors of PyTorch, and the properties that kernels need before they read or write them.
#pragma once
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "torch/shim.h"

namespace hop::torch {

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error("hop_native: " + message); }

inline void check(AOTITorchError error) {
    if (error) fail("PyTorch's C interface failed");
}

// The format in hop.h of a dtype; HOP_NONE for dtypes without one.
int format_of(int32_t dtype);
int32_t dtype_of(int format);

using Sizes = std::vector<int64_t>;
int64_t elements(const Sizes& shape);  // raises unless all sizes are valid and their product is not too large
std::string to_string(const int64_t* values, size_t count);
inline std::string to_string(const Sizes& v) { return to_string(v.data(), v.size()); }

// An owned tensor, or none.
class Tensor {
public:
    Tensor() = default;
    explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
    Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    Tensor& operator=(Tensor&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~Tensor() {
        if (handle_) aoti_torch_delete_tensor_object(handle_);
    }
    explicit operator bool() const { return handle_ != nullptr; }
    AtenTensorHandle get() const { return handle_; }
    AtenTensorHandle release() { return std::exchange(handle_, nullptr); }

private:
    AtenTensorHandle handle_ = nullptr;
};

// The properties of a tensor whose storage is known to contain all of its elements.
struct View {
    const char* name = "";
    int64_t dim = 0;
    const int64_t *sizes = nullptr, *strides = nullptr;
    int32_t dtype = 0;
    const void* data = nullptr;  // nullptr if there is no tensor, or it is empty

    explicit operator bool() const { return sizes != nullptr; }
    int format() const { return format_of(dtype); }
    int64_t size(int64_t d) const { return sizes[d < 0 ? dim + d : d]; }
    int64_t stride(int64_t d) const { return strides[d < 0 ? dim + d : d]; }
    int64_t numel() const;
    bool is_contiguous() const;
    std::string shape() const { return to_string(sizes, static_cast<size_t>(dim)); }
};

// Shapes with more elements than this are rejected, so that products of sizes do not overflow.
constexpr int64_t kMostElements = int64_t(1) << 48;
bool is_too_large(const int64_t* sizes, int64_t dim);

// Checks a tensor, called `name` in messages: raises unless it is strided, on the CPU, and within its storage.
View view(const char* name, const Tensor& x);

// x, or a contiguous copy of it.
Tensor contiguous(Tensor x);

Tensor empty(const int64_t* sizes, const int64_t* strides, int64_t dim, int32_t dtype);
Tensor empty(const Sizes& sizes, int32_t dtype);

// The address of the elements of a tensor created here.
void* data_of(const Tensor& x);

int threads();  // as set by torch.set_num_threads

// The arguments of an operator, in order; each is read once, and all are read before anything is checked.
class Stack {
public:
    Stack(StableIValue* values, uint64_t count) : values_(values), count_(count) {}

    Tensor tensor() { return Tensor(reinterpret_cast<AtenTensorHandle>(next())); }
    Tensor optional() {
        auto* value = reinterpret_cast<StableIValue*>(next());
        if (!value) return {};
        Tensor x(reinterpret_cast<AtenTensorHandle>(*value));
        delete value;
        return x;
    }
    int64_t integer() { return static_cast<int64_t>(next()); }
    bool flag() { return (next() & 1) != 0; }
    double real();
    std::string text();
    Sizes sizes();
    std::vector<double> reals();
    std::vector<Tensor> tensors();

    void give(Tensor x) { values_[0] = reinterpret_cast<StableIValue>(x.release()); }
    void give(std::vector<Tensor> list);

private:
    StableIValue next() {
        if (at_ == count_) fail("the operator was called with too few arguments");
        return values_[at_++];
    }
    StableIValue* values_;
    uint64_t count_, at_ = 0;
};

}  // namespace hop::torch
