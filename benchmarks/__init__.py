"""Timings against the best that PyTorch offers: `python -m benchmarks`."""
