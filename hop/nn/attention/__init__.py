"""Attention in low precision: the module, masks and the KV cache."""
