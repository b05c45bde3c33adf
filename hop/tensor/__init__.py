"""QuantizedTensor: codes and scales that stand for a float tensor. The one tensor subclass, for every format.

quantized.py   what it is: buffers, a quantizer, and the float dtype that it appears in
table.py       the table of ATen operators, and what happens to those that are not in it
rules.py       the rules in the table
units.py       how many elements an element of a buffer serves
views.py       how a change of shape carries over to the buffers
proto.py       the same without data
storage.py     files
control_flow.py  in PyTorch's loops and branches
buffers/       the operators on buffers that all of these are made of
distributed/   on several processes: DTensor, FSDP2 and collectives
"""

from hop.compat.imports import when_imported
from hop.tensor import control_flow as control_flow
from hop.tensor.quantized import QuantizedTensor as QuantizedTensor


def _with_dtensor() -> None:
    from hop.tensor.distributed import dtensor as dtensor


def _with_fsdp() -> None:
    from hop.tensor.distributed import fsdp as fsdp


when_imported("torch.distributed.tensor", _with_dtensor)
when_imported("torch.distributed.fsdp", _with_fsdp)
