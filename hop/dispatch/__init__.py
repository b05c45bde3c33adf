"""How a call finds what computes it: Hop, Kernel, and what stands for a call in programs."""
