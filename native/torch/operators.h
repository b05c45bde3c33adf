// The operators hop_native::* as functions of their boxed arguments; library.cpp contains their schemas.
#pragma once
#include "torch/tensor.h"

namespace hop::torch {

void product(StableIValue* values, uint64_t count);
void convolution(StableIValue* values, uint64_t count);
void quantize(StableIValue* values, uint64_t count);
void quantize_product(StableIValue* values, uint64_t count);
void dequantize(StableIValue* values, uint64_t count);
void step_(StableIValue* values, uint64_t count);
void noise(StableIValue* values, uint64_t count);
void pack(StableIValue* values, uint64_t count);
void function(StableIValue* values, uint64_t count);
void rows(StableIValue* values, uint64_t count);
void attention(StableIValue* values, uint64_t count);
void group_product(StableIValue* values, uint64_t count);
void search_scales(StableIValue* values, uint64_t count);

}  // namespace hop::torch
