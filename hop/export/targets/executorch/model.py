# pyright: reportMissingTypeStubs=false
"""to_executorch: convert programs to files for ExecuTorch's runtime."""

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
from hop.export.rewrite.folding import fold_constants
from hop.export.rewrite.numbers import float64_numbers_as_constants
from hop.export.rewrite.program import check_program, copy_graph, emit, origin_of, value, with_graph
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
"""The dtypes that ExecuTorch's portable kernels support."""

GROUPED = frozenset({"torchao.dequantize_affine.default", "quantized_decomposed.dequantize_per_channel_group.default"})
"""Operators that dequantize a weight with a scale per group along its last dimension."""

PRODUCTS = within(MATRIX) - {aten.matmul.default, aten.baddbmm.default}
"""The products that XNNPACK accepts."""


def to_executorch(
    program: ExportedProgram,
    *,
    partitioners: Sequence[Any] = (),
    exact: bool = False,
    compile_config: "EdgeCompileConfig | None" = None,
    backend_config: "ExecutorchBackendConfig | None" = None,
) -> "ExecutorchProgramManager":
    """Convert a program for ExecuTorch's runtime.

    Our operators become core ATen, for which the portable kernels return the same integers as eager mode, bit for bit.

    Args:
        program: a program from torch.export, with or without our operators.
        partitioners: ExecuTorch partitioners, tried in order, that choose what backends take over. They see linear
            layers and other composite operators whole. For XnnpackPartitioner, `hop.export.to_qdq(program,
            target="xnnpack")` converts our operators to the form that it recognizes; XNNPACK requantizes integers by
            its own rules, those of hop.requantization.FloatMultiplier.
        exact: whether to use our implementations of float functions, norms and softmax: correctly rounded and summed in
            fixed point, with the bits of eager mode, in some dozens of operators each. By default the runtime's
            operators compute them; their last bits differ, and so does an occasional code quantized from them.
            Functions of 8-bit codes with one scale are tables of 256 codes, equal in either case.
        compile_config, backend_config: ExecuTorch's own.

    Returns:
        ExecuTorch's program manager: `.buffer` is the file, `.save(path)` writes it.

    Raises:
        ImportError: ExecuTorch is not installed.
        TypeError: `program` is not an ExportedProgram, or a value has a dtype without ExecuTorch kernels, such as 8-bit
            floats.
        NotImplementedError: an operator, or a three-dimensional convolution of floats, has no portable kernel; XNNPACK
            would accept a layer with only its weight quantized, in groups, which it computes without the scales; or a
            backend accepted something that it cannot run, which is checked by loading the file if this runtime has the
            backend.
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
    with torch.no_grad():  # its passes rerun buffer updates, including those of weights that require gradients
        result = edge.to_executorch(backend_config or ExecutorchBackendConfig())
    runtime = Runtime.get()
    _check_kernels(result, runtime.operator_registry.operator_names)
    if partitioners:
        _check_delegates(result, runtime)
    return result


def _for_partitioners(program: ExportedProgram, partitioners: Sequence[object], exact: bool) -> ExportedProgram:
    to_xnnpack = any(type(p).__module__.startswith("executorch.backends.xnnpack") for p in partitioners)
    program = to_qdq(program, target="xnnpack").program if to_xnnpack else program
    with contextlib.nullcontext() if exact else functions.of_runtime():
        low = program.run_decompositions({k: v for k, v in decompositions().items() if isinstance(k, Hop)})
    _check_dtypes(low)
    if to_xnnpack:
        _check_convolutions(low, "XNNPACK does not support; leave its partitioner out")
        _check_xnnpack(low)
    return low


def _for_portable_kernels(program: ExportedProgram, exact: bool) -> ExportedProgram:
    with contextlib.nullcontext() if exact else functions.of_runtime():
        low = program.run_decompositions(decompositions(products="float"))  # which they compute in float32
    _check_dtypes(low)
    _check_convolutions(low, "ExecuTorch's portable kernels do not support in floats; quantize it")
    return fold_constants(_with_sums(float64_numbers_as_constants(low)))


def _with_sums(program: ExportedProgram) -> ExportedProgram:
    """Replace int64 sums by the last element of cumulative sums, because the portable kernel sums in float32."""
    graph = copy_graph(program)
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    for node in [n for n in sums if value(n.args[0]).dtype == torch.int64]:
        total = emit(node, _last_of_cumulative, *node.args)
        node.replace_all_uses_with(total)
        graph.erase_node(node)
    return with_graph(program, graph) if sums else program


def _last_of_cumulative(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    for dim in dims:
        x = x.cumsum(dim).narrow(dim, x.shape[dim] - 1, 1)
    return x if keepdim else x.squeeze(list(dims))


def _check_dtypes(program: ExportedProgram) -> None:
    """Raise for dtypes that ExecuTorch's file format has but none of its kernels supports."""
    for node in program.graph.nodes:
        for x in tree_leaves(node.meta.get("val")):
            if isinstance(x, Tensor) and x.dtype not in DTYPES:
                raise TypeError(
                    f"to_executorch: {_node_name(program, node)} is of {x.dtype}, for which ExecuTorch has no kernels; "
                    "supported are integers, and floats of at least 16 bits: quantize to int8, int4 or MXFP4, or "
                    "dequantize before exporting"
                )


def _check_convolutions(program: ExportedProgram, reason: str) -> None:
    for node in program.graph.nodes:
        if of(node.target).family is CONVOLUTION and value(node.args[1]).dim() > 4:
            raise NotImplementedError(
                f"to_executorch: {_node_name(program, node)} is a three-dimensional convolution, which {reason}"
            )


def _node_name(program: ExportedProgram, node: Node) -> str:
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    if node.name in names:
        return f"node {node.name!r} ({names[node.name]})"
    return f"node {node.name!r} ({node.target})" if node.op == "call_function" else f"node {node.name!r}"


def _check_xnnpack(program: ExportedProgram) -> None:
    """Raise for products of a float and a grouped weight: ExecuTorch 1.5's XNNPACK accepts them and ignores the scales.

    tests/export/test_executorch.py demonstrates it.
    """
    for node in program.graph.nodes:
        if node.target not in PRODUCTS:
            continue
        operands = [origin_of(x) for x in node.args[:3] if isinstance(x, Node)]
        grouped = [x for x in operands if _is_grouped(x)]
        if grouped and not any(_is_activation(x) for x in operands):
            raise NotImplementedError(
                f"to_executorch: XNNPACK would take over {_node_name(program, node)}, with only its weight quantized, "
                f"in groups ({grouped[0].name!r}), and would multiply its codes without their scales; quantize its "
                "input to int8 too (8da4w), give the weight one scale per output channel, or "
                "leave XnnpackPartitioner out"
            )


def _is_grouped(node: Node) -> bool:
    """Whether a node dequantizes a constant with more than one scale per output channel."""
    if str(node.target) not in GROUPED:
        return False
    codes, scales = (value(x) for x in (node.args[0], node.args[2 if "affine" in str(node.target) else 1]))
    return scales.numel() > codes.shape[0] and not _is_activation(node)


def _is_activation(node: Node) -> bool:
    """Whether a node dequantizes a value that is quantized at run time."""
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
    """Raise if delegates of the file cannot be loaded, provided that this runtime has them.

    XNNPACK, for instance, accepts three-dimensional convolutions during export and rejects them when the file is
    loaded.
    """
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
                "(see stderr for its message); leave its partitioner out"
            ) from error
