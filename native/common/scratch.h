// Thread-local memory, valid until the next call. Each translation unit that includes this header has a separate
// buffer.
#pragma once
#include "common/parallel.h"

namespace hop {
namespace {

char* scratch(size_t bytes) {
    static thread_local Scratch own;
    own.trim();
    return own.get(bytes);
}

}  // namespace
}  // namespace hop
