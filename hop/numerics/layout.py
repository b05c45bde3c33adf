"""Layout: what forms of the codes of a quantized tensor share. One is a frozen value, a field of the quantizer.

What code outside asks a layout is a property or a method here, so that a new one answers for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hop.numerics.blocks import Block
from hop.numerics.formats import Format
from hop.numerics.rule import Rule
from hop.numerics.spelling import Value

if TYPE_CHECKING:
    from hop.numerics.layouts import Tiled


@dataclass(frozen=True, eq=False, repr=False)
class Layout(Value):
    """What all layouts share: how the codes of a tensor are held."""

    tiled: ClassVar[bool] = False
    """Whether what is held has other dimensions than the tensor, or sums over them, so that no view of it is a view of
    the tensor."""

    has_plain_codes: ClassVar[bool] = False
    """Whether the codes lie as in the plain form, so that what reads those reads these."""

    panel: ClassVar[int] = 1
    """How many rows of a matrix are held together."""

    is_decoded: ClassVar[bool] = False
    """Whether what is held are numbers, which do not become codes again."""

    is_dense: ClassVar[bool] = False
    """Whether it takes fewer bytes than the plain form, so that files hold it too."""

    @property
    def tiles(self) -> "Tiled | None":
        """The tiles that the native kernels read, if it is of such."""
        return None

    @property
    def of_matrix(self) -> "Tiled | None":
        """The layout of each matrix of a stack, if it is one for stacks."""
        return None

    def transposed(self) -> "Layout | None":
        """The layout in which what is held of a matrix is what is held of the transposed one; None if there is none."""
        return None

    def of_transposed(self, held: Tensor) -> Tensor:
        """What is held of the transposed matrix in that layout, in the same memory."""
        return held

    def check(self, format: Format, rule: Rule) -> None:
        """Raise ValueError if tensors of `format` cannot be laid out so."""

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if a tensor of `shape` cannot."""

    def held(self, shape: Sequence[int], format: Format) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of what is held of the codes of a tensor of `shape`."""
        raise NotImplementedError

    def pack(self, codes: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """What stands for each of `codes`; `tensors` are those beside them, in shapes that broadcast."""
        return codes

    def arrange(self, packed: Tensor, format: Format) -> Tensor:
        """What is held of what stands for each element of the tensor."""
        return packed

    def restore(
        self, packed: Tensor, shape: Sequence[int], format: Format, beside: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """The inverse of `arrange`, for a tensor of `shape`; `beside` is what is stored beside the codes."""
        return packed

    def numbers(self, packed: Tensor, format: Format, rule: Rule, tensors: Sequence[Tensor]) -> Tensor:
        """The numbers of the codes, float32, for a layout that is decoded: the inverse of `pack`."""
        raise NotImplementedError

    def stored(self, format: Format) -> dict[str, tuple[torch.dtype, Block]]:
        """The name, dtype and block of what is stored beside the codes and what the rule stores."""
        return {}

    def beside(self, codes: Tensor, format: Format) -> dict[str, Tensor]:
        """That, of the codes of a tensor, one to an element."""
        return {}

    def per_byte(self, format: Format) -> int:
        """How many codes share an element of what is held, along the last dimension."""
        return 1

    def suits(self, device: torch.device) -> bool:
        """Whether kernels of a device read it; a tensor that moves to another device is brought to the plain form."""
        return True
