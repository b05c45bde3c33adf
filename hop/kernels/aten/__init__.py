"""Kernels that are made of PyTorch's own operators."""
