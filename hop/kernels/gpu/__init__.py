"""Kernels of cutlass_kernels, imported when a GPU needs them."""
