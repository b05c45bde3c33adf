"""How a call finds what computes it: Hop, Kernel, Plan, and what operators are."""
