"""to_scheme: the products of a float program in low precision, their weights as codes."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from hop.compat.export import faked
from hop.compat.pytree import tree_map_only
from hop.dispatch.operators import CONVOLUTION, EMBEDDING, LHS, RHS, TABLE, aten
from hop.export.rewrite.program import check_program, constant, graph_of, rebuilt, value, without_unused
from hop.export.rewrite.report import Change, Report, Rewritten
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
    """Run the linear layers, convolutions and embeddings of a float program in a scheme.

    Each weight is quantized once, and packed as the kernels of its device read it fastest; activations are quantized in
    each call, by hop.quantize, and hop.scaled multiplies the codes. It is what hop.nn.convert and hop.nn.freeze make
    of a module, without training.

    Args:
        program: as torch.export gives it. It stays as it is.
        scheme: its quantizers find scales themselves (static ones need calibration, for which see hop.nn). How it
            computes gradients does not matter here.

    Returns:
        The program, and a report: each operator, and the formats of its factors or why it was left.

    Raises:
        TypeError: program is no ExportedProgram, or scheme no Scheme.
        ValueError: the scheme quantizes results, or rounds at random, or has no rule for a scale.
    """
    _check(program, scheme)
    graph, weights = graph_of(program), _Weights(program)
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
    changed = rebuilt(program, graph, weights.signature, state_dict=weights.state)
    return Rewritten(without_unused(changed), Report(tuple(rows)))


def _check(program: Any, scheme: Any) -> None:
    check_program(program, "to_scheme")
    if not isinstance(scheme, Scheme):
        raise TypeError(
            f"to_scheme: scheme must be a hop.Scheme, got {scheme!r}; give one such as hop.schemes.INT8_DYNAMIC"
        )
    if scheme.output is not None:
        raise ValueError(f"to_scheme: the scheme quantizes results ({scheme.output}); take one with output=None")
    for name in ("lhs", "rhs"):
        q = getattr(scheme, name)
        if q is None:
            continue
        if q.is_random():
            raise ValueError(f"to_scheme: {name}={q} rounds at random; take one that rounds to the nearest")
        if q.scale.missing() is not None:
            raise ValueError(
                f"to_scheme: {name}={q} takes its scale from the caller; take a rule that finds it, or convert and "
                "calibrate the module by hop.nn"
            )


class _Weights:
    """The weights as codes, which the program holds as buffers: `state`, and the `signature` that goes with it."""

    def __init__(self, program: ExportedProgram) -> None:
        self.signature, self.state = copy.deepcopy(program.graph_signature), dict(program.state_dict)
        self.targets = {spec.arg.name: spec.target for spec in self.signature.input_specs}
        self.made: dict[Any, Node] = {}

    def node(self, source: Node, weight: Tensor, q: Quantizer, *, packs: bool, like: Any) -> Node:
        """A placeholder for `weight`, which `held` stands for, in q; like a fake tensor of the program."""
        key = (source, str(q), packs)
        if key in self.made:
            return self.made[key]
        codes = quantize(q, weight.detach())
        codes = pack(codes) if packs else codes
        specs, placeholders = self.signature.input_specs, source.graph.find_nodes(op="placeholder")
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        at = next((i for i, spec in enumerate(specs) if spec.kind not in kinds), len(specs))
        name = f"{self.targets[source.name]}_codes_{len(self.made)}"
        first = placeholders[at] if at < len(specs) else next(n for n in source.graph.nodes if n.op != "placeholder")
        with source.graph.inserting_before(first):
            result = source.graph.placeholder(f"b_{name.replace('.', '_')}")
        result.meta["val"] = like.fake_mode.from_tensor(codes, static_shapes=True)
        specs.insert(at, InputSpec(InputKind.BUFFER, TensorArgument(result.name), name, persistent=True))
        self.state[name], self.made[key] = codes, result
        return result


def _rewrite(node: Node, weight: Tensor | None, scheme: Scheme, weights: _Weights) -> str:
    """Put the operator in low precision into the place of a node; says in which."""
    op: Any = node.target
    roles, val = TABLE[op], value(node)
    if weight is None:
        raise ValueError("its weight is no parameter, buffer or constant, or the program writes to it")
    lhs, rhs = scheme.lhs, scheme.rhs
    if roles.family is EMBEDDING:
        lhs = None
    if roles.family is CONVOLUTION:
        lhs, rhs = (None if q is None else for_convolution(q, weight.dim()) for q in (lhs, rhs))
        if lhs is not None and len(lhs.block) > value(node.args[roles.roles.index(LHS)]).dim():
            lhs = replace(lhs, block=lhs.block[1:])  # one example, without a dimension of examples
    if lhs is None and rhs is None:
        raise ValueError("the scheme leaves its weight in floats")
    args: list[Any] = list(node.args)
    place = roles.roles.index(RHS)
    if rhs is not None:
        packs = roles.family is not EMBEDDING  # whose rows are read by their index
        args[place] = weights.node(args[place], weight, rhs, packs=packs, like=val)
    if lhs is not None:
        at = roles.roles.index(LHS)
        options = [None, None, None, [copies.ROWWISE], "clipped"]
        args[at] = _call(node, quantize_operator, [str(lhs), args[at], *options], {})
    called = _call(node, scaled_operator, [op, val.dtype, None, None, *args], node.kwargs)
    node.replace_all_uses_with(called)
    node.graph.erase_node(node)
    return f"{'float' if lhs is None else lhs.format.name} × {'float' if rhs is None else rhs.format.name}"


def _call(before: Node, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Node:
    """A call in front of a node, which stands where that does."""
    fake_args, fake_kwargs = tree_map_only(Node, value, (args, kwargs))
    output = faked(operator, fake_args, fake_kwargs)
    with before.graph.inserting_before(before):
        result = before.graph.call_function(operator, tuple(args), dict(kwargs))
    kept = {key: before.meta[key] for key in ("nn_module_stack", "stack_trace") if key in before.meta}
    result.meta |= kept | {"val": output}
    return result
