// What a recent GCC takes from recent system libraries alone, so that a library that it built loads on older ones: a wheel
// is to run wherever PyTorch's own do, from glibc 2.28 on, and `make wheel` says where it does.
#include <cstddef>
#include <new>

#if defined(__GLIBCXX__) && defined(__linux__)

// Whether reference counts may do without atomics (glibc 2.32): never.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

// libstdc++ of GCC 11; std::vector calls it.
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std

#endif
