"""Fast implementations: of PyTorch's operators (aten), native ones for the CPU (cpu), and for GPUs (gpu)."""
