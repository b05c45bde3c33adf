// Symbols that recent GCC versions expect from recent system libraries, so that a library built with them loads on
// older systems: a wheel must run wherever PyTorch's wheels do, from glibc 2.28 on. `make wheel` reports where it runs.
#include <cstddef>
#include <new>

#if defined(__GLIBCXX__) && defined(__linux__)

// Whether reference counts may avoid atomics (glibc 2.32): never.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

namespace std {

// From libstdc++ of GCC 11; std::vector calls it.
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std

#endif
