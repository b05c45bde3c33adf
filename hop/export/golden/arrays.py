"""The inputs, exact sums and outputs of a program's call, as numpy arrays by name and JSON values."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hop.compat.eager import OpOverload
from hop.dispatch import compiled
from hop.dispatch.operand import Operand, decode
from hop.dispatch.operators import BIAS, CONVOLUTION, LHS, MATRIX, RHS
from hop.export.analysis.metrics import operator_name
from hop.impls.scaled import meaning
from hop.impls.scaled.calls import Call, by_sum, integer_function, is_integer
from hop.impls.scaled.operands import spread
from hop.impls.scaled.outputs import given_buffers
from hop.impls.scaled.products import Sum, aligned, bias_steps, sums
from hop.numerics import blocks, copies
from hop.numerics.formats import Integer
from hop.numerics.quantizer import Quantizer
from hop.numerics.requantization import FixedPoint, fixed_point
from hop.numerics.spelling import JsonObject

_EXACTLY = (torch.float16, torch.bfloat16)  # stored exactly in float32
_BITS = {1: torch.uint8, 2: torch.uint16}  # dtypes for the bits of formats that numpy lacks, by bytes


class Arrays:
    """The arrays of one call, with their description.

    Attributes:
        arrays: numpy arrays by name.
        described: the dtype in the program, the stored dtype and the shape of each array.
        about: the operator, the arguments and the convention.
    """

    def __init__(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, object], output: Any) -> None:
        self.arrays: dict[str, Any] = {}
        self.described: dict[str, JsonObject] = {}
        self.arguments: JsonObject = {}
        self.about: JsonObject = {"operator": operator_name(node), "arguments": self.arguments}
        if node.target is compiled.operators["hop_scaled_buffers"]:
            self._scaled(node, args, kwargs, output)
        elif node.target is compiled.operators["hop_quantize_buffers"]:
            self._argument("input", node.args[1], args[1])
            self.about["quantizer"] = args[0]
            self._buffers("output", Quantizer.parse(args[0]), args[5], output)
        elif node.target is compiled.operators["hop_dequantize_buffers"]:
            given: Any = node.args
            self._argument("input", *(Operand(Quantizer.parse(x[0]), *x[1:4]) for x in (given, args)))
            self.add("output", output)
        else:
            self._plain(node, args, kwargs, output)

    def add(self, name: str, x: Tensor) -> None:
        """Add an array. Dtypes that numpy lacks are stored as float32 if that is exact, or as bits."""
        stored = x.detach().cpu()
        if x.dtype in _EXACTLY:
            stored = stored.to(torch.float32)
        elif str(x.dtype).startswith(("torch.float8", "torch.float4")):
            stored = stored.view(_BITS[x.dtype.itemsize])
        self.arrays[name] = array = stored.contiguous().numpy()
        dtype = str(x.dtype).removeprefix("torch.")
        self.described[name] = {"dtype": dtype, "stored": array.dtype.name, "shape": list(array.shape)}

    # ---- arguments

    def _argument(self, name: str, node: Any, x: object) -> None:
        if isinstance(x, Operand):
            self._buffers(name, x.quantizer, x.usages, x.tensors)
            self.arguments[name] = {"from": _source(node.tensors[0]), "quantizer": str(x.quantizer)}
            self.arguments[name]["shape"] = list(x.shape)
        elif isinstance(x, Tensor):
            self.add(name, x)
            self.arguments[name] = {"from": _source(node)}
        elif isinstance(x, list | tuple) and any(isinstance(v, Tensor | Operand) for v in x):
            for i, pair in enumerate(zip(node, x, strict=True)):
                self._argument(f"{name}.{i}", *pair)
        else:
            self.arguments[name] = _as_json(x)
            values = x if isinstance(x, list | tuple) else [x]
            if values and all(isinstance(n, bool | int | float) for n in values):
                whole = all(isinstance(n, int) for n in values)
                self.add(name, torch.tensor(x, dtype=torch.int64 if whole else torch.float64))

    def _buffers(self, name: str, quantizer: Quantizer, usages: Sequence[str], tensors: Sequence[Tensor]) -> None:
        """Add the buffers of a quantized tensor, with an explicit zero point for integer formats."""
        named = dict(zip(copies.names(quantizer, usages), tensors, strict=True))
        for buffer, x in named.items():
            self.add(name if buffer == "codes" else f"{name}.{buffer}", x)
        if quantizer.format.is_integer and "codes" in named and "zero_point" not in named:
            self.add(f"{name}.zero_point", torch.tensor(quantizer.format.zero, dtype=torch.int32))

    # ---- calls

    def _plain(self, node: Node, args: Sequence[object], kwargs: Mapping[str, object], output: object) -> None:
        """Add a call of PyTorch's operators, or of our operators on plain tensors, whose first argument is the inner
        operator.
        """
        first = next((i for i, x in enumerate(args) if isinstance(x, OpOverload)), -1)
        op = node.target if first < 0 else args[first]
        names = [a.name for a in op._schema.arguments] if isinstance(op, OpOverload) else []
        for i, (given, x) in enumerate(zip(node.args[first + 1 :], args[first + 1 :], strict=True)):
            self._argument(names[i] if i < len(names) and first < 0 else f"argument{i}", given, x)
        for name, x in kwargs.items():
            self._argument(name, node.kwargs[name], x)
        results = list(output) if isinstance(output, list | tuple) else [output]
        for i, x in enumerate(results):
            if isinstance(x, Tensor):
                self.add("output" if len(results) == 1 else f"output.{i}", x)

    def _scaled(self, node: Node, args: Sequence[Any], kwargs: Mapping[str, object], result: Any) -> None:
        op, spelled, scale, zero, *flat = args
        output = Quantizer.parse(spelled) if isinstance(spelled, str) else spelled
        nodes, values = decode(op, node.args[4:]), decode(op, flat)
        call = Call(op, output, scale, zero, values, dict(kwargs))
        arguments = op._schema.arguments
        for argument, given, x in zip(arguments, nodes, values, strict=False):
            self._argument(argument.name, given, x)
        for name, x in kwargs.items():
            self._argument(name, node.kwargs[name], x)
        for argument in arguments[len(values) :]:
            if argument.name not in kwargs and argument.has_default_value():
                self._argument(argument.name, None, argument.default_value)
        self._sums(call)
        if not isinstance(output, Quantizer):
            self.add("output", result)
            return
        self._buffers("output", output, (copies.ROWWISE,), result)
        convention = output.scale.requantization
        self.about |= {"quantizer": str(output), "convention": None if convention is None else str(convention)}
        self._range(call, result)

    def _sums(self, call: Call) -> None:
        """Add the exact sums of a product and, for fixed-point requantization, the multipliers and shifts."""
        terms, exact = _sums_of(call), by_sum(call.output)
        if not terms:
            return
        for i, one in enumerate(terms):
            self.add("sums" if len(terms) == 1 else f"sums.{i}", one.total)
        bias = call.find(BIAS) if call.kwargs.get("beta", 1) else None
        self.about["sums"] = {"count": len(terms), "has_bias": exact and bias is not None}
        if exact and isinstance(bias, Tensor) and bias.is_floating_point():
            most = 2.0**46 if terms[0].total.dtype == torch.int64 else 2.0**32
            steps = bias_steps(terms[0], aligned(call, bias), most)
            self.add("bias.steps", steps.to(torch.int32) if bool((steps.to(torch.int32) == steps).all()) else steps)
        convention = call.output.scale.requantization if isinstance(call.output, Quantizer) else None
        if isinstance(convention, FixedPoint):
            assert isinstance(call.output, Quantizer)
            shape = list(terms[0].total.shape)
            scale = spread(given_buffers(call, shape)[0], blocks.per_dimension(call.output.block, len(shape)), shape)
            pair = fixed_point(convention.quotient(terms[0].lhs, terms[0].rhs, scale))
            for name, x in zip(("multiplier", "shift"), pair, strict=True):
                self.add(name, x.to(torch.int32))

    def _range(self, call: Call, buffers: Sequence[Tensor]) -> None:
        """Add the smallest and the largest output code, if codes are clamped rather than floats."""
        q = call.output
        assert isinstance(q, Quantizer)
        format, convention = q.format, q.scale.requantization
        if not isinstance(format, Integer) or buffers[1].numel() != 1:
            return
        limits = torch.tensor([format.low, format.high], dtype=torch.int32)
        if convention is not None and (convention.low, convention.high) != (None, None):
            if not by_sum(call.output) and integer_function(call.output) is None:
                return
            zero = buffers[2].reshape(()).to(torch.int32) if len(buffers) > 2 else format.zero
            limits = convention.clamp(limits, buffers[1].reshape(()), zero, format)
        self.add("output.range", limits.to(torch.int32))


def _sums_of(call: Call) -> list[Sum]:
    """The exact sums of an integer call, including the bias if the output's codes are computed from them.

    Several sums if scales change along the summed dimension; none for calls other than products.
    """
    if call.roles.family in (MATRIX, CONVOLUTION) and not by_sum(call.output):
        return sums(call) if all(is_integer(call.find(role)) for role in (LHS, RHS)) else []
    sum_of = meaning.of(call).sum
    return [] if sum_of is None or meaning.exact_declines(call) is not None else [sum_of(call)]


def _source(node: object) -> str | None:
    """The name of the node, input or parameter that a value comes from."""
    while isinstance(node, Node) and _passes_through(node):
        node = node.args[0]
    return node.name if isinstance(node, Node) else None


def _passes_through(node: Node) -> bool:
    return getattr(node.target, "__name__", "") in ("getitem", "detach.default", "alias.default")


def _as_json(x: object) -> object:
    if isinstance(x, list | tuple):
        return [_as_json(v) for v in x]
    return x if x is None or isinstance(x, bool | int | float | str) else str(x)
