# pyright: strict, reportUnnecessaryIsInstance=false, reportUnknownMemberType=false, reportPrivateImportUsage=false
"""QuantizedTensor: codes and scales that stand for a float tensor. The one tensor subclass, for every format.

quantized.py   what it is: buffers, a quantizer, and the float dtype that it appears in
table.py       the table of ATen operators, and what happens to those that are not in it
rules.py       the rules in the table
padding.py     zeros behind a tensor
collectives.py functional collectives
c10d.py        collectives that write into tensors that they are given
distributed.py DTensors of quantized tensors
views.py       how a change of shape carries over to the buffers
"""

from hop.tensor.quantized import QuantizedTensor as QuantizedTensor
