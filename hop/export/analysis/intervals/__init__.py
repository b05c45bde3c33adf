"""Interval arithmetic on core ATen: computes bounds of a node's value from those of its operands.

    Known      the value itself, for parameters and values computed from them alone
    Integers   bounds of integers or booleans, in tensors that broadcast to the value's shape
    Reals      bounds of floats, and whether NaN is possible

Bounds of integers are exact: they are computed in int64 if it represents every intermediate value, and with Python's
integers otherwise. Bounds of floats are computed by the operator itself from the bounds of its operands, in their
dtypes; rounding is monotone, so no rounded result exceeds them. An operator without a rule has the bounds of its dtype.

values.py    the kinds of bounds
elements.py  element-wise operators and operators that move elements
sums.py      sums, matrix products and convolutions
rules.py     the rule of each operator
"""

from hop.export.analysis.intervals.elements import divisor_of_remainder as divisor_of_remainder
from hop.export.analysis.intervals.elements import remainder as remainder
from hop.export.analysis.intervals.rules import FILLED as FILLED
from hop.export.analysis.intervals.rules import MOVES as MOVES
from hop.export.analysis.intervals.rules import PRODUCTS as PRODUCTS
from hop.export.analysis.intervals.rules import RULES as RULES
from hop.export.analysis.intervals.rules import UNFILLED as UNFILLED
from hop.export.analysis.intervals.rules import float_rule as float_rule
from hop.export.analysis.intervals.values import FEW as FEW
from hop.export.analysis.intervals.values import Integers as Integers
from hop.export.analysis.intervals.values import Known as Known
from hop.export.analysis.intervals.values import NoBounds as NoBounds
from hop.export.analysis.intervals.values import Reals as Reals
from hop.export.analysis.intervals.values import Sum as Sum
from hop.export.analysis.intervals.values import Unknown as Unknown
from hop.export.analysis.intervals.values import bounds as bounds
from hop.export.analysis.intervals.values import dtype_bounds as dtype_bounds
from hop.export.analysis.intervals.values import dtype_range as dtype_range
from hop.export.analysis.intervals.values import integers as integers
from hop.export.analysis.intervals.values import is_integer as is_integer
from hop.export.analysis.intervals.values import static_shape as static_shape
