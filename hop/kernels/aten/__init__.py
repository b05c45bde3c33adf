"""Kernels composed of PyTorch's own operators."""
