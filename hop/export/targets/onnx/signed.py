"""Choose between uint8 and int8 weights when the model is loaded, depending on the CPU.

onnxruntime multiplies uint8 by int8 about twice as fast as uint8 by uint8, but on x86 CPUs without VNNI it saturates
sums of two products at 16 bits. Weights are therefore stored in int8, and a product of the largest codes, whose result
is known, decides between two branches: the weights unchanged, or shifted to uint8. onnxruntime folds constants when it
loads a model, including this test, and keeps one branch.
"""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir

_INNER, _COLUMNS = 256, 48
_ROWS = (1, 16)  # a vector has another kernel than a matrix
_MIDDLE = 128


def choose_signed(model: "ir.Model") -> None:
    """Let each product of uint8 codes with a constant of uint8 with zero point 128 use int8 if that is exact."""
    import onnx_ir as ir

    products = [node for node in model.graph if node.op_type == "MatMulInteger" and _is_shifted(model, node)]
    if not products:
        return
    exact = _exactness_test(model.graph)
    weights: dict[str, ir.Value] = {}
    for node in products:
        b = _name(node.inputs[1])
        if b not in weights:
            weights[b] = _int8_initializer(model.graph, b)
        forms = {name: _branch(node, weights[b], name) for name in ("then_branch", "else_branch")}
        choice = ir.node("If", [exact], {name: ir.AttrGraph(name, form) for name, form in forms.items()})
        chosen, y = choice.outputs[0], node.outputs[0]
        chosen.name, chosen.type, chosen.shape, y.name = y.name, y.type, y.shape, f"{y.name}_before"
        model.graph.insert_after(node, choice)
        y.replace_all_uses_with(chosen, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    for name in weights:
        if not model.graph.initializers[name].uses():
            del model.graph.initializers[name]


def _is_shifted(model: "ir.Model", node: "ir.Node") -> bool:
    """Whether the right factor is a constant of uint8 with zero point 128, and the left one uint8."""
    a, b, _, zero = (*node.inputs, None, None)[:4]
    if a is None or b is None or zero is None:
        return False
    weight, middle = _constant(model.graph, b.name), _constant(model.graph, zero.name)
    if weight is None or middle is None or {str(b.dtype), str(weight.dtype)} != {"UINT8"}:
        return False
    return (a.dtype is None or str(a.dtype) == "UINT8") and bool((middle.numpy() == _MIDDLE).all())


def _constant(graph: "ir.Graph", name: str | None) -> "ir.TensorProtocol | None":
    value = graph.initializers.get(name or "")
    return None if value is None else value.const_value


def _name(value: "ir.Value | None") -> str:
    assert value is not None and value.name is not None
    return value.name


def _initializer(graph: "ir.Graph", name: str, data: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]") -> "ir.Value":
    import onnx_ir as ir

    tensor = ir.tensor(data, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(data.shape), const_value=tensor)
    graph.register_initializer(value)
    return value


def _int8_initializer(graph: "ir.Graph", name: str) -> "ir.Value":
    """The constant in int8."""
    constant = _constant(graph, name)
    assert constant is not None
    codes = constant.numpy()
    return _initializer(graph, f"{name}_int8", (codes ^ np.uint8(_MIDDLE)).view(np.int8))


def _exactness_test(graph: "ir.Graph") -> "ir.Value":
    """A constant boolean: whether products of the largest codes are exact."""
    import onnx_ir as ir

    largest = np.tile(np.array([127, -128], dtype=np.int8), (_INNER, _COLUMNS // 2))
    b = _initializer(graph, "hop_asked_weights", largest)
    wanted = _initializer(graph, "hop_asked_sums", largest[:1].astype(np.int32) * (255 * _INNER))
    nodes, answers = [], []

    def add(op: str, inputs: list[ir.Value], name: str, **attributes: int) -> ir.Value:
        node = ir.node(op, inputs, attributes or None)
        node.outputs[0].name = f"hop_asked_{name}"
        nodes.append(node)
        return node.outputs[0]

    for rows in _ROWS:
        a = _initializer(graph, f"hop_asked_{rows}", np.full((rows, _INNER), 255, dtype=np.uint8))
        equal = add("Equal", [add("MatMulInteger", [a, b], f"products_{rows}"), wanted], f"equal_{rows}")
        number = add("Cast", [equal], f"number_{rows}", to=ir.DataType.INT32)
        answers.append(add("ReduceMin", [number], f"all_{rows}", keepdims=0))
    exact = add("Cast", [add("Mul", answers, "both")], "exact", to=ir.DataType.BOOL)
    graph.insert_before(graph[0], nodes)
    return exact


def _branch(node: "ir.Node", weight: "ir.Value", name: str) -> "ir.Graph":
    """One of the two branches, which reads values of the enclosing graph."""
    import onnx_ir as ir

    a, _, zero, middle = node.inputs
    nodes = []
    if name == "then_branch":
        nodes.append(ir.node("MatMulInteger", [a, weight, zero]))
    else:
        plain = ir.node("Cast", [weight], {"to": ir.DataType.UINT8})
        moved = ir.node("BitwiseXor", [plain.outputs[0], middle])
        nodes += [plain, moved, ir.node("MatMulInteger", [a, moved.outputs[0], zero, middle])]
    y = node.outputs[0]
    for i, copied in enumerate(nodes):
        copied.outputs[0].name = f"{y.name}_{name}_{i}"
    last = nodes[-1].outputs[0]
    last.type, last.shape = y.type, y.shape
    return ir.Graph([], [last], nodes=nodes, opset_imports={"": 21}, name=f"{y.name}_{name}")
