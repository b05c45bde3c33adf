"""The kernels of out_dtype, in matching order.

Products of int8, uint8 and int16 use the integer kernels, which compute modulo 2^32. This is the result if the common
dtype has at most 32 bits. For wider common dtypes it is exact while sums cannot overflow, and for float results while
float32 would not round the sums either.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hop.compat import eager, memory
from hop.compat.eager import OpOverload
from hop.compat.memory import holds
from hop.compat.pytree import Args, Kwargs
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.plan import Plan
from hop.impls.out_dtype.arguments import describe
from hop.impls.out_dtype.forms import BiasedConvolution, Product, as_convolution, as_product
from hop.impls.out_dtype.meaning import reference
from hop.impls.out_dtype.promotion import FLOAT8, common_dtype, is_integer
from hop.kernels.aten import convolution, float8, integer
from hop.kernels.cpu import product as native_product
from hop.kernels.gpu import product as gpu


class FormedCall(NamedTuple):
    """A call in the form that kernels take."""

    form: Any  # Product or BiasedConvolution
    common: torch.dtype
    output_dtype: torch.dtype
    op: OpOverload
    given: Args
    kwargs: Kwargs

    def plan(self, compute: "Callable[[FormedCall], Tensor]") -> Plan:
        """A plan that brings new operands into the form and calls `compute`."""
        bare = self._replace(form=None, given=())

        def run(*given: object) -> Tensor:
            memory.check(given)
            given = tuple(x.resolve_neg() if isinstance(x, Tensor) else x for x in given)
            return compute(bare._replace(form=_form(bare.op, given, bare.kwargs), given=given))

        return run


def _form(op: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Product | BiasedConvolution | None:
    return as_product(op, args, kwargs) or as_convolution(op, args)


def candidates(
    op: OpOverload, output_dtype: torch.dtype, args: Args, kwargs: Kwargs
) -> Iterator[tuple[Kernel, FormedCall]]:
    """The kernels to match in order, each with the call in normal form."""
    if (form := _form(op, args, kwargs)) is None:
        return
    common = common_dtype(describe(op), output_dtype, args, kwargs)
    call = FormedCall(form, common, output_dtype, op, args, kwargs)
    for kernel in _PRODUCT_KERNELS if isinstance(form, Product) else _CONVOLUTION_KERNELS:
        yield _NATIVE_PRODUCT if kernel is _INTEGER_PRODUCT and _is_native(call) else kernel, call


def with_float_products(op: OpOverload, output_dtype: torch.dtype, /, *args: object, **kwargs: object) -> Tensor:
    """The reference with integer products as float32 products over chunks of K, for exported programs."""
    for kernel, call in candidates(op, output_dtype, args, kwargs):
        # no native kernels here
        compute = {_INTEGER_PRODUCT: _run_product, _INTEGER_CONVOLUTION: _run_convolution}.get(kernel)
        if compute is not None and not isinstance(kernel.match(call), Declined):
            return compute(call, "floats")
    return reference(op, output_dtype, *args, **kwargs)


# ---- integer products

# Common dtypes for which sums modulo 2^32 suffice.
_MODULO = frozenset({torch.int32, torch.int16, torch.int8, torch.uint16, torch.uint8})


def _check_integers(lhs: Tensor, rhs: Tensor, terms: object, call: FormedCall) -> None:
    if lhs.dtype not in integer.OPERANDS or rhs.dtype not in integer.OPERANDS:
        raise Declined(f"operands are {lhs.dtype} and {rhs.dtype}; takes int8, uint8 and int16")
    if call.common in _MODULO:
        return
    exact = is_integer(call.common)
    if not exact and not call.common.is_floating_point:
        raise Declined(f"the common dtype is {call.common}")
    if not exact and is_integer(call.output_dtype):
        raise Declined("integers are combined with a float factor, which the reference multiplies in float64")
    limit = 2**31 - 1 if exact else 2**24
    largest = limit // integer.largest_product(lhs.dtype, rhs.dtype)
    if not isinstance(terms, int) or terms > largest:
        raise Declined(f"{terms} terms are not known to be exact in {'int32' if exact else 'float32'}")


def _is_native(call: FormedCall) -> bool:
    """Whether an integer product becomes a native operator in compiled programs.

    Inductor fuses a bfloat16 or float16 summand with its producer unless the summand is rounded first (Hop._lower), so
    such calls go to the general kernel.
    """
    product: Product = call.form
    if call.common not in _MODULO and product.added is not None:
        return False
    return integer.route(product.lhs, product.rhs) == "native"


def _prepare_product(call: FormedCall) -> Plan:
    lhs, rhs = call.form.lhs, call.form.rhs
    _check_integers(lhs, rhs, lhs.shape[-1], call)
    general = call.plan(_run_product)
    if not (call.form.is_whole and call.output_dtype is torch.int32 and lhs.is_cpu and eager.is_plain_eager()):
        return general
    # Two matrices of bytes on the CPU: this plan costs 4 µs on top of the product instead of 20 µs.
    way = integer.route(lhs, rhs)
    if way == "native" and {lhs.dtype, rhs.dtype} <= {torch.int8, torch.uint8}:
        return native_product.planned_int_mm(lhs, rhs)
    (k, n), int_mm = rhs.shape, eager.int_mm
    if way != "int_mm" or not (lhs.dtype is rhs.dtype is torch.int8 and k > 1 and n > 1):
        return general
    row, layouts = (k, 1), ((1, k), (n, 1))  # strides that torch._int_mm reads correctly (integer.row_major)

    def run(a: Tensor, b: Tensor) -> Tensor:
        if a.stride() == row and b.stride() in layouts and holds(a) and holds(b):
            return int_mm(a, b)
        return general(a, b)

    return run


def _run_product(call: FormedCall, way: str | None = None) -> Tensor:
    product: Product = call.form
    multiply = integer.mm if product.lhs.dim() == 2 else integer.bmm
    if call.common in _MODULO:
        row = None if product.row is None else product.row.to(torch.int32)
        result = product.finish(multiply(product.lhs, product.rhs, row, way))
    else:
        result = product.complete(multiply(product.lhs, product.rhs, way=way).to(call.common))
    return result.to(call.output_dtype)


def _prepare_convolution(call: FormedCall) -> Plan:
    form: BiasedConvolution = call.form
    conv = form.conv
    if not all(isinstance(s, int) and s > 0 for s in conv.x.shape[1:]) or 0 in conv.weight.shape:
        raise Declined(f"shapes {tuple(conv.x.shape)} and {tuple(conv.weight.shape)} are empty or symbolic")
    if not _well_formed(form):
        raise Declined("the shapes do not fit together")
    first, second, *kernel = conv.weight.shape
    if torch.int32 in (conv.x.dtype, conv.weight.dtype) and call.common is torch.int32:
        # among integers, ATen has plain convolutions only for int32; the reference uses int64
        return call.plan(_run_convolution)
    terms = math.prod(kernel) * (first // conv.groups if conv.transposed else second)
    _check_integers(conv.x, conv.weight, terms, call)
    return call.plan(_run_convolution)


def _well_formed(form: BiasedConvolution) -> bool:
    x, weight, stride, padding, dilation, transposed, output_padding, groups = form.conv
    first, second, *kernel = weight.shape
    spatial = len(kernel)
    if {len(stride), len(padding), len(dilation), len(output_padding)} != {spatial} or groups < 1:
        return False
    channels, out_channels = (first, second * groups) if transposed else (second * groups, first)
    if x.shape[1] != channels or channels % groups or out_channels % groups:
        return False
    if form.bias is not None and form.bias.shape != (out_channels,):
        return False
    for size, k, step, pad, d, extra in zip(
        x.shape[2:], kernel, stride, padding, dilation, output_padding, strict=True
    ):
        if step < 1 or d < 1 or pad < 0 or extra < 0 or extra >= (max(step, d) if transposed else 1):
            return False
        span = d * (k - 1)
        if (((size - 1) * step - 2 * pad + span + extra + 1) if transposed else (size + 2 * pad - span)) < 1:
            return False
    return True


def _run_convolution(call: FormedCall, way: str | None = None) -> Tensor:
    form: BiasedConvolution = call.form
    out = convolution.convolve(form.conv, way)
    if call.common not in _MODULO:
        out = out.to(call.common)
    if form.bias is not None:
        out = out + form.bias.to(out.dtype).view(-1, *[1] * (out.dim() - 2))
    out = out.squeeze(0) if form.unbatched else out
    return out.to(call.output_dtype)


# ---- 8-bit floats


def _prepare_float8(call: FormedCall) -> Plan:
    product: Product = call.form
    if not product.lhs.is_cpu:
        raise Declined(f"no kernel for device {product.lhs.device.type}")
    if product.lhs.dtype not in FLOAT8 and product.rhs.dtype not in FLOAT8:
        raise Declined(f"operands are {product.lhs.dtype} and {product.rhs.dtype}; takes 8-bit floats")
    if call.common is not torch.float32:
        raise Declined(f"the common dtype is {call.common}")
    return call.plan(_run_float8)


def _run_float8(call: FormedCall) -> Tensor:
    product: Product = call.form
    lhs, rhs = float8.decode(product.lhs), float8.decode(product.rhs)
    multiply = torch.mm if lhs.dim() == 2 else torch.bmm
    return product.complete(multiply(lhs, rhs)).to(call.output_dtype)


def _prepare_gpu(call: FormedCall) -> Plan:
    product: Product = call.form
    if not gpu.takes(product.lhs):
        raise Declined("for GPUs, in eager mode and in programs compiled for this process")
    if {product.lhs.dtype, product.rhs.dtype} - {torch.float8_e4m3fn, torch.float8_e5m2}:
        raise Declined(f"operands are {product.lhs.dtype} and {product.rhs.dtype}; takes float8_e4m3fn and float8_e5m2")
    if call.common is not torch.float32 or product.lhs.dim() != 2:
        raise Declined(f"for two matrices with common dtype float32; got {product.lhs.dim()} dimensions, {call.common}")
    decline(gpu.declines(gpu.product(product.lhs, product.rhs, torch.float32)))
    return call.plan(_run_gpu)


def _run_gpu(call: FormedCall) -> Tensor:
    product: Product = call.form
    return product.complete(gpu.mm(product.lhs, product.rhs, torch.float32)).to(call.output_dtype)


# ---- bfloat16


def _prepare_bfloat16(call: FormedCall) -> Plan:
    product: Product = call.form
    dtypes = (product.lhs.dtype, product.rhs.dtype, call.output_dtype)
    if any(d is not torch.bfloat16 for d in dtypes):
        raise Declined(f"operands are {dtypes[0]} and {dtypes[1]}, the output {dtypes[2]}; takes only bfloat16")
    if product.added is not None:
        raise Declined("adds a summand before the sum is rounded")
    if not product.lhs.is_cpu:
        raise Declined(f"no kernel for device {product.lhs.device.type}")
    if not eager.multiplies_bfloat16():
        raise Declined("the CPU has no instructions for bfloat16")
    return call.plan(_run_bfloat16)


def _run_bfloat16(call: FormedCall) -> Tensor:
    product: Product = call.form
    multiply = torch.mm if product.lhs.dim() == 2 else torch.bmm
    return product.finish(multiply(product.lhs, product.rhs))


_INTEGER_PRODUCT = Kernel("integer product", _prepare_product)
_NATIVE_PRODUCT = replace(_INTEGER_PRODUCT, native=True)
_INTEGER_CONVOLUTION = Kernel("integer convolution", _prepare_convolution)
_PRODUCT_KERNELS = (
    _INTEGER_PRODUCT,
    Kernel("GPU product", _prepare_gpu),
    Kernel("float8 by table", _prepare_float8),
    Kernel("bfloat16 product", _prepare_bfloat16),
)
_CONVOLUTION_KERNELS = (_INTEGER_CONVOLUTION,)
