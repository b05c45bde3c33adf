"""Our operators: the reference of each, its gradient, and the order of its kernels."""
