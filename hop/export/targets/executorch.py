# pyright: reportMissingTypeStubs=false
"""To ExecuTorch: programs of our operators as files that its runtime runs."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from hop.compat.pytree import tree_leaves
from hop.dispatch.hop import Hop
from hop.dispatch.operators import CONVOLUTION, MATRIX, aten, of, within
from hop.export.rewrite.folding import folded
from hop.export.rewrite.numbers import numbers_held
from hop.export.rewrite.program import check_program, emit, graph_of, origin_of, rebuilt, value
from hop.export.rewrite.qdq import to_qdq
from hop.impls.decompositions import decompositions
from hop.numerics import functions

if TYPE_CHECKING:
    from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, ExecutorchProgramManager

DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
"""What the portable kernels of ExecuTorch compute with."""

GROUPED = frozenset({"torchao.dequantize_affine.default", "quantized_decomposed.dequantize_per_channel_group.default"})
"""What dequantizes a weight with a scale for each group along its last dimension."""

PRODUCTS = within(MATRIX) - {aten.matmul.default, aten.baddbmm.default}
"""The products that XNNPACK takes over."""


def to_executorch(
    program: ExportedProgram,
    *,
    partitioners: Sequence[Any] = (),
    exact: bool = False,
    compile_config: "EdgeCompileConfig | None" = None,
    backend_config: "ExecutorchBackendConfig | None" = None,
) -> "ExecutorchProgramManager":
    """The program for ExecuTorch's runtime. Its operators of ours become core ATen, for which the portable kernels give
    the integers of eager mode, bit for bit.

    Args:
        program: a program of torch.export, with operators of ours or without.
        partitioners: ExecuTorch's, asked in their order, for what backends take over. They see linear layers and other
            composite operators whole. For XnnpackPartitioner, `hop.export.to_qdq(program, target="xnnpack")` writes
            operators of ours in the form that it takes over; XNNPACK computes their integers by its own rules, which
            are those of hop.requantization.FloatMultiplier.
        exact: whether functions, norms and softmax of floats are ours: correctly rounded and summed in
            fixed point, with the bits of eager mode, in some dozens of operators each. By default the runtime computes
            them by operators of its own, whose last bits differ; what is quantized then differs by a code here and
            there. Functions of 8-bit codes with one scale are tables of 256 codes, equal in either case.
        compile_config, backend_config: ExecuTorch's own.

    Returns:
        ExecuTorch's program manager: `.buffer` is the file, `.save(path)` writes it.

    Raises:
        ImportError: ExecuTorch is not installed.
        TypeError: `program` is no ExportedProgram, or a value is of a dtype that ExecuTorch has no kernels for, such as
            8-bit floats.
        NotImplementedError: an operator, or a convolution of three dimensions, has no portable kernel; XNNPACK would
            take a layer whose weight alone is quantized in groups, which it computes without the scales; or a backend
            took what it cannot run, found by loading the file where this runtime has the backend.
    """
    check_program(program, "to_executorch")
    try:
        from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge, to_edge_transform_and_lower
        from executorch.runtime import Runtime
    except ImportError as error:
        raise ImportError("to_executorch needs ExecuTorch: pip install 'torch-hop[executorch]'") from error

    compile_config = compile_config or EdgeCompileConfig()
    if partitioners:
        low = _for_partitioners(program, partitioners, exact)
        edge = to_edge_transform_and_lower(low, partitioner=list(partitioners), compile_config=compile_config)
    else:
        edge = to_edge(_for_portable_kernels(program, exact), compile_config=compile_config)
    with torch.no_grad():  # its passes run buffers' updates again, also those of weights that require gradients
        result = edge.to_executorch(backend_config or ExecutorchBackendConfig())
    runtime = Runtime.get()
    _check_kernels(result, runtime.operator_registry.operator_names)
    if partitioners:
        _check_delegates(result, runtime)
    return result


def _for_partitioners(program: ExportedProgram, partitioners: Sequence[Any], exact: bool) -> ExportedProgram:
    to_xnnpack = any(type(p).__module__.startswith("executorch.backends.xnnpack") for p in partitioners)
    program = to_qdq(program, target="xnnpack").program if to_xnnpack else program
    with contextlib.nullcontext() if exact else functions.of_runtime():
        low = program.run_decompositions({k: v for k, v in decompositions().items() if isinstance(k, Hop)})
    _check_dtypes(low)
    if to_xnnpack:
        _check_convolutions(low)
        _check_xnnpack(low)
    return low


def _for_portable_kernels(program: ExportedProgram, exact: bool) -> ExportedProgram:
    with contextlib.nullcontext() if exact else functions.of_runtime():
        low = program.run_decompositions(decompositions(products="float"))  # which they compute in float32
    _check_dtypes(low)
    _check_convolutions(low)
    return folded(_with_sums(numbers_held(low)))


def _with_sums(program: ExportedProgram) -> ExportedProgram:
    """Sums of int64 as the last of cumulative ones: the portable kernel of sums adds in float32."""
    graph = graph_of(program)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in [n for n in sums if value(n.args[0]).dtype == torch.int64]:
        total = emit(node, _last_of_cumulative, *node.args)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return rebuilt(program, graph) if sums else program


def _last_of_cumulative(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    for dim in dims:
        x = x.cumsum(dim).narrow(dim, x.shape[dim] - 1, 1)
    return x if keepdim else x.squeeze(list(dims))


def _check_dtypes(program: ExportedProgram) -> None:
    """Refuse what ExecuTorch's files can name and none of its kernels computes with."""
    for node in program.graph.nodes:
        for x in tree_leaves(node.meta.get("val")):
            if isinstance(x, Tensor) and x.dtype not in DTYPES:
                raise TypeError(
                    f"to_executorch: {_described(program, node)} is of {x.dtype}, for which ExecuTorch has no kernels; "
                    "it has them for integers, and for floats of 16 bits and more: quantize to int8, int4 or MXFP4, or "
                    "dequantize before exporting"
                )


def _check_convolutions(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        if of(node.target).family is CONVOLUTION and value(node.args[1]).dim() > 4:
            raise NotImplementedError(
                f"to_executorch: {_described(program, node)} is a convolution of three dimensions, for which "
                "neither ExecuTorch's portable kernels nor XNNPACK have a form; they have it for one and two"
            )


def _described(program: ExportedProgram, node: Node) -> str:
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    if node.name in names:
        return f"node {node.name!r} ({names[node.name]})"
    return f"node {node.name!r} ({node.target})" if node.op == "call_function" else f"node {node.name!r}"


def _check_xnnpack(program: ExportedProgram) -> None:
    """Refuse products of a float and a weight in groups: ExecuTorch 1.5's XNNPACK takes them and leaves out the scales
    (tests/export/test_executorch.py shows it)."""
    for node in program.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        operands = [origin_of(x) for x in node.args[:3] if isinstance(x, Node)]
        grouped = [x for x in operands if _is_grouped(x)]
        if grouped and not any(_is_activation(x) for x in operands):
            raise NotImplementedError(
                f"to_executorch: XNNPACK would take over {_described(program, node)}, whose weight alone is quantized, "
                f"in groups ({grouped[0].name!r}), and would multiply its codes without their scales; quantize its "
                "input to int8 too (8da4w), give the weight a scale for each output channel, or "
                "leave XnnpackPartitioner out"
            )


def _is_grouped(node: Node) -> bool:
    """Whether it dequantizes, with more than one scale for each output channel, what depends on no input."""
    if str(node.target) not in GROUPED:
        return False
    codes, scales = (value(x) for x in (node.args[0], node.args[2 if "affine" in str(node.target) else 1]))
    return scales.numel() > codes.shape[0] and not _is_activation(node)


def _is_activation(node: Node) -> bool:
    """Whether it dequantizes what was quantized while running."""
    codes = node.args[0] if "dequantize" in str(node.target) else None
    return isinstance(codes, Node) and "quantize" in str(origin_of(codes).target)


def _check_kernels(manager: "ExecutorchProgramManager", known: Any) -> None:
    program = manager.exported_program()
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            continue
        name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        if name.startswith(("aten::", "dim_order_ops::", "quantized_decomposed::")) and name not in known:
            raise NotImplementedError(f"to_executorch: node {node.name!r} calls {name}, which has no portable kernel")


def _check_delegates(manager: "ExecutorchProgramManager", runtime: Any) -> None:
    """Refuse a file whose delegates do not start, where this runtime has them: XNNPACK takes convolutions of three
    dimensions, for instance, and refuses them when the file is loaded."""
    wanted = {delegate.id for plan in manager.executorch_program.execution_plan for delegate in plan.delegates}
    if not all(runtime.backend_registry.is_available(name) for name in wanted):
        return
    program = runtime.load_program(manager.buffer)
    for method in sorted(program.method_names):
        try:
            program.load_method(method)
        except RuntimeError as error:
            raise NotImplementedError(
                f"to_executorch: {', '.join(sorted(wanted))} took over parts of {method!r} that it cannot run: {error} "
                "(its own words are on stderr); leave its partitioner out"
            ) from error
