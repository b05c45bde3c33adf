"""Choose between uint8 and int8 weights when the model is loaded, depending on the CPU.

onnxruntime multiplies uint8 by int8 about twice as fast as uint8 by uint8, but on x86 CPUs without VNNI it saturates
sums of two products at 16 bits. Weights are therefore stored in int8, and a product of the largest codes, whose result
is known, decides between two branches: the weights unchanged, or shifted to uint8. onnxruntime folds constants when it
loads a model, including this test, and keeps one branch.
"""

from typing import Any

import numpy as np

_INNER, _COLUMNS = 256, 48
_ROWS = (1, 16)  # a vector has another kernel than a matrix
_MIDDLE = 128


def choose_signed(model: Any) -> None:
    """Let each product of uint8 codes with a constant of uint8 with zero point 128 use int8 if that is exact."""
    import onnx_ir as ir

    products = [node for node in model.graph if node.op_type == "MatMulInteger" and _is_shifted(model, node)]
    if not products:
        return
    exact = _exactness_test(ir, model.graph)
    weights: dict[str, object] = {}
    for node in products:
        b = node.inputs[1]
        if b.name not in weights:
            weights[b.name] = _int8_initializer(ir, model.graph, b)
        forms = {name: _branch(ir, node, weights[b.name], name) for name in ("then_branch", "else_branch")}
        choice = ir.node("If", [exact], {name: ir.AttrGraph(name, form) for name, form in forms.items()})
        chosen, y = choice.outputs[0], node.outputs[0]
        chosen.name, chosen.type, chosen.shape, y.name = y.name, y.type, y.shape, f"{y.name}_before"
        model.graph.insert_after(node, choice)
        y.replace_all_uses_with(chosen, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
    for name in weights:
        if not model.graph.initializers[name].uses():
            del model.graph.initializers[name]


def _is_shifted(model: Any, node: Any) -> bool:
    """Whether the right factor is a constant of uint8 with zero point 128, and the left one uint8."""
    if len(node.inputs) < 4 or node.inputs[3] is None:
        return False
    (a, b, _, zero), initializers = node.inputs, model.graph.initializers
    is_known = b.name in initializers and zero.name in initializers and initializers[zero.name].const_value is not None
    kinds = {str(b.dtype), str(initializers[b.name].const_value.dtype) if is_known else ""}
    if not is_known or kinds != {"UINT8"} or (a.dtype is not None and str(a.dtype) != "UINT8"):
        return False
    return bool((initializers[zero.name].const_value.numpy() == _MIDDLE).all())


def _initializer(ir: Any, graph: Any, name: str, data: Any) -> Any:
    tensor = ir.tensor(data, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def _int8_initializer(ir: Any, graph: Any, b: Any) -> Any:
    """The constant in int8."""
    codes = graph.initializers[b.name].const_value.numpy()
    return _initializer(ir, graph, f"{b.name}_int8", (codes ^ np.uint8(_MIDDLE)).view(np.int8))


def _exactness_test(ir: Any, graph: Any) -> Any:
    """A constant boolean: whether products of the largest codes are exact."""
    largest = np.tile(np.array([127, -128], dtype=np.int8), (_INNER, _COLUMNS // 2))
    b = _initializer(ir, graph, "hop_asked_weights", largest)
    wanted = _initializer(ir, graph, "hop_asked_sums", largest[:1].astype(np.int32) * (255 * _INNER))
    nodes, answers = [], []

    def add(op: str, inputs: list[Any], name: str, **attributes: Any) -> Any:
        node = ir.node(op, inputs, attributes or None)
        node.outputs[0].name = f"hop_asked_{name}"
        nodes.append(node)
        return node.outputs[0]

    for rows in _ROWS:
        a = _initializer(ir, graph, f"hop_asked_{rows}", np.full((rows, _INNER), 255, dtype=np.uint8))
        equal = add("Equal", [add("MatMulInteger", [a, b], f"products_{rows}"), wanted], f"equal_{rows}")
        number = add("Cast", [equal], f"number_{rows}", to=ir.DataType.INT32)
        answers.append(add("ReduceMin", [number], f"all_{rows}", keepdims=0))
    exact = add("Cast", [add("Mul", answers, "both")], "exact", to=ir.DataType.BOOL)
    graph.insert_before(graph[0], nodes)
    return exact


def _branch(ir: Any, node: Any, weight: Any, name: str) -> Any:
    """One of the two branches, which reads values of the enclosing graph."""
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
