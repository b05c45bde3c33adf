"""from_onnx: convert ONNX files to programs, with the integers that onnxruntime computes."""

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from hop.export.rewrite.conventions import Conventions
from hop.export.rewrite.integer import rewritten
from hop.export.rewrite.program import copy_graph, share_numbers, simplify, with_graph, without_unused
from hop.export.rewrite.target import Target
from hop.export.targets.integer.model import Names, argument_names
from hop.export.targets.onnx.arithmetic import ONNX_QDQ, ONNXRUNTIME
from hop.export.targets.onnx_import import nibbles
from hop.export.targets.onnx_import.calls import Call, Numbers, Shifted, Units, Value, numbers_or
from hop.export.targets.onnx_import.codes import CODES
from hop.export.targets.onnx_import.floats import FLOATS
from hop.export.targets.onnx_import.plan import Plan
from hop.export.targets.onnx_import.products import PRODUCTS
from hop.export.targets.onnx_import.reading import FileGraph, FileInput, FileNode, read_graph
from hop.export.targets.onnx_import.shapes import SIZES
from hop.export.targets.onnx_import.views import KEEP_UNITS, VIEWS
from hop.numerics.requantization import Division
from hop.numerics.spelling import shown

_CALLER = "from_onnx"
_MOST_ELEMENTS = 2**26  # of all inputs together, because example inputs are allocated for export
_REFUSALS = (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError, OverflowError)
_EXAMPLES = (2, 16, 24, 32)  # sizes of dynamic dimensions in example inputs, by position
_MOST_NUMBERS = 4096
CONVERTED = {**CODES, nibbles.OP: nibbles.product, **PRODUCTS, **FLOATS, **VIEWS}


def from_onnx(
    model: object, *, target: Target | None = None, sizes: Mapping[str, int] | None = None
) -> ExportedProgram:
    """Convert an ONNX file to a program, whose parts quantized in the formats QDQ or QOperator are exact integers.

    The codes equal those of onnxruntime's CPU operators on x86 with AVX2 and its default optimizations wherever it
    computes in integers. What it computes in floats stays in floats. A file without quantized operators gives a float
    program, for to_scheme. Inputs and outputs have the file's names, dtypes and order.

    Args:
        model: the path of an ONNX file, its bytes, a QOperatorModel, an onnx.ModelProto or a torch.onnx.ONNXProgram.
            Nothing in it is executed. Constants in other files must be inside the folder of the model's file.
        target: the target whose conventions compute the codes. Default: onnxruntime's, ONNX_INTEGER where it has the
            operator and ONNX_QDQ elsewhere, or ONNX_QDQ if activations have 16 bits. Another target converts the
            model to that runtime.
        sizes: sizes of dimensions that are dynamic in the file, by name. Others stay dynamic.

    Raises:
        ImportError: onnx is not installed.
        TypeError: an argument has the wrong type.
        OSError: a file does not exist.
        ValueError: the file is damaged or a node is invalid, the message names it; a dimension cannot stay dynamic; or
            an integer-only target lacks an operator.
        NotImplementedError: an operator, attribute or version, named in the message, is not supported.
    """
    if target is not None and not isinstance(target, Target):
        raise TypeError(
            f"{_CALLER}: target must be a hop.export.targets.Target or None, got {shown(target)}; give one such as "
            "hop.export.targets.ONNX_INTEGER"
        )
    if sizes is not None and not isinstance(sizes, Mapping):
        raise TypeError(
            f"{_CALLER}: sizes must be a dict of sizes by the names of dimensions or None, got {shown(sizes)}; give "
            "one such as {'batch': 1}"
        )
    graph, what = read_graph(_CALLER, model)
    inputs, dynamic = _examples(graph.inputs, dict(sizes or {}), what)
    module = _Module(graph, what)
    try:
        program = torch.export.export(module, inputs, dynamic_shapes=tuple(dynamic) if any(dynamic) else None)
    except Exception as error:
        if module.found.failure is not None:
            raise module.found.failure from module.found.failure.__cause__
        if any(dynamic):
            found = dict.fromkeys(n for i in graph.inputs for n in i.shape if isinstance(n, str))
            names = [n for n in found if n not in (sizes or {})]
            raise ValueError(
                f"{_CALLER}: {what}: the dimensions {', '.join(names)} cannot all stay dynamic; give sizes, such as "
                f"sizes={{{names[0]!r}: 1}}: {str(error).strip().splitlines()[0]}"
            ) from error
        raise
    if not module.found.is_quantized:
        return _normalize(program.run_decompositions({}))
    own = target or (ONNX_QDQ if module.found.is_wide else ONNXRUNTIME)
    try:
        return rewritten(program, Conventions(None, own, Division())).program
    except ValueError as error:
        raise ValueError(f"{_CALLER}: {what}: {str(error).removeprefix('to_integer: ')}") from error


def _normalize(program: ExportedProgram) -> ExportedProgram:
    """Normalize the program as to_integer does: one operator for reshapes, merged constants, nothing unused."""
    graph = copy_graph(program)
    simplify(graph)
    graph.eliminate_dead_code()
    share_numbers(graph)
    return without_unused(with_graph(program, graph))


def _examples(
    inputs: Sequence[FileInput], sizes: dict[str, int], what: str
) -> tuple[tuple[Tensor, ...], list[dict[int, Dim]]]:
    """Example inputs for export, and the dynamic dimensions of each."""
    examples: list[Tensor] = []
    dynamic: list[dict[int, Dim]] = []
    lengths: dict[str, int] = {}
    dims: dict[str, Dim] = {}
    identifiers = Names()
    unused, left = dict(sizes), _MOST_ELEMENTS
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{_CALLER}: sizes[{name!r}] must be a whole number from 1, got {shown(size)}")
    for its in inputs:
        shape: list[int] = []
        own: dict[int, Dim] = {}
        for d, n in enumerate(its.shape):
            if isinstance(n, int):
                shape.append(n)
                continue
            if n in sizes:
                unused.pop(n, None)
                shape.append(sizes[n])
                continue
            if n not in dims:
                dims[n] = Dim(identifiers.free(argument_names([n])[0]))
            lengths[n] = lengths.get(n) or _EXAMPLES[min(d, len(_EXAMPLES) - 1)] + len(lengths)
            own[d] = dims[n]
            shape.append(lengths[n])
        left -= math.prod(shape)
        if left < 0:
            raise NotImplementedError(
                f"{_CALLER}: {what}: the input {shown(its.name)} has the shape {tuple(shape)}; all inputs together "
                f"may have up to {_MOST_ELEMENTS} elements"
            )
        examples.append(torch.zeros(shape, dtype=its.dtype))
        dynamic.append(own)
    if unused:
        raise ValueError(
            f"{_CALLER}: sizes has {', '.join(map(repr, unused))}, and the dynamic dimensions of {what} are "
            f"{', '.join(map(repr, dims)) or 'none'}"
        )
    return tuple(examples), dynamic


Results = Tensor | None | tuple[Tensor | None, ...]


class _Found:
    """Results of a run of the module. They are not attributes of the module, because torch.export restores those."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.is_quantized = self.is_wide = False


class _Module(nn.Module):
    """A module that runs a file's nodes in order."""

    def __init__(self, graph: FileGraph, what: str) -> None:
        super().__init__()
        self.what, self.opset = what, graph.opset
        self.found = _Found()
        self.plan = Plan(self.fold, self.place, CONVERTED)
        self.plan.add(graph)
        self.outputs = [self.plan.names.get(name, name) for name in graph.outputs]
        self.inputs = [i.name for i in graph.inputs]
        read = {name for node in self.plan.nodes for name in node.inputs} | set(self.outputs)
        stored = [name for name in self.plan.constants if name in read]
        self.buffer_names = dict(zip(stored, argument_names(f"constant_{name}" for name in stored), strict=True))
        for name, buffer in self.buffer_names.items():
            self.register_buffer(buffer, self.plan.constants[name].data)
        names = argument_names(self.inputs)
        parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("self", *names)]

        def forward(self: _Module, *inputs: Tensor) -> Results:
            try:
                return self.run(inputs)
            except Exception as error:
                self.found.failure = error
                raise

        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward.__get__(self)

    def place(self, node: FileNode) -> str:
        return f"{_CALLER}: {self.what}: {node.shown()}"

    def run(self, inputs: Sequence[Tensor]) -> Results:
        values: dict[str, Value] = dict(zip(self.inputs, inputs, strict=True))
        units: dict[str, Units] = {}
        for node in self.plan.nodes:
            given = [self.value(name, values) for name in node.inputs]
            outputs = self.convert(node, given, units, False)
            values.update((name, v) for name, v in zip(node.outputs, outputs, strict=False) if name)
        results = [self.value(name, values) for name in self.outputs]
        results = [x.tensor() if isinstance(x, Numbers | Shifted) else x for x in results]
        return results[0] if len(results) == 1 else tuple(results)

    def value(self, name: str, values: Mapping[str, Value]) -> Value | None:
        """The value of an input: a tensor, Numbers for a short integer constant, or None for an omitted one."""
        if name in values or not name:
            return values.get(name)
        return numbers_or(self.plan.constants[name], getattr(self, self.buffer_names[name]))

    def fold(self, node: FileNode) -> tuple[Value, ...]:
        """The results of a node whose inputs are all constants."""
        known = [self.plan.constants[name] if name else None for name in node.inputs]
        given = [None if c is None else numbers_or(c, c.data) for c in known]
        with torch.no_grad():
            return self.convert(node, given, {}, True)

    def convert(
        self, node: FileNode, given: Sequence[Value | None], units: dict[str, Units], folds: bool
    ) -> tuple[Value, ...]:
        """The results of a node, whose scale and zero point are added to `units` if they are codes."""
        first = given[0] if given and node.op in KEEP_UNITS else None
        if isinstance(first, Shifted):
            given = [first.codes, *given[1:]]
        known = [self.plan.constants.get(name) for name in node.inputs]
        own = [units.get(name) for name in node.inputs]
        call = Call(node, given, known, own, self.opset, folds)
        try:
            output = _sizes(call) if node.op in SIZES and _are_sizes(given) else None
            if output is None:
                call = Call(node, given, known, own, self.opset, folds)
                output = CONVERTED[node.op](call)
                call.check_read()
        except NotImplementedError as error:
            raise NotImplementedError(f"{self.place(node)} is not supported: {error}") from error
        except _REFUSALS as error:
            raise ValueError(f"{self.place(node)} is invalid: {str(error).splitlines()[0]}") from error
        outputs = (output,) if isinstance(output, Tensor | Numbers | Shifted) else output
        if isinstance(first, Shifted):
            outputs = tuple(Shifted(x) if isinstance(x, Tensor) else x for x in outputs)
        if len([name for name in node.outputs if name]) > len(outputs):
            raise ValueError(f"{self.place(node)} has {len(node.outputs)} results, and its operator {len(outputs)}")
        self.found.is_quantized |= call.is_quantized and not folds
        self.found.is_wide |= not folds and node.op in CODES and any(_is_wide(x) for x in (*given, *outputs))
        found = call.result_units or (own[0] if node.op in KEEP_UNITS and own else None)
        units.update((name, found) for name in node.outputs if found is not None)
        return outputs


def _is_wide(x: object) -> bool:
    return isinstance(x, Shifted) or (isinstance(x, Tensor) and x.dtype in (torch.int16, torch.uint16))


def _are_sizes(given: Sequence[object]) -> bool:
    return bool(given) and all(x is None or isinstance(x, Numbers) for x in given)


def _sizes(call: Call) -> Numbers | None:
    """The result of a node on sizes; None if tensors have to be computed."""
    try:
        output = SIZES[call.node.op](call)
        call.check_read()
    except NotImplementedError:
        return None
    if len(output.values) > _MOST_NUMBERS:
        return None
    if any(isinstance(v, int) and not -(2**63) <= v < 2**63 for v in output.values):
        raise OverflowError("its result does not fit int64")
    return output._replace(stored=None)
