"""MasterWeight: a float weight that FSDP2 gathers as codes.

Each process quantizes its shard of the weight with the scales of the whole weight, before the all-gather. The layer
multiplies the gathered QuantizedTensor, whose gradient is a plain tensor that FSDP2 reduces in floating point.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import torch
from torch import Tensor

from hop.compat import dtensor, process_groups, subclasses
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs, tree_map_only
from hop.impls.quantize import quantize
from hop.impls.quantized.operands import swapped_codes, transposed
from hop.nn.contexts import WEIGHT
from hop.nn.scales.delayed import AmaxHistory
from hop.nn.scales.static import StaticScale
from hop.numerics import blocks, copies
from hop.numerics.blocks import Block
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor
from hop.tensor.buffers.sharding import quantize_shared, reduction
from hop.tensor.distributed import fsdp
from hop.tensor.distributed.fsdp import Parts, Sent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

aten = torch.ops.aten
_INSIDE = "inside_"  # the attribute of a Parameter that computes the mask of its elements that were not clipped


class Owner(Protocol):
    """A layer, to the extent that its weight needs it."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def scales(self) -> Mapping[str, torch.nn.Module]: ...


@dataclass(frozen=True)
class Gathering:
    """The settings with which FSDP2 gathers one weight.

    Args:
        quantizer: the quantizer of the weight.
        shape: the shape of everything FSDP2 gathers: the weight, or this process's part where it was already a DTensor.
        as_columns: whether the column-wise copy, which the backward reads, is gathered too.
        outer: the mesh of that earlier DTensor, and for each mesh axis the dimension it shards (None: not sharded).
        layer: a weak reference to the weight's layer, which has the scale where the quantizer's rule finds none.
        masks: whether the gradient of clipped elements is 0.
    """

    quantizer: Quantizer
    shape: tuple[int, ...]
    as_columns: bool
    outer: "tuple[DeviceMesh, tuple[int | None, ...]] | None"
    layer: Callable[[], Owner | None]
    masks: bool

    def quantizers(self) -> list[Quantizer]:
        """Quantizers of the gathered tensors: the weight, and its column-wise copy in terms of the weight's rows."""
        q = self.quantizer
        return [q, q.transposed(len(self.shape))] if self.as_columns else [q]

    def owner(self) -> Owner:
        """The layer that owns the weight. Raises RuntimeError if it no longer exists."""
        result = self.layer()
        if result is None:
            raise RuntimeError("the layer of this weight is gone; call hop.nn.gather_as_codes for the one that has it")
        return result


class MasterWeight(Tensor):
    """A float tensor that FSDP2 gathers as codes when it is a shard of a parameter.

    In every other respect it behaves like `data_`: operators run on that tensor. Views, copies and new tensors like it,
    which FSDP2 and modules create, are MasterWeights; other results are plain tensors. It is saved as a plain tensor.
    """

    data_: Tensor
    gathering: Gathering

    __torch_function__ = subclasses.no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: "type[MasterWeight]", data: Tensor, gathering: Gathering) -> "MasterWeight":
        layout = (data.shape, data.stride(), data.storage_offset())
        return subclasses.make_wrapper(cls, *layout, data.dtype, data.device, False)

    def __init__(self, data: Tensor, gathering: Gathering) -> None:
        self.data_, self.gathering = data, gathering

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"MasterWeight({self.data_!r}, quantizer={self.gathering.quantizer})"

    def __tensor_flatten__(self) -> tuple[list[str], Gathering]:
        return ["data_"], self.gathering

    @staticmethod
    def __tensor_unflatten__(
        tensors: dict[str, Tensor], gathering: Gathering, shape: object, strides: object
    ) -> "MasterWeight":
        return MasterWeight(tensors["data_"], gathering)

    @classmethod
    def __torch_dispatch__(cls, op: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        return subclasses.dispatch(op, args, kwargs or {}, _apply)

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) not in memo:
            gathering = self.gathering
            copied = memo.get(id(gathering.layer()))  # where the layer is copied too
            if copied is not None:
                gathering = replace(gathering, layer=weakref.ref(copied))
            memo[id(self)] = parameter_like(self, MasterWeight(self.data_.detach().clone(), gathering))
        return memo[id(self)]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        plain = parameter_like(self, self.data_)
        return plain.__reduce_ex__(protocol)

    # ---- called by FSDP2

    def fsdp_pre_all_gather(self, mesh: "DeviceMesh") -> tuple[tuple[Tensor, ...], list[Sent]]:
        """Quantize this process's shard and return the bytes of its codes and scales to send."""
        gathering = self.gathering
        parts, rank = Parts(gathering.shape[0], mesh.size()), mesh.get_local_rank()
        if tuple(self.shape) != (parts.length(rank), *gathering.shape[1:]):
            raise ValueError(
                f"fully_shard: a weight that is gathered as codes must be sharded along its first dimension; the part "
                f"{rank} of {mesh.size()} of {gathering.shape} is {tuple(self.shape)}. Leave shard_placement_fn out"
            )
        inputs: list[Tensor] = []
        sent: list[Sent] = []
        for q in gathering.quantizers():
            described = Sent(q, gathering.shape, parts)
            part = _Part(gathering, q, parts, rank, mesh)
            grids, inside = part.quantized(self.data_.detach())
            of_copy = fsdp.send(described, grids)
            sent.append(described.with_inputs(of_copy))
            inputs += of_copy
            if gathering.masks:
                _mask_gradient(gathering.owner().weight, inside)
        return tuple(inputs), sent

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], sent: list[Sent], dtype: torch.dtype, *, out: object = None
    ) -> object:
        """Return the weight as a QuantizedTensor that appears in `dtype`, or fill `out`."""
        count = len(gathered) // len(sent)
        new = fsdp.receive(sent[0], gathered[:count], dtype)
        if len(sent) > 1:
            columns = transposed(swapped_codes(fsdp.receive(sent[1], gathered[count:], dtype)))
            new = new.rebuilt(new.buffers() | columns.buffers())
        if out is not None:
            return fsdp.into(out, new)
        return new, fsdp.own_memory(new, gathered)


_KEPT = {
    *(aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default),
    *(aten.new_empty.default, aten.new_zeros.default),
}


def _apply(op: OpOverload, args: Args, kwargs: Kwargs) -> object:
    """Run `op` on the data; views and copies remain MasterWeights."""
    plain, options = tree_map_only(MasterWeight, _data, (args, kwargs))
    out = op(*plain, **options)
    if op._schema.is_mutable:
        return subclasses.correct_aliasing(op, args, kwargs, out)
    if isinstance(args[0], MasterWeight) and (op.is_view or op in _KEPT):
        gathering = args[0].gathering
        out = tree_map_only(Tensor, lambda t: MasterWeight(t, gathering) if t.is_floating_point() else t, out)
    return out


def _data(t: MasterWeight) -> Tensor:
    return t.data_


def gathered_like(weight: Tensor, new: Tensor) -> Tensor:
    """Wrap `new`, a state_dict entry for `weight`, as a MasterWeight if `weight` is one and `new` can replace it."""
    own, part = dtensor.own_part(weight), dtensor.own_part(new)
    is_master = isinstance(own, MasterWeight) or isinstance(part, MasterWeight)
    if not is_master or dtensor.is_dtensor(weight) != dtensor.is_dtensor(new):
        return new
    result = part.data_ if isinstance(part, MasterWeight) else part
    if isinstance(own, MasterWeight) and type(result) in (Tensor, torch.nn.Parameter):
        result = MasterWeight(result.detach(), own.gathering)
    if dtensor.is_dtensor(new):
        at = dtensor.Sharding([], new.device_mesh, new.placements, new.shape, new.stride())
        result = dtensor.make_dtensor(result, at)
    return parameter_like(new, result)


def parameter_like(old: Tensor, new: Tensor) -> Tensor:
    """Wrap `new` as a Parameter if `old` is one, with its requires_grad."""
    if not isinstance(old, torch.nn.Parameter):
        return new.detach().requires_grad_(old.requires_grad)
    return torch.nn.Parameter(new, old.requires_grad)


def _mask_gradient(weight: Tensor, inside: Callable[[], Tensor]) -> None:
    """Zero a sharded parameter's gradient outside `inside()`, the mask of elements not clipped in the last gather.

    Masking the reduced gradient equals reducing masked ones, because all processes clip the same elements.
    """
    first = not hasattr(weight, _INSIDE)
    setattr(weight, _INSIDE, inside)
    if first:
        weight.register_post_accumulate_grad_hook(_apply_mask)


def _apply_mask(weight: Tensor) -> None:
    grad = dtensor.own_part(weight.grad)
    grad.masked_fill_(~getattr(weight, _INSIDE)(), 0.0)


# ---- DTensors of codes


class _Opened(torch.autograd.Function):
    """Rewrite DTensor(QuantizedTensor) as QuantizedTensor(DTensor buffers)."""

    @staticmethod
    def forward(ctx: object, weight: "DTensor") -> QuantizedTensor:  # type: ignore[override]
        local = dtensor.own_part(weight)
        q, shape = local.quantizer, weight.shape
        buffers: dict[str, Tensor] = {}
        described = {b.name: b for b in copies.describe(q, shape, local.usages)}
        for name, part in local.buffers().items():
            columns = name.startswith(copies.COLUMNWISE)
            whole = described[name].shape

            def placed(p: "Placement", columns: bool = columns, whole: Sequence[int] = whole) -> "Placement":
                dim = dtensor.sharded_dim(p)
                if dim is not None and columns:
                    dim = 1 - dim
                return dtensor.replicate() if dim is None or whole[dim] == 1 else dtensor.sharded(dim)

            placements = [placed(p) for p in weight.placements]
            strides = subclasses.contiguous_strides(whole)
            at = dtensor.Sharding([], weight.device_mesh, placements, torch.Size(whole), strides)
            buffers[name] = dtensor.make_dtensor(part, at)
        return QuantizedTensor(buffers, q, shape, weight.dtype)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def opened(weight: Tensor) -> Tensor:
    """The weight a layer multiplies: `weight`, or a QuantizedTensor of DTensors if it is a DTensor of codes."""
    if dtensor.is_dtensor(weight) and isinstance(dtensor.own_part(weight), QuantizedTensor):
        return _Opened.apply(weight)
    return weight


# ---- quantizing a shard with the scales of the whole weight


@dataclass(frozen=True)
class _Part:
    """The rows of a weight that one process has."""

    gathering: Gathering
    quantizer: Quantizer
    parts: Parts
    rank: int
    mesh: "DeviceMesh"

    def quantized(self, x: Tensor) -> tuple[dict[str, Tensor], Callable[[], Tensor]]:
        """Quantize x, this process's rows.

        Returns, for each buffer, the units that begin in this shard, and a function that computes the mask of elements
        that are not clipped.
        """
        frame, length = self._frame(x), x.shape[0]
        scale, zero_point = self._given(x, frame)
        buffers = self._buffers(frame, scale, zero_point)
        own = slice(self.parts.start(self.rank) - self._first, None)
        grids = dict(buffers)
        for name, unit in fsdp.row_units(self.quantizer, x.dim()).items():
            if unit == -1:
                continue
            first, last = self.parts.units(self.rank, unit)
            skipped = first - self._first // unit if length else 0
            grids[name] = buffers[name][skipped : skipped + last - first]

        def inside() -> Tensor:
            used = buffers["scale"] if scale is None else scale
            return self.quantizer.derivatives(self._frame(x), used, buffers.get("zero_point")).inside[own][:length]

        return grids, inside

    @property
    def _unit(self) -> int:
        """Rows per block; 1 if a block spans all rows."""
        return max(1, *fsdp.row_units(self.quantizer, len(self.gathering.shape)).values())

    @property
    def _first(self) -> int:
        """The first row of the block in which the shard begins."""
        return self.parts.start(self.rank) // self._unit * self._unit

    def _frame(self, x: Tensor) -> Tensor:
        """x extended to whole blocks, with the scale rule's padding for rows of other processes. Never empty."""
        start, length = self.parts.start(self.rank), x.shape[0]
        last = min(-(-(start + length) // self._unit) * self._unit, self.parts.rows)
        if length and (start, start + length) == (self._first, last):
            return x
        frame = x.new_full((max(last - self._first, 1), *x.shape[1:]), self.quantizer.scale.padding())
        frame[start - self._first :][:length] = x
        return frame

    def _buffers(self, frame: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> dict[str, Tensor]:
        if not self._is_cut():
            return quantize(self.quantizer, frame, scale=scale, zero_point=zero_point).buffers()
        buffers = quantize_shared(self.quantizer, frame, (scale, zero_point, None), (copies.ROWWISE,), self._combined)
        names = copies.names(self.quantizer, (copies.ROWWISE,))
        return dict(zip(names, buffers, strict=True))

    def _is_cut(self) -> bool:
        """Whether a block spans several processes."""
        ndim, outer = len(self.gathering.shape), self.gathering.outer
        grids = [blocks.per_dimension(block, ndim) for _, block in self.quantizer.stored().values()]
        by_rows = self.parts.processes > 1 and any(g[0] == -1 or self.parts.size % g[0] for g in grids)
        return by_rows or (outer is not None and any(d is not None and g[d] == -1 for g in grids for d in outer[1]))

    def _combined(self, values: Tensor, op: str, block: Block) -> Tensor:
        """Combine a per-block statistic of the frame over the processes that share blocks. It is 0 where there are no
        elements.
        """
        if block[0] == -1:
            values = process_groups.combined_over(values, op, self.mesh, 0)
        elif self.parts.size % block[0]:
            whole = values.new_zeros(-(-self.parts.rows // block[0]), *values.shape[1:])
            at = self._first // block[0] if self.parts.length(self.rank) else 0
            whole[at : at + values.shape[0]] = values
            values = process_groups.combined_over(whole, op, self.mesh, 0)[at : at + values.shape[0]]
        return self._combined_outside(values, op, block)

    def _combined_outside(self, values: Tensor, op: str, block: Block) -> Tensor:
        """Combine it over the processes among which the weight was already sharded."""
        return values if self.gathering.outer is None else reduction(*self.gathering.outer)(values, op, block)

    def _given(self, x: Tensor, frame: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The scale and zero point of the frame's blocks, for a rule that finds none from x."""
        if self.quantizer.scale.missing() is None:
            return None, None
        state = self.gathering.owner().scales[WEIGHT]
        if isinstance(state, AmaxHistory):
            magnitude = frame.abs()
            amax = torch.where(magnitude == magnitude, magnitude, 0.0).amax().reshape([1] * x.dim())
            amax = self._combined(amax.to(torch.float32), "max", (-1,) * x.dim())
            with torch.enable_grad():  # FSDP2 gathers under no_grad, even when the layer trains
                return state(amax).expand(amax.shape), None
        assert isinstance(state, StaticScale)
        if not state.ready:
            raise RuntimeError(
                "hop.nn: the static scale of a weight is not set; call its set(scale, zero_point), or load a "
                "state_dict that has it, before the first forward"
            )
        return self._own_rows(state.scale, frame), self._own_rows(state.zero_point, frame)

    def _own_rows(self, given: Tensor | None, frame: Tensor) -> Tensor | None:
        """The blocks of `given`, the scale of the whole weight, that the frame covers."""
        if given is None:
            return None
        q, unit = self.quantizer, fsdp.row_units(self.quantizer, frame.dim())["scale"]
        whole = given.detach().expand(q.buffers(self.gathering.shape)["scale"][0])
        rows = slice(None) if unit == -1 else slice(self._first // unit, -(-(self._first + frame.shape[0]) // unit))
        return whole[rows]
