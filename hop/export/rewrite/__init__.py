"""Programs rewritten: to exact integers, to core ATen, and back."""
