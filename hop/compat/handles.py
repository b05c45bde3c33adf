"""Tensor handles for the C interface."""

import operator

handle = operator.attrgetter("_cdata")
"""The address of a tensor's implementation; the C interface takes a pointer to it. 0.06 µs."""
