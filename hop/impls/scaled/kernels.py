"""The kernels of scaled, in the order in which they are asked."""

from hop.kernels import Kernel

TABLE: tuple[Kernel, ...] = ()
