// Threads for tests, instead of PyTorch's.
#pragma once
#include <thread>
#include <vector>

#include "hop.h"

inline const bool kThreads = [] {
    hop_use_threads([](int count, void (*body)(void*, int, int), void* context) {
        std::vector<std::thread> others;
        for (int i = 1; i < count; ++i) others.emplace_back(body, context, i, count);
        body(context, 0, count);
        for (std::thread& t : others) t.join();
    });
    return true;
}();
