"""How a call finds what computes it: Hop, Kernel, what stands for a call in programs, and what operators are."""
