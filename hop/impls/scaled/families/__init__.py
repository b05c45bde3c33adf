"""Families of operators: what each means to scaled, a file for each, or for several that are alike."""
