// The C interface of hop's native kernels: plain C types alone, so that one binary serves every version of PyTorch.
// Strides and offsets are in elements. Functions return 0, or one of Result.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define HOP_API extern "C" __declspec(dllexport)
#else
#define HOP_API extern "C" __attribute__((visibility("default")))
#endif

enum Result { HOP_OK = 0, HOP_NO_MEMORY = 1, HOP_UNSUPPORTED = 2 };

// The version of this interface; Python refuses a library of another.
HOP_API int hop_version();

// Levels of instructions, as in cpu.h. hop_use_level returns what was asked for before.
HOP_API int hop_best_level();
HOP_API int hop_use_level(int level);
