"""Handles of tensors."""

import operator

handle = operator.attrgetter("_cdata")
"""The address of a tensor's implementation: a handle of the C interface is the address of a pointer to it. 0.06 µs."""
