"""Our operators: the meaning of each, its gradient, and the order of its kernels."""
