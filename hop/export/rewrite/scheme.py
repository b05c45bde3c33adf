"""to_scheme: convert the products of a float program to a low-precision scheme, with weights as codes."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from hop.compat.export import faked
from hop.compat.pytree import Kwargs, tree_map_only
from hop.dispatch.operators import CONVOLUTION, EMBEDDING, LHS, RHS, TABLE, aten
from hop.export.rewrite.program import check_program, constant, copy_graph, value, with_graph, without_unused
from hop.export.rewrite.report import Change, RewriteReport, Rewritten
from hop.impls.pack import pack
from hop.impls.quantize import quantize, quantize_operator
from hop.impls.scaled import scaled_operator
from hop.numerics import copies
from hop.numerics.quantizer import Quantizer
from hop.numerics.schemes import Scheme, for_convolution

OPERATORS = (
    *(aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default),
    *(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding, aten.embedding.default),
)


def to_scheme(program: ExportedProgram, scheme: Scheme) -> Rewritten:
    """Convert the linear layers, convolutions and embeddings of a float program to a scheme.

    Each weight is quantized once, and packed for the kernels of its device. Activations are quantized in each call by
    hop.quantize, and hop.scaled multiplies the codes. The result corresponds to hop.nn.convert and hop.nn.freeze of a
    module, without training.

    Args:
        program: from torch.export; it is not changed.
        scheme: with dynamic scales (static ones need calibration, see hop.nn). Its gradient settings are ignored.

    Returns:
        The program, and a report with each operator and the formats of its factors, or the reason why it was left.

    Raises:
        TypeError: program is not an ExportedProgram, or scheme not a Scheme.
        ValueError: the scheme quantizes results, uses stochastic rounding, or has a static scale.
    """
    _check(program, scheme)
    graph, weights = copy_graph(program), _Weights(program)
    rows: list[Change] = []
    for node in list(graph.nodes):
        if node.target not in OPERATORS:
            continue
        source = node.args[TABLE[node.target].roles.index(RHS)]
        weight = constant(program, source) if isinstance(source, Node) else None
        try:
            detail = _rewrite(node, weight, scheme, weights)
            rows.append(Change(node.name, str(node.target), detail, True))
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as reason:
            rows.append(Change(node.name, str(node.target), str(reason).split("\n")[0], False))
    changed = with_graph(program, graph, weights.signature, state_dict=weights.state)
    return Rewritten(without_unused(changed), RewriteReport(tuple(rows)))


def _check(program: object, scheme: object) -> None:
    check_program(program, "to_scheme")
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"to_scheme: scheme must be a hop.Scheme, got {scheme!r}; give one such as hop.schemes.INT8_DYNAMIC"
        )
    if scheme.output is not None:
        raise ValueError(f"to_scheme: the scheme quantizes results ({scheme.output}); use one with output=None")
    for name in ("lhs", "rhs"):
        q = getattr(scheme, name)
        if q is None:
            continue
        if q.is_random():
            raise ValueError(f"to_scheme: {name}={q} rounds stochastically; use one that rounds to nearest")
        if q.scale.missing() is not None:
            raise ValueError(
                f"to_scheme: {name}={q} has a static scale; use a dynamic one, or convert and "
                "calibrate the module with hop.nn"
            )


class _Weights:
    """Weights as codes, stored as buffers of the program: `state`, and the matching `signature`."""

    def __init__(self, program: ExportedProgram) -> None:
        self.signature, self.state = copy.deepcopy(program.graph_signature), dict(program.state_dict)
        self.targets = {spec.arg.name: spec.target for spec in self.signature.input_specs}
        self.nodes: dict[Any, Node] = {}

    def node(self, source: Node, weight: Tensor, q: Quantizer, *, packs: bool, like: Any) -> Node:
        """The placeholder of `weight`, the value of `source`, quantized by `q`; `like` provides the fake mode."""
        key = (source, str(q), packs)
        if key in self.nodes:
            return self.nodes[key]
        codes = quantize(q, weight.detach())
        codes = pack(codes) if packs else codes
        specs, placeholders = self.signature.input_specs, source.graph.find_nodes(op="placeholder")
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        at = next((i for i, spec in enumerate(specs) if spec.kind not in kinds), len(specs))
        name = f"{self.targets[source.name]}_codes_{len(self.nodes)}"
        first = placeholders[at] if at < len(specs) else next(n for n in source.graph.nodes if n.op != "placeholder")
        with source.graph.inserting_before(first):
            result = source.graph.placeholder(f"b_{name.replace('.', '_')}")
        result.meta["val"] = like.fake_mode.from_tensor(codes, static_shapes=True)
        specs.insert(at, InputSpec(InputKind.BUFFER, TensorArgument(result.name), name, persistent=True))
        self.state[name], self.nodes[key] = codes, result
        return result


def _rewrite(node: Node, weight: Tensor | None, scheme: Scheme, weights: _Weights) -> str:
    """Replace a node by its operator in low precision. Returns the formats of its factors."""
    op: Any = node.target
    roles, val = TABLE[op], value(node)
    if weight is None:
        raise ValueError("its weight is not a parameter, buffer or constant, or the program writes to it")
    lhs, rhs = scheme.lhs, scheme.rhs
    if roles.family is EMBEDDING:
        lhs = None
    if roles.family is CONVOLUTION:
        lhs, rhs = (None if q is None else for_convolution(q, weight.dim()) for q in (lhs, rhs))
        if lhs is not None and len(lhs.block) > value(node.args[roles.roles.index(LHS)]).dim():
            lhs = replace(lhs, block=lhs.block[1:])  # an input without a batch dimension
    if lhs is None and rhs is None:
        raise ValueError("the scheme leaves its weight in floats")
    args: list[Any] = list(node.args)
    place = roles.roles.index(RHS)
    if rhs is not None:
        packs = roles.family is not EMBEDDING  # an embedding looks up single rows
        args[place] = weights.node(args[place], weight, rhs, packs=packs, like=val)
    if lhs is not None:
        at = roles.roles.index(LHS)
        options = [None, None, None, [copies.ROWWISE], "clipped"]
        args[at] = _call(node, quantize_operator, [str(lhs), args[at], *options], {})
    called = _call(node, scaled_operator, [op, val.dtype, None, None, *args], node.kwargs)
    node.replace_all_uses_with(called)
    node.graph.erase_node(node)
    return f"{'float' if lhs is None else lhs.format.name} × {'float' if rhs is None else rhs.format.name}"


def _call(before: Node, operator: Any, args: list[Any], kwargs: Kwargs) -> Node:
    """Insert a call before a node, with the node's source metadata."""
    fake_args, fake_kwargs = tree_map_only(Node, value, (args, kwargs))
    output = faked(operator, fake_args, fake_kwargs)
    with before.graph.inserting_before(before):
        result = before.graph.call_function(operator, tuple(args), dict(kwargs))
    kept = {key: before.meta[key] for key in ("nn_module_stack", "stack_trace") if key in before.meta}
    result.meta |= kept | {"val": output}
    return result
