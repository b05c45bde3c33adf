"""Functions from codes to codes, each as an integer runtime computes it."""
