"""Plans: what was found for a call, kept for the next one like it.

Two calls are alike if their operator, output, and the quantizers, shapes, dtypes and devices of their arguments are
equal, and the strides of quantized ones with more than two dimensions. Checking them and choosing a kernel takes 150
µs. A plan is a function that runs the kernel, of the arguments, and, where the output is a quantizer, of its scale and
zero point after them, None if they are not given. Small matrix products and convolutions, which are over in less time
than it takes to describe them, have functions of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.compat import eager, memory
from hop.compat.memory import holds
from hop.compat.patches import unsigned_products
from hop.dispatch.hop import PLAIN
from hop.dispatch.operators import BIAS, LHS, OTHER, RHS, TABLE, aten
from hop.impls.out_dtype.arguments import describe
from hop.impls.scaled import exact, gpu, kernels
from hop.impls.scaled.calls import Call
from hop.impls.scaled.native import product
from hop.impls.scaled.native_convolution import convolution
from hop.impls.scaled.operands import Operand
from hop.kernels.aten.float8 import decode
from hop.kernels.cpu import native
from hop.kernels.cpu import operators as native_operators
from hop.kernels.gpu import product as gpu_kernels
from hop.numerics import copies
from hop.numerics.blocks import per_dimension
from hop.numerics.formats import Float, Integer
from hop.numerics.layouts import Decoded
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Amax, BlockScaling, CurrentScaling, Given, MinMax, TwoLevel
from hop.tensor import QuantizedTensor
from hop.tensor.quantized import form_of, kind_of

Plan = Callable[..., Any]


_MOST = 4096
_is_dual_level_open = eager.is_dual_level_open  # found faster than an attribute
_plans: dict[tuple[Any, ...], Any] = {}


def key(op: Any, output: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What two calls have in common that can share a plan, of what plans are given; None for one that needs a gradient
    or a tangent, or that holds tensors of other classes, or is made of them, or lists of tensors."""
    parts, grad, dual = [op, output], torch.is_grad_enabled(), _is_dual_level_open()
    add = parts.append
    for x in given:
        cls = type(x)
        if cls is QuantizedTensor:
            kind = x._kind or kind_of(x)
            if type(getattr(x, kind[1][0])) not in PLAIN or (grad and x.requires_grad):
                return None
            if dual and eager.has_tangent(x):
                return None
            add(kind)
            if len(kind[2]) > 2:  # a convolution's result lies as its input does
                add(x.stride())
        elif cls in PLAIN:
            if (grad and x.requires_grad) or (dual and eager.has_tangent(x)):
                return None
            add(x.dtype)
            add(x.shape)
            add(x.device)
        elif x is None or cls is int or cls is str or cls is float or cls is bool:
            add(x)
        elif cls is list or cls is tuple:
            if any(isinstance(v, Tensor) for v in x):
                return None
            add(tuple(x))
        else:
            return None
    return tuple(parts)


find = _plans.get


def remember(key: tuple[Any, ...], op: Any, output: Any, given: tuple[Any, ...], kernel: Any, result: Any) -> None:
    """Keep that calls with `key` run `kernel`, which gave `result` for one of them."""
    if len(_plans) >= _MOST:
        _plans.clear()
    direct = _DIRECT.get(kernel, lambda *_: None)(op, output, given)
    plan = direct or _general(op, output, kernel)
    _plans[key] = _quantized(plan, op, given, result) if isinstance(result, QuantizedTensor) else plan


native.on_change.append(_plans.clear)


def call(op: Any, output: Any, given: tuple[Any, ...]) -> Call:
    """The call of what a plan is given."""
    memory.check(given)
    *args, scale, zero_point = given if isinstance(output, Quantizer) else (*given, None, None)
    bound, kwargs = describe(op).bind(tuple(args), {})
    return Call(op, output, scale, zero_point, tuple(map(operand, bound)), kwargs)


def _general(op: Any, output: Any, kernel: Any) -> Plan:
    def run(*given: Any) -> Any:
        return kernel.run(call(op, output, given))

    return run


def _quantized(plan: Plan, op: Any, given: tuple[Any, ...], like: QuantizedTensor) -> Plan:
    """The quantized tensors, alike but for their data and the dtype that they appear in, of which `plan` gives the
    buffers."""
    names, quantizer, shape, first = like._names, like.quantizer, like.shape, first_operand(op, given)

    def run(*given: Any) -> QuantizedTensor:
        return QuantizedTensor.fitting(
            dict(zip(names, plan(*given), strict=True)), quantizer, shape, given[first].dtype
        )

    return run


def first_operand(op: Any, args: tuple[Any, ...]) -> int:
    """Which argument is the first that may be quantized."""
    roles = TABLE[op]
    return next(
        i for i, x in enumerate(args) if isinstance(x, Tensor | list | tuple) and roles.role(i) in (LHS, RHS, OTHER)
    )


def operand(x: Any) -> Any:
    """A QuantizedTensor as an Operand; anything else as it is."""
    if isinstance(x, list | tuple):
        return [operand(v) for v in x]
    if not isinstance(x, QuantizedTensor):
        return x
    x.check()
    return Operand(x.quantizer, tuple(x.buffers().values()), x.usages, tuple(x.shape))


# ---- linear and mm by the native kernels


def _native(op: Any, output: torch.dtype, args: tuple[Any, ...]) -> Plan | None:
    """NATIVE for row-wise factors; described once."""
    if op not in (aten.linear.default, aten.mm.default) or len(args) not in (2, 3):
        return None
    if any(isinstance(x, QuantizedTensor) and x.usages != (copies.ROWWISE,) for x in args):
        return None
    if not isinstance(output, torch.dtype):
        return None
    general = _general(op, output, kernels.NATIVE)
    made = product(call(op, output, args))
    assert not isinstance(made, str)
    lhs, rhs, _ = _three(args)
    n = rhs.shape[0 if op is aten.linear.default else 1]
    shape, of_lhs, of_rhs = (*lhs.shape[:-1], n), _read(lhs, made.lhs), _read(rhs, made.rhs)
    multiply, description, below = torch.ops.hop_native.product.default, made.description, eager.below_autograd

    def run(lhs: Any, rhs: Any, bias: Tensor | None = None) -> Tensor:
        try:
            with below():
                y = multiply(*of_lhs(lhs), *of_rhs(rhs), bias, None, None, n, description)
            if y.shape == shape and y.is_cpu:
                return y
        except RuntimeError:  # which `general` gives the reason of, if an operand is not what it was described as
            pass
        return general(lhs, rhs) if bias is None else general(lhs, rhs, bias)

    if made.lhs[1:] == made.rhs[1:] == ("scale", None, None):  # the same, in fewer steps

        def run_plainly(lhs: Any, rhs: Any, bias: Tensor | None = None) -> Tensor:
            x = (lhs.codes, lhs.scale, None, None, rhs.codes, rhs.scale, None, None, bias, None, None)
            try:
                with below():
                    y = multiply(*x, n, description)
                if y.shape == shape and y.is_cpu:
                    return y
            except RuntimeError:
                pass
            return run(lhs, rhs, bias)

        return run_plainly
    return run


def _read(x: Any, names: Sequence[str | None]) -> Callable[[Any], Sequence[Tensor | None]]:
    """What gives the four buffers that a product reads of a factor like x."""
    if not isinstance(x, QuantizedTensor):
        return lambda x: (x, None, None, None)
    if names[1:] == ("scale", None, None):
        return lambda x: (x.codes, x.scale, None, None)
    if names[1:] == ("scale", "zero_point", None):
        return lambda x: (x.codes, x.scale, x.zero_point, None)
    return lambda x: [None if name is None else getattr(x, name) for name in names]


# ---- convolutions by the native kernels


def _convolution(op: Any, output: Any, given: tuple[Any, ...]) -> Plan | None:
    """NATIVE_CONVOLUTION for batches of plain codes, described once."""
    asked, gives_codes = call(op, output, given), isinstance(output, Quantizer)
    lhs, rhs, bias = (asked.find(role) for role in (LHS, RHS, BIAS))
    simple = all(type(x.quantizer.scale) in _SIMPLE and x.quantizer.per_byte() == 1 for x in (lhs, rhs))
    if lhs.dim() != rhs.dim() or not simple:
        return None
    made = convolution(asked)
    assert not isinstance(made, str)
    if gives_codes and not (made.gives_codes and lhs.dim() > 3 and _are_buffers(asked, made.shape)):
        return None
    general = _general(op, output, kernels.NATIVE_CONVOLUTION)
    affine, biased = lhs.quantizer.scale.has_zero_point(), bias is not None
    n, shape, description = rhs.shape[0], made.shape, made.description
    convolve = native_operators.convolution

    def run(*given: Any) -> Any:
        x, weight = given[0], given[1]
        try:
            y = convolve(
                x.codes,
                x.scale,
                x.zero_point if affine else None,
                weight.codes,
                weight.scale,
                given[2] if biased else None,
                *(given[-2:] if gives_codes else (None, None)),
                n,
                description,
            )
        except RuntimeError:  # as in a product
            return general(*given)
        if y.shape != shape or not y.is_cpu:
            return general(*given)
        return [y, *(t.clone() for t in given[-2:] if t is not None)] if gives_codes else y

    return run


def _are_buffers(call: Call, shape: Sequence[int]) -> bool:
    """Whether scale and zero point of the output have the shapes and dtypes of their buffers, for a result of `shape`,
    and every number of that dtype is a code."""
    given, format = (call.output_scale, call.output_zero_point), call.output.format  # type: ignore[union-attr]
    info = torch.iinfo(format.dtype)
    stored = [t for t in given if t is not None]
    buffers = exact.given_buffers(call, list(shape))
    same = all(t.shape == own.shape and t.dtype == own.dtype for t, own in zip(stored, buffers, strict=True))
    return same and (format.low, format.high) == (info.min, info.max)  # type: ignore[union-attr]


# ---- linear and mm by the GPU kernels


def _fits(x: Any) -> bool:
    """Whether an operand still has the form and the memory that its quantizer describes."""
    if not isinstance(x, QuantizedTensor):
        return holds(x)
    own, form = vars(x), x._form or form_of(x)
    if x.device.type == "cpu":
        return form.fits([own[name] for name in x._names])
    return all(
        own[name].shape == shape and own[name].dtype is dtype and holds(own[name])
        for name, shape, dtype in form.described
    )


def _lies(bias: Tensor | None) -> bool:
    return bias is None or holds(bias)


def _gpu(op: Any, output: Any, args: tuple[Any, ...]) -> Plan | None:
    """kernels.GPU for factors that are multiplied as they lie: 8-bit codes with scales in float32."""
    if op not in (aten.linear.default, aten.mm.default) or len(args) not in (2, 3) or output not in gpu.REALS:
        return None
    lhs, rhs = args[:2]
    simple = all(isinstance(x, QuantizedTensor) and _lies_plainly(x.quantizer, x.usages) for x in (lhs, rhs))
    if not simple or lhs.dim() != 2 or not isinstance(asked := gpu.asked(call(op, output, args)), gpu.Asked):
        return None
    transposed, general, p = op is aten.linear.default, _general(op, output, kernels.GPU), asked.product
    if (p.lhs_scale.numel(), p.rhs_scale.numel()) != (lhs.scale.numel(), rhs.scale.numel()):  # one for several rows
        return None
    multiply, layouts = gpu_kernels.prepared(p), (p.lhs.stride(), p.rhs.stride())
    blocks = p.scaling == "block"
    of_lhs, of_rhs = (x.quantizer.scale.has_zero_point() for x in (lhs, rhs))

    def run(lhs: Any, rhs: Any, bias: Tensor | None = None) -> Tensor:
        a, b, of_columns = lhs.codes, rhs.codes, rhs.scale
        if transposed:
            b = b.t()
            of_columns = of_columns.t() if blocks else of_columns
        negates = lhs.scale.is_neg() or of_columns.is_neg() or (bias is not None and bias.is_neg())
        if (a.stride(), b.stride()) != layouts or negates or not (_fits(lhs) and _fits(rhs)):
            return general(lhs, rhs) if bias is None else general(lhs, rhs, bias)
        fused = {"lhs_scale": lhs.scale, "rhs_scale": of_columns}
        if of_lhs:
            fused["lhs_zero"] = lhs.zero_point
        if of_rhs:
            fused["rhs_zero"] = rhs.zero_point
        if bias is not None:
            fused["bias"] = bias
        return multiply(a, b, output, **fused)

    return run


def _lies_plainly(q: Quantizer, usages: tuple[str, ...]) -> bool:
    """Whether a factor's buffers are what the GPU kernels read."""
    is_plain = isinstance(q.format, Integer | Float) and q.per_byte() == 1 and q.layout is None and not q.flat
    own_zero = isinstance(q.format, Integer) and q.format.zero != 0 and not q.scale.has_zero_point()
    is_step = type(q.scale) in (*_SIMPLE, CurrentScaling, BlockScaling)
    return is_plain and not own_zero and is_step and usages == (copies.ROWWISE,) and q.hadamard is None


# ---- linear and mm of 8-bit integers


def _three(args: tuple[Any, ...]) -> Any:
    """The factors and the bias, which may be missing."""
    return (*args, None)[:3]


_SIMPLE = (Amax, MinMax, Given, AbsMean)  # rules whose step is their scale


def _integers(op: Any, output: torch.dtype, args: tuple[Any, ...]) -> Plan | None:
    """kernels.INTEGERS for matrices of bytes, none of the general forms around it."""
    if op not in (aten.linear.default, aten.mm.default) or len(args) not in (2, 3):
        return None
    lhs, rhs, bias = _three(args)
    transposed = op is aten.linear.default
    simple = all(isinstance(x, QuantizedTensor) and _is_simple(x.quantizer, x.usages) for x in (lhs, rhs))
    if not simple or lhs.dim() != 2 or rhs.codes.dtype is not torch.int8 or not lhs.codes.is_cpu:
        return None
    if rhs.quantizer.scale.has_zero_point() or rhs.quantizer.format.zero or (bias is not None and bias.dim() != 1):
        return None
    along = TABLE[op].rhs_sums
    if any(per_dimension(x.quantizer.block, 2)[d] != -1 for x, d in ((lhs, -1), (rhs, along))):
        return None
    if not eager.int_mm_is_exact() or 1 in lhs.shape or 1 in rhs.shape or 0 in lhs.shape or 0 in rhs.shape:
        return None
    if bias is not None and not bias.is_floating_point():
        return None
    affine, zero = lhs.quantizer.scale.has_zero_point(), lhs.quantizer.format.zero
    if (zero and not affine) or (unsigned_products.active and lhs.codes.dtype is torch.uint8):
        return None
    int_mm, float32, (m, k), n = eager.int_mm, torch.float32, lhs.shape, rhs.shape[0 if transposed else 1]
    row, layout = (k, 1), (1, k) if transposed or rhs.codes.stride() == (1, k) else (n, 1)

    def run(lhs: QuantizedTensor, rhs: QuantizedTensor, bias: Tensor | None = None) -> Tensor:
        a = lhs.codes
        b = rhs.codes.t() if transposed else rhs.codes
        if not (_fits(lhs) and _fits(rhs) and _lies(bias)) or a.stride() != row or b.stride() != layout:
            return general(lhs, rhs) if bias is None else general(lhs, rhs, bias)
        if affine:
            product = int_mm(torch.cat((a, a.new_ones(row_of_ones))), b)
            zero_point: Any = lhs.zero_point
            total = product[:m].addcmul_(zero_point.to(torch.int32), product[m], value=-1)
        else:
            total = int_mm(a, b)
        scale = rhs.scale
        y = total.to(float32).mul_(lhs.scale).mul_(scale.view(-1) if transposed else scale)
        if biased:
            y.add_(bias.to(float32) if narrow_bias else bias)  # type: ignore[union-attr]
        return y if output is float32 else y.to(output)

    row_of_ones, biased, narrow_bias = (1, k), bias is not None, bias is not None and bias.dtype is not float32
    general = _general(op, output, kernels.INTEGERS)
    return run


# ---- the same in bfloat16


def _bfloat16(op: Any, output: torch.dtype, args: tuple[Any, ...]) -> Plan | None:
    """kernels.BFLOAT16 with one scale for each row and column at most, or none."""
    if op not in (aten.linear.default, aten.mm.default):
        return None
    lhs, rhs, bias = _three(args)
    (a, of_rows), (b, of_columns) = _side(lhs), _side(rhs)
    if None in (a, b):
        return None
    transposed = op is aten.linear.default
    alone, general = of_rows is None and of_columns is None and bias is None, _general(op, output, kernels.BFLOAT16)
    multiply, float32, bfloat16 = torch.nn.functional.linear if transposed else torch.mm, torch.float32, torch.bfloat16

    def run(lhs: Any, rhs: Any, bias: Tensor | None = None) -> Tensor:
        if not (_fits(lhs) and _fits(rhs) and _lies(bias)):
            return general(lhs, rhs) if bias is None else general(lhs, rhs, bias)
        y = multiply(a(lhs), b(rhs))  # type: ignore[misc]
        if alone:
            return y
        y = y.to(float32)
        if of_rows is not None:
            y.mul_(of_rows(lhs))
        if of_columns is not None:
            scale = of_columns(rhs)
            y.mul_(scale.view(-1) if transposed else scale)
        if bias is not None:
            y.add_(bias.to(float32))
        return y.to(bfloat16)

    return run


_Part = Callable[[Any], Tensor]


def _side(x: Any) -> tuple[_Part | None, _Part | None]:
    """How the numbers of a factor are found, and its scale for each row or column; None, None if by more than this."""
    if not isinstance(x, QuantizedTensor):
        return (lambda x: x), None
    q = x.quantizer
    rule, format, fast = q.scale, q.format, kernels.fast(str(q))
    if not isinstance(format, Float):
        return None, None
    block = rule.outer if isinstance(rule, TwoLevel) else q.block
    if any(b not in (-1, 1) for b in per_dimension(block, x.dim())) and not rule.rest_is_one():
        return None, None

    def rest(x: Any) -> Tensor:
        return rule.rest([getattr(x, name) for name in stored], format)  # type: ignore[return-value]

    stored = list(q.stored())
    scale = None if rule.rest_is_one() else rest
    if isinstance(q.layout, Decoded):
        return (lambda x: x.codes), scale
    if q.layout is not None:
        return None, None
    if not rule.folds() and format.bits == 8:
        return (lambda x: decode(x.codes).to(torch.bfloat16)), scale
    return (lambda x: fast.packed(x.buffers(), x.shape, Decoded())["codes"]), scale


def _is_simple(q: Quantizer, usages: tuple[str, ...]) -> bool:
    whole = all(b in (-1, 1) for b in per_dimension(q.block, 2))
    return (
        usages == (copies.ROWWISE,)
        and type(q.format) is Integer
        and q.layout is None
        and q.per_byte() == 1
        and type(q.scale) in _SIMPLE
        and whole
    )


_DIRECT = {
    kernels.NATIVE: _native,
    kernels.NATIVE_CONVOLUTION: _convolution,
    kernels.GPU: _gpu,
    kernels.INTEGERS: _integers,
    kernels.BFLOAT16: _bfloat16,
}
