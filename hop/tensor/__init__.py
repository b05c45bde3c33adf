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

import torch

from hop._hop import Composite
from hop.tensor import distributed as distributed
from hop.tensor import padding as padding
from hop.tensor import rules as rules
from hop.tensor.quantized import QuantizedTensor as QuantizedTensor

if torch.distributed.is_available():
    from hop.tensor import c10d as c10d
    from hop.tensor import collectives as collectives

Composite.of_dtensors[QuantizedTensor] = distributed.of_dtensors
