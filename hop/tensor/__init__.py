"""QuantizedTensor: codes and scales that represent a float tensor. The one tensor subclass, for all formats.

quantized.py   the class: buffers, a quantizer, and the float dtype it appears in
from_codes.py  create one from codes, scales and zero points
table.py       the table of ATen operators, and what happens to operators without a rule
rules.py       the rules in the table
units.py       how many elements an element of a buffer serves
views.py       apply changes of shape to the buffers
proto.py       the same without data
storage.py     safetensors files
control_flow.py  in PyTorch's loops and branches
buffers/       the operators on buffers that these are composed of
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
