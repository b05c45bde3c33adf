"""Fast implementations: from PyTorch's operators (aten), native CPU code (cpu), and GPU kernels (gpu)."""
