"""The dtype out_dtype computes in.

`common_dtype` is PyTorch's elementwise promotion (torch.result_type: tensors with dimensions first, then
zero-dimensional ones, then Python numbers), followed by the dtype PyTorch computes elementwise operators in (float32
for the 16-bit floats). It also covers cases that torch.promote_types rejects:

* 8-bit floats compute in float32, as 16-bit ones do;
* an unsigned type with a signed or a narrower one gives the smallest type that represents both, and at most int64
  (uint64 with a signed type: int64, the same 64 bits).

`run_dtype` is the dtype the reference calls ATen with. It differs from the common dtype only where ATen has no kernel
for that dtype or rejects it, and gives the same integers there.
"""

import functools
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hop.compat.eager import OpOverload
from hop.dispatch.operators import DIVIDE, INTERPOLATE, MAXIMUM, MEAN, TABLE, aten, within
from hop.impls.out_dtype.arguments import Inner
from hop.impls.out_dtype.forms import CONVOLUTIONS

FLOAT8 = frozenset(
    {
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    }
)
_COMPUTE = {
    **dict.fromkeys([*FLOAT8, torch.float16, torch.bfloat16], torch.float32),
    torch.complex32: torch.complex64,
}
_UNSIGNED = {torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_STANDARD = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
# In this order, because bool is a subclass of int.
_NUMBERS = {
    bool: (bool, torch.SymBool),
    int: (int, torch.SymInt),
    float: (float, torch.SymFloat),
    complex: (complex,),
}
DTYPES = frozenset([*_COMPUTE, *_UNSIGNED, *_STANDARD])

# Sums of products: arithmetic modulo 2^bits may run in any wider integer dtype.
_LINEAR = {op.overloadpacket for op, row in TABLE.items() if row.family.is_linear}
_LINEAR |= {aten.einsum, aten.tensordot, aten.rsub, aten.neg}
# ATen computes these only in floats, or would return the default dtype.
_FLOAT32_FOR_INTEGERS = within(DIVIDE) | {aten.true_divide.Tensor, aten.true_divide.Scalar}
# On CPU these have kernels for int64, but not for narrower integers.
_INT64_PACKETS = frozenset({aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d})
_FLOAT32_PACKETS = {op.overloadpacket for op in within(MEAN, INTERPOLATE)} - _INT64_PACKETS | {
    aten._adaptive_avg_pool2d
}

_UINT8_FOR_BOOL = {op.overloadpacket for op in within(MAXIMUM)}  # ATen does not pool booleans


def common_dtype(
    inner: Inner, output_dtype: torch.dtype, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.dtype:
    """The common dtype of the promoted arguments and `output_dtype`."""
    kinds: list[object] = []
    for name, value in inner.operands(args, kwargs):
        if not inner.promotes(name, value):
            continue
        if isinstance(value, Tensor):
            kinds.append((value.dtype, value.dim() == 0))
        elif value is not None:
            kinds.append(next((kind for kind, classes in _NUMBERS.items() if isinstance(value, classes)), None))
    return _common(output_dtype, torch.get_default_dtype(), tuple(kinds))


@functools.lru_cache(maxsize=4096)
def _common(output_dtype: torch.dtype, default: torch.dtype, kinds: tuple[object, ...]) -> torch.dtype:
    """The common dtype for `kinds`: (dtype, is zero-dimensional) of each tensor, the Python type of each number."""
    dims, zero_dims, numbers = {output_dtype}, set(), set()
    for kind in kinds:
        if isinstance(kind, tuple):
            dtype, is_zero_dim = kind
            (zero_dims if is_zero_dim else dims).add(dtype)
        elif kind is float:
            numbers.add(default)
        elif kind is complex:
            numbers.add(torch.complex128 if default is torch.float64 else torch.complex64)
        elif kind is not None:
            numbers.add(torch.bool if kind is bool else torch.int64)
    common = _promote_all(dims)
    for weaker in (zero_dims, numbers):
        if weaker and _category(_promote_all(weaker)) > _category(common):
            common = _promote_pair(common, _promote_all(weaker))
    return common


def _promote_all(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    # Signed and unsigned types are each widened first, so that the result does not depend on the order.
    ordered = sorted({_COMPUTE.get(d, d) for d in dtypes}, key=lambda d: (d in _UNSIGNED, d.itemsize, str(d)))
    return functools.reduce(_promote_pair, ordered)


def _promote_pair(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    a, b = _COMPUTE.get(a, a), _COMPUTE.get(b, b)
    if a == b:
        return a
    if a not in _UNSIGNED and b not in _UNSIGNED:
        return torch.promote_types(a, b)
    if b not in _UNSIGNED:
        a, b = b, a
    if a.is_floating_point or a.is_complex:
        return a
    if a in _UNSIGNED or a in (torch.bool, torch.uint8):
        return max(a, b, key=lambda d: d.itemsize)
    for signed in (torch.int32, torch.int64):
        if signed.itemsize > b.itemsize and signed.itemsize >= a.itemsize:
            return signed
    return torch.int64


def _category(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1


def is_integer(dtype: torch.dtype) -> bool:
    """Whether a dtype is an integer dtype; bool is not."""
    return _category(dtype) == 1


def run_dtype(op: OpOverload, common: torch.dtype) -> torch.dtype:
    """The dtype the reference calls `op` with."""
    packet = op.overloadpacket
    if common is torch.bool and packet in _UINT8_FOR_BOOL:
        return torch.uint8
    if common is torch.bool or not is_integer(common):
        return torch.float32 if common is torch.bool and packet in _FLOAT32_PACKETS else common
    if op in _FLOAT32_FOR_INTEGERS or packet in _FLOAT32_PACKETS:
        return torch.float32
    if packet in _INT64_PACKETS or packet in CONVOLUTIONS:
        return torch.int64
    if common in _UNSIGNED and (packet in _LINEAR or common is not torch.uint64):
        return torch.int64
    return common
