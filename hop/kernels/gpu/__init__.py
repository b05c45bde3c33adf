"""Kernels of cutlass_kernels, imported when a GPU asks for them."""
