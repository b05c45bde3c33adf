// Runs a package of make.py without Python: PyTorch's loader of packages, and the operators hop_native::* that it calls.
//
//     T=$(python -c 'import torch; print(torch.__path__[0])')
//     g++ -std=c++20 -O1 -I$T/include -I$T/include/torch/csrc/api/include main.cpp -o run \
//         -L$T/lib -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -Wl,-rpath,$T/lib -ldl
//     python make.py made
//     ./run .../hop/_native.abi3.so made/model.pt2 made/input.bin 64 output.bin    compare with made/output.bin
//
// Files of numbers hold float32 alone; the input has rows of as many as said. A last argument is a number of threads.
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace {

at::Tensor read(const char* path, int64_t columns) {
    std::ifstream file(path, std::ios::binary);
    if (!file || columns < 1) throw std::runtime_error(std::string("no rows can be read from ") + path);
    std::string bytes((std::istreambuf_iterator<char>(file)), {});
    const int64_t rows = static_cast<int64_t>(bytes.size() / sizeof(float)) / columns;
    return at::from_blob(bytes.data(), {rows, columns}, at::kFloat).clone();
}

void write(const char* path, const at::Tensor& y) {
    const at::Tensor whole = y.contiguous();
    std::ofstream file(path, std::ios::binary);
    file.write(static_cast<const char*>(whole.const_data_ptr()), static_cast<std::streamsize>(whole.nbytes()));
    if (!file.flush()) throw std::runtime_error(std::string("cannot write ") + path);
}

}  // namespace

extern "C" int main(int count, char** arguments) try {
    if (count < 6) throw std::runtime_error("run LIBRARY PACKAGE INPUT COLUMNS OUTPUT [THREADS]");
    if (count > 6) at::set_num_threads(std::atoi(arguments[6]));  // also limits the kernels' threads
    // Without this a package takes inputs of another shape or dtype and computes with whatever the memory holds.
    setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 0);
    // Loading the library registers its operators, so it is loaded before the package and never unloaded.
    if (!dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL)) throw std::runtime_error(dlerror());
    torch::inductor::AOTIModelPackageLoader package(arguments[2]);
    const at::Tensor y = package.run({read(arguments[3], std::atoll(arguments[4]))}).at(0);
    write(arguments[5], y);
    std::cout << y.sizes() << ", " << at::get_num_threads() << " threads\n";
    return 0;
} catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
}
