// hop_native::*: the schemas of the operators, registered when the library is loaded.
#include <atomic>
#include <string>
#include <thread>

#include "hop.h"
#include "torch/operators.h"

namespace hop::torch {
namespace {

using Function = void (*)(StableIValue*, uint64_t);

struct Operator {
    const char *name, *arguments;
    void (*boxed)(StableIValue*, uint64_t, uint64_t);
};

template <Function function>
void boxed(StableIValue* values, uint64_t count, uint64_t) {
    function(values, count);
}

const Operator kOperators[] = {
    {"product",
     "(Tensor lhs, Tensor? lhs_scale, Tensor? lhs_zero_point, Tensor? lhs_block_scale, Tensor rhs, Tensor? rhs_scale, "
     "Tensor? rhs_zero_point, Tensor? rhs_block_scale, Tensor? bias, Tensor? output_scale, Tensor? output_zero_point, "
     "SymInt n, str description, Tensor? rhs_code_sums=None) -> Tensor",
     boxed<product>},
    {"convolution",
     "(Tensor x, Tensor x_scale, Tensor? x_zero_point, Tensor weight, Tensor weight_scale, Tensor? bias, "
     "Tensor? output_scale, Tensor? output_zero_point, SymInt n, str description) -> Tensor",
     boxed<convolution>},
    {"quantize",
     "(Tensor x, Tensor? scale, Tensor? zero_point, Tensor? noise, str description) -> Tensor[]",
     boxed<quantize>},
    {"quantize_product",
     "(Tensor x, Tensor factor, Tensor? noise, int stream, str description) -> Tensor[]",
     boxed<quantize_product>},
    {"dequantize",
     "(Tensor codes, Tensor scale, Tensor? second, SymInt[] shape, str description) -> Tensor",
     boxed<dequantize>},
    {"step_",
     "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] buffers, float[] numbers, int seed, int[] streams, "
     "str description) -> ()",
     boxed<step_>},
    {"noise", "(Tensor seed, SymInt[] shape, int stream, int bits=8) -> Tensor", boxed<noise>},
    {"function", "(Tensor x, str name) -> Tensor", boxed<function>},
    {"rows",
     "(Tensor x, Tensor? other, Tensor? weight, Tensor? bias, Tensor? scale, Tensor? zero_point, str description) -> "
     "Tensor[]",
     boxed<rows>},
    {"attention",
     "(Tensor q, Tensor q_scale, Tensor k, Tensor k_scale, Tensor v, Tensor v_scale, Tensor? mask, float scale, "
     "bool is_causal, str description) -> Tensor",
     boxed<attention>},
    {"group_product",
     "(Tensor x, Tensor codes, Tensor? high_codes, Tensor scale, Tensor? offset, Tensor? outer_scale, "
     "Tensor? outer_offset, Tensor? bias, str description, Tensor? x_scale=None) -> Tensor",
     boxed<group_product>},
    {"search_scales",
     "(Tensor x, Tensor scale, Tensor? zero_point, Tensor? outer, Tensor? values, str description) -> Tensor[]",
     boxed<search_scales>},
    {"pack", "(Tensor codes, str description) -> Tensor", boxed<pack>},
};

// Runs loops on all of PyTorch's threads, each with one part.
void run_on_threads(int count, void (*body)(void*, int, int), void* context) {
    struct Region {
        void (*body)(void*, int, int);
        void* context;
        int64_t count;
        std::atomic<int64_t> chunk{0};  // indices per thread; more than one if there are fewer threads
    } region{body, context, count};
    const auto part = [](int64_t begin, int64_t end, void* data) {
        auto& r = *static_cast<Region*>(data);
        if (begin == 0) r.chunk.store(end, std::memory_order_release);
        int64_t chunk;
        while (!(chunk = r.chunk.load(std::memory_order_acquire))) std::this_thread::yield();
        r.body(r.context, static_cast<int>(begin / chunk), static_cast<int>((r.count + chunk - 1) / chunk));
    };
    check(torch_parallel_for(0, count, 1, part, &region));
}

struct Registration {
    TorchLibraryHandle schemas = nullptr, kernels = nullptr;
    Registration() {
        check(aoti_torch_library_init_def("hop_native", __FILE__, __LINE__, &schemas));
        check(aoti_torch_library_init_impl("hop_native", "CPU", __FILE__, __LINE__, &kernels));
        for (const Operator& o : kOperators) {
            check(aoti_torch_library_def(schemas, (std::string(o.name) + o.arguments).c_str()));
            check(torch_library_impl(kernels, o.name, o.boxed, kTorch));
        }
        hop_use_threads(run_on_threads);
    }
    ~Registration() {
        aoti_torch_delete_library_object(kernels);
        aoti_torch_delete_library_object(schemas);
    }
} registration;

}  // namespace
}  // namespace hop::torch
