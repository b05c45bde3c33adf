"""Operators on codes and scales: quantize, dequantize, random bits, and their sharding."""
