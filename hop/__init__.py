"""Mixed- and low-precision operators for PyTorch that mean one thing everywhere."""

from hop._hop import decompositions as decompositions
from hop.impls.out_dtype import explain as explain
from hop.impls.out_dtype import out_dtype as out_dtype

__version__ = "0.1.0"
