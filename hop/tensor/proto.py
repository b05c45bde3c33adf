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


@dataclass(frozen=True)
class TensorProto:
    """A tensor without data.

    Args:
        shape: its sizes, symbolic ones included.
        dtype: what it appears in; floating point where it has a quantizer.
        device: where its buffers lie.
        requires_grad: whether it collects a gradient.
        quantizer: how it is quantized, None for a plain tensor.
        usages: the copies that a quantized tensor holds, "rowwise", "columnwise" or both.

    Raises:
        TypeError: an argument is of another type, or dtype none that it can have.
        ValueError: a size is negative, or usages are none of the quantizer.
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
            raise TypeError(f"TensorProto: device={self.device} is a quantizer; pass it by name, quantizer=")
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
            raise ValueError(f"TensorProto: requires_grad=True is for floats, and dtype is {self.dtype}; leave it out")
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
        """What describes `tensor`, plain or quantized."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"TensorProto.of: tensor must be a tensor, got {shown(tensor)}; make one with torch.tensor")
        if not isinstance(tensor, QuantizedTensor):
            return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        return cls(
            tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.quantizer, tensor.usages
        )

    def buffers(self) -> list[Buffer]:
        """The tensors that hold the data, in a fixed order: for a plain tensor itself, named "data"."""
        if self.quantizer is None:
            return [Buffer("data", self.shape, self.dtype)]
        return copies.describe(self.quantizer, self.shape, self.usages)

    def create_tensor(self, buffers: Sequence[Tensor] | None = None) -> Any:
        """The tensor: of `buffers`, in the order of `buffers()`, or not initialized. Made in pure Python, so that it
        is traced, and is fake where tensors are.

        Raises ValueError if the buffers are not those that the proto describes."""
        described = self.buffers()
        if buffers is None:
            buffers = [torch.empty(b.shape, dtype=b.dtype, device=self.device) for b in described]
        else:
            copies.check(described, buffers)
        if self.quantizer is None:
            return buffers[0].detach().requires_grad_(self.requires_grad)
        if torch.compiler.is_exporting() and self.usages == (copies.ROWWISE,) and not self.requires_grad:
            return tensor_of_buffers(str(self.quantizer), list(buffers), list(self.shape), self.dtype)
        named = {b.name: tensor for b, tensor in zip(described, buffers, strict=True)}
        return QuantizedTensor(named, self.quantizer, self.shape, self.dtype, self.requires_grad)

    def update_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> "TensorProto":
        """A copy that holds, or does not hold, the copies named; the quantizer is shared and stays as it is."""
        wanted = {copies.ROWWISE: rowwise, copies.COLUMNWISE: columnwise}
        has = {usage: usage in self.usages if want is None else want for usage, want in wanted.items()}
        return replace(self, usages=tuple(usage for usage, held in has.items() if held))
