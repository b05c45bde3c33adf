"""Quantized layers and their base class."""
