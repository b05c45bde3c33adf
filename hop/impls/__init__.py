"""The operators: what each one means, its gradient, and the order of its kernels."""
