"""Operators on codes and scales: quantize, dequantize, random bits, and how all of these are sharded."""
