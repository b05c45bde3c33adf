"""Compare programs, and bound their integer sums."""
