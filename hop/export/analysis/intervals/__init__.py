"""Interval arithmetic on core ATen: from what is known of the operands of a node to bounds of its value.

    Known      the value itself, as of parameters and of all that is made of them
    Integers   bounds of an integer or a boolean, for the whole tensor or for parts of it: they broadcast to its shape
    Reals      bounds of floats, and whether there may be a NaN

Bounds of integers are exact: they are computed in int64 where that holds every number on the way, and with Python's
integers otherwise. Bounds of floats are what the operator itself gives for the bounds of its operands, in their dtypes;
as rounding keeps order, no rounded result lies outside of them. What has no rule has no bounds but those of its dtype.

values.py    these kinds of bounds
elements.py  what is computed element by element, or moves elements
sums.py      sums and products of matrices
rules.py     which operator has which bounds
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
from hop.export.analysis.intervals.values import Nothing as Nothing
from hop.export.analysis.intervals.values import Reals as Reals
from hop.export.analysis.intervals.values import Sum as Sum
from hop.export.analysis.intervals.values import Unknown as Unknown
from hop.export.analysis.intervals.values import anything as anything
from hop.export.analysis.intervals.values import bounds as bounds
from hop.export.analysis.intervals.values import concrete as concrete
from hop.export.analysis.intervals.values import dtype_range as dtype_range
from hop.export.analysis.intervals.values import integers as integers
from hop.export.analysis.intervals.values import is_integer as is_integer
