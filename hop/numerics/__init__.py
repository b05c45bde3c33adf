"""Number formats, blocks, scale rules, quantizers and schemes as values, and their textual form.

This package does not depend on dispatch or kernels.
"""
