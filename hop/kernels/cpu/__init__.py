"""Kernels of the native library, written in C++."""
