"""Dispatch: how a call finds the kernel that computes it (Hop, Kernel, Plan), and the table of ATen operators."""
