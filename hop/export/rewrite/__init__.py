"""Rewrite programs: to exact integers, to core ATen, and back."""
