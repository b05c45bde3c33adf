"""Weights: float ones with an optimizer, codes packed for kernels, and how they load."""
