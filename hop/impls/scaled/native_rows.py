"""scaled with native row kernels: functions, gated products, norms, softmax and Hadamard transforms.

Results are quantized in the same pass.
"""

import functools

import torch
from torch import Tensor

from hop.compat import eager, tracing
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.dispatch import plan
from hop.dispatch.kernel import Declined, Kernel, decline
from hop.dispatch.operand import Operand
from hop.dispatch.operators import FUNCTION, GATED, NORM, TRANSFORM, aten
from hop.dispatch.plan import Plan
from hop.impls.scaled.calls import Call, Result, compute_dtype, fitted, integer_function
from hop.kernels.cpu import native, rows
from hop.kernels.cpu import operators as native_operators
from hop.numerics import copies, functions, memory_format
from hop.numerics.quantizer import Quantizer
from hop.tensor import QuantizedTensor

_FUNCTIONS = {
    aten.exp.default: "exp",
    aten.exp2.default: "exp2",
    aten.log.default: "log",
    aten.tanh.default: "tanh",
    aten.erf.default: "erf",
    aten.sigmoid.default: "sigmoid",
    aten.rsqrt.default: "rsqrt",
    aten.silu.default: "silu",
    aten.hardsigmoid.default: "hardsigmoid",
    aten.hardswish.default: "hardswish",
    aten.leaky_relu.default: "leaky_relu",
    aten.sqrt.default: "sqrt",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    torch.ops.hop.silu_mul.default: "silu",
}
_Optional = Tensor | Operand | None
Both = tuple[Tensor, QuantizedTensor]
_LOG = (aten.log_softmax.int, aten._log_softmax.default)
_LONGEST = 2**22  # elements of a row that is computed as a whole


def function_of(call: Call) -> str:
    """The function of a FUNCTION or GATED call: one of hop.numerics.functions, or a piecewise one."""
    return _FUNCTIONS.get(call.op) or ("gelu_tanh" if call.kwargs.get("approximate") == "tanh" else "gelu")


def operation(call: Call) -> rows.Operation:
    """The row operation of a call. Raises Declined if native code does not support it."""
    family = call.roles.family
    if family in (FUNCTION, GATED):
        name = function_of(call)
        if name in functions.WITHOUT_KERNEL:
            raise Declined(f"no kernel computes {name}")
        slope = (*call.args, 0.01)[1] if name == "leaky_relu" else None
        return rows.Operation("gated" if family is GATED else "function", name, None if slope is None else float(slope))
    ndim = call.args[0].dim()
    if family is TRANSFORM:
        width = tracing.hints(call.args[0].shape[-1:])
        if width is None or width[0] > _LONGEST:
            raise Declined(f"for rows of at most {_LONGEST} elements")
        return rows.Operation("hadamard", number=float(call.args[1]), sums=1)
    if family is NORM:
        if call.op is aten.batch_norm.default:
            raise Declined("batch_norm does not reduce rows")
        is_rms = call.op is aten.rms_norm.default
        eps = (*call.args, None, None, None)[3 if is_rms else 4]
        default = torch.finfo(torch.float32).eps if is_rms else 1e-5
        name = "rms_norm" if is_rms else "layer_norm"
        return rows.Operation(name, number=default if eps is None else float(eps), sums=len(call.args[1]))
    if ndim == 0 or call.args[1] % ndim != ndim - 1:
        raise Declined("for softmax of the last dimension")
    return rows.Operation("log_softmax" if call.op in _LOG else "softmax", sums=1)


def others(call: Call) -> tuple[_Optional, _Optional, _Optional]:
    """The other factor, the weight and the bias."""
    if call.roles.family is GATED:
        return call.args[1], None, None
    if call.roles.family is not NORM:
        return None, None, None
    weight = (*call.args, None)[2]
    return None, weight, None if call.op is aten.rms_norm.default else (*call.args, None, None)[3]


def _described(call: Call) -> rows.Operation:
    """The row operation of a call, after checking its operands. Raises Declined if native code does not support it."""
    decline(native.declines_here(call.device))
    if compute_dtype(call) != torch.float32:
        raise Declined("computes in float32, but an operand is float64")
    described = operation(call)
    x, (other, weight, bias) = call.args[0], others(call)
    if integer_function(call.output) is not None:
        raise Declined("the output is computed from integers")
    shape = tracing.hints(x.shape)
    if shape is None or 0 in shape:
        raise Declined(f"for non-empty rows of known sizes, not {tuple(x.shape)}")
    if other is not None and tracing.hints(other.shape) != shape:
        raise Declined(f"for two factors of one shape, not {tuple(x.shape)} and {tuple(other.shape)}")
    plain = [t for t in (x, other, weight, bias) if isinstance(t, Tensor)]
    for t in plain:
        if t.dtype not in rows.FLOATS:
            raise Declined(f"for float32, bfloat16 and float16, not {t.dtype}")
        decline(native.declines_tensor("an operand", t))
    if any(memory_format.is_channels_last(t) for t in plain):
        raise Declined("an operand has channels_last memory format")
    rows.check_output(described, call.output, shape, call.output_scale is not None)
    return described


def _floats(x: _Optional) -> Tensor | None:
    return x.values() if isinstance(x, Operand) else x


def _prepare(call: Call) -> Plan:
    words, operands = rows.description(_described(call), call.output), (call.args[0], *others(call))
    codes = isinstance(call.output, Quantizer)
    if call.output_scale is not None or any(isinstance(t, Operand) for t in operands):
        return call.plan(functools.partial(_computed, words))
    places = [None if t is None else i for i, t in enumerate(operands)]
    compute, below = torch.ops.hop_native.rows.default, eager.below_autograd

    def run(*given: object) -> Result:
        """Compute with plain operands, and scales from the rule."""
        rest = [None if i is None else given[i] for i in places]
        with below():
            result = compute(*rest, None, None, words)
        return result if codes else result[0]

    return run


def _computed(words: str, call: Call) -> Result:
    x, *rest = (_floats(t) for t in (call.args[0], *others(call)))
    codes = isinstance(call.output, Quantizer)
    scale, zero_point = fitted(call, call.args[0].shape) if codes else (None, None)
    if zero_point is not None:
        format = call.quantizer.format
        whole = zero_point.round() if zero_point.is_floating_point() else zero_point
        zero_point = whole.clamp(format.min, format.max).to(format.dtype)
    result = native_operators.rows(x, *rest, scale, zero_point, words)
    return result if codes else result[0]


def rounded_and_quantized(op: OpOverload, q: Quantizer, args: Args, kwargs: Kwargs) -> Both | None:
    """scaled(op, x.dtype, ...) of plain operands, x the first, and hop.quantize(q, y) of its result, in one pass.

    PyTorch counts in-place changes of the result even in inference mode. Returns None if native code does not support
    the call, or a mode, hook or transform observes it.
    """
    named = plan.named(kwargs)
    known = None if named is None else plan.key((rounded_and_quantized, op, q, *named), args)
    if known is None:
        return None
    compute = plan.find(known) or plan.remember(known, _both(op, q, args, kwargs))
    return compute(*args)


def _both(op: OpOverload, q: Quantizer, args: Args, kwargs: Kwargs) -> Plan:
    call = Call(op, q, None, None, args, kwargs)
    try:
        described = _described(call)
    except Declined:
        return lambda *args: None
    operands = (args[0], *others(call))
    places = [None if t is None else i for i, t in enumerate(operands)]
    words, compute, below = (
        rows.description(described, q, args[0].dtype),
        torch.ops.hop_native.rows.default,
        eager.below_autograd,
    )
    kept = copies.names(q, (copies.ROWWISE,))

    def run(*given: object) -> Both:
        rest = [None if i is None else given[i] for i in places]
        with torch.inference_mode(False), torch.no_grad(), below():
            y, *buffers = compute(*rest, None, None, words)
        return y, QuantizedTensor.fitting(dict(zip(kept, buffers, strict=True)), q, y.shape, y.dtype)

    return run


ROWS = Kernel("native rows", _prepare, native=True)
