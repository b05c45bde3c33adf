"""TensorProto: a tensor without data, quantized or plain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hop.numerics import blocks, copies
from hop.numerics.copies import Buffer
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown
from hop.tensor import QuantizedTensor
from hop.tensor.from_codes import tensor_of_buffers
from hop.tensor.parameters import fitted


@dataclass(frozen=True)
class TensorProto:
    """A description of a tensor without data.

    Args:
        shape: the sizes, possibly symbolic.
        dtype: the dtype it appears in; floating point if it has a quantizer.
        device: the device of its buffers.
        requires_grad: whether it requires a gradient.
        quantizer: how it is quantized, None for a plain tensor.
        usages: the copies that a quantized tensor has, "rowwise", "columnwise" or both.

    Raises:
        TypeError: an argument has the wrong type, or dtype is not allowed.
        ValueError: a size is negative, or the quantizer does not support the usages.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    requires_grad: bool = False
    quantizer: Quantizer | None = None
    usages: tuple[str, ...] = (copies.ROWWISE,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", blocks.checked_shape("TensorProto", self.shape))
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(
                f"TensorProto: dtype must be a torch.dtype, got {self.dtype!r}; give one such as torch.float32"
            )
        if isinstance(self.device, Quantizer):
            raise TypeError(f"TensorProto: device={self.device} is a quantizer; pass it as quantizer=")
        if not isinstance(self.device, str | torch.device):
            raise TypeError(
                f"TensorProto: device must be a torch.device or its name, got {self.device!r}; give one such as 'cuda'"
            )
        try:
            object.__setattr__(self, "device", torch.device(self.device))
        except RuntimeError as error:
            raise ValueError(
                f"TensorProto: device must be one that PyTorch knows, got {self.device!r}; give one such as 'cuda': "
                f"{error}"
            ) from error
        if not isinstance(self.requires_grad, bool):
            raise TypeError(
                f"TensorProto: requires_grad must be True or False, got {self.requires_grad!r}; give one of them"
            )
        if self.requires_grad and not (self.dtype.is_floating_point or self.dtype.is_complex):
            raise ValueError(f"TensorProto: requires_grad=True is for floats, but dtype is {self.dtype}; leave it out")
        if not isinstance(self.usages, str | tuple | list):
            raise TypeError(f"TensorProto: usages must be a tuple of {copies.USAGES}, got {self.usages!r}; give such")
        if self.quantizer is None:
            return
        if not isinstance(self.quantizer, Quantizer):
            raise TypeError(
                f"TensorProto: quantizer must be a Quantizer or None, got {shown(self.quantizer)}; give one such as "
                "hop.presets.INT8_ROW"
            )
        if self.dtype not in copies.APPEARANCES:
            raise TypeError(
                f"TensorProto: dtype must be floating point for a quantized tensor, got {self.dtype}; "
                "give one such as torch.float32"
            )
        object.__setattr__(self, "usages", copies.checked(self.quantizer, self.usages))

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorProto":
        """Describe `tensor`, plain or quantized."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"TensorProto.of: tensor must be a tensor, got {shown(tensor)}; make one with torch.tensor")
        if not isinstance(tensor, QuantizedTensor):
            return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.quantizer, tensor.usages
        )

    def buffers(self) -> list[Buffer]:
        """The tensors with the data, in a fixed order; for a plain tensor itself, named "data"."""
        if self.quantizer is None:
            return [Buffer("data", self.shape, self.dtype)]
        return copies.describe(self.quantizer, self.shape, self.usages)

    def create_tensor(self, buffers: Sequence[Tensor | float] | None = None) -> Any:
        """Create the tensor from `buffers`, in the order of `buffers()`, or uninitialized.

        Scales and zero points may be numbers, as for QuantizedTensor.

        Pure Python, so it can be traced, and creates fake tensors where others do.

        Raises:
            ValueError: the buffers do not match the description.
        """
        described = self.buffers()
        given: Sequence[Any] = [] if buffers is None else buffers
        if buffers is None:
            given = [torch.empty(b.shape, dtype=b.dtype, device=self.device) for b in described]
        elif self.quantizer is not None and len(given) == len(described):
            named = {b.name: x for b, x in zip(described, given, strict=True)}
            given = list(fitted(self.quantizer, described, named).values())
        copies.check(described, given)
        if self.quantizer is None:
            return given[0].detach().requires_grad_(self.requires_grad)
        if torch.compiler.is_exporting() and self.usages == (copies.ROWWISE,) and not self.requires_grad:
            return tensor_of_buffers(str(self.quantizer), list(given), list(self.shape), self.dtype)
        named = {b.name: tensor for b, tensor in zip(described, given, strict=True)}
        return QuantizedTensor(named, self.quantizer, self.shape, self.dtype, self.requires_grad)

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> "TensorProto":
        """A copy of the description with or without the given usages. The quantizer stays the same."""
        wanted = {copies.ROWWISE: rowwise, copies.COLUMNWISE: columnwise}
        has = {usage: usage in self.usages if want is None else want for usage, want in wanted.items()}
        return replace(self, usages=tuple(usage for usage, held in has.items() if held))
