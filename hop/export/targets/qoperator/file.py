"""An ONNX file of codes under construction."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.integer.model import Names

_OPSET, _IR = 21, 10
CONTRIB = "com.microsoft"  # the domain of onnxruntime's additional operators


def helper(caller: str) -> Any:
    """Import onnx.helper. Raises ImportError if onnx is not installed."""
    try:
        from onnx import helper
    except ImportError as error:
        raise ImportError(f"{caller} needs onnx: pip install 'torch-hop[onnx]'") from error
    return helper


class File:
    """Tensors and nodes, in the order in which they are added. A tensor is identified by its unique name.

    weights: the dtype of the codes of weights that are multiplied with uint8 activations.
    """

    def __init__(self, weights: torch.dtype) -> None:
        self.helper, self.weights = helper("to_qoperator"), weights
        self.names = Names()
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.units: dict[str, tuple[float, int]] = {}
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.known: dict[Any, str] = {}  # names of small constants, by value
        self.stored: set[str] = set()  # names of all constants

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int8,
        quantization: Any = None,
        data: Tensor | None = None,
    ) -> str:
        """Add a tensor and return its name. `quantization` has the scales, zero points and dimension."""
        unique = self.names.free(name)
        self.sizes[unique], self.dtypes[unique] = tuple(shape), dtype
        if quantization is not None and len(quantization[0]) == 1:
            self.units[unique] = float(quantization[0][0]), int(quantization[1][0])
        if data is not None:
            from onnx import numpy_helper

            self.stored.add(unique)
            self.constants.append(numpy_helper.from_array(data.to(dtype).contiguous().numpy(), unique))
        return unique

    def numbers(self, values: Sequence[float], dtype: torch.dtype, name: str, scalar: bool = False) -> str:
        """A constant with one dimension, or none if `scalar`."""
        key = (tuple(values), dtype, scalar)
        if key not in self.known:
            data = torch.tensor(list(values), dtype=dtype)
            data = data.reshape(()) if scalar else data
            self.known[key] = self.tensor(name, data.shape, dtype, data=data)
        return self.known[key]

    def scale(self, value: float) -> str:
        return self.numbers([value], torch.float32, "scale", True)

    def zero(self, value: int, dtype: torch.dtype) -> str:
        return self.numbers([value], dtype, "zero_point", True)

    def name(self, tensor: str) -> str:
        return tensor

    def node(self, op: str, inputs: Sequence[str], output: str, domain: str = "", **attributes: object) -> str:
        """Add a node that computes `output`; returns `output`."""
        self.nodes.append(self.helper.make_node(op, list(inputs), [output], name=output, domain=domain, **attributes))
        return output

    def transposed(self, tensor: str, by: Sequence[int], output: str) -> str:
        return self.node("Transpose", [tensor], output, perm=list(by))

    def finish(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> bytes:
        """The file's bytes, given the inputs and outputs of the graph."""
        import onnx

        taken, infos = set(inputs.values()) | self.stored, []
        for name, tensor in outputs.items():
            if tensor in taken:  # an output must be a separate tensor
                tensor = self.node("Identity", [tensor], self.tensor(name, self.sizes[tensor], self.dtypes[tensor]))
            taken.add(tensor)
            infos.append(tensor)
        shown = {*inputs.values(), *infos}
        unshown = [n for n in self.sizes if n not in shown and n not in self.stored]
        graph = self.helper.make_graph(
            self.nodes,
            "program",
            [self._info(n) for n in inputs.values()],
            [self._info(n) for n in infos],
            self.constants,
            value_info=[self._info(n) for n in unshown],
        )
        graph.quantization_annotation.extend(self._annotations())
        opsets = [self.helper.make_opsetid("", _OPSET), self.helper.make_opsetid(CONTRIB, 1)]
        model = self.helper.make_model(graph, opset_imports=opsets, ir_version=_IR, producer_name="hop")
        onnx.checker.check_model(model)
        return model.SerializeToString()

    def _info(self, name: str) -> Any:
        return self.helper.make_tensor_value_info(name, kind(self.dtypes[name]), self.sizes[name])

    def _annotations(self) -> Iterator[Any]:
        """ONNX's quantization annotations of codes, only with constants that nodes read, because onnxruntime warns of
        others.
        """
        import onnx

        for name, (scale, zero) in self.units.items():
            numbers = {"SCALE_TENSOR": (scale, torch.float32), "ZERO_POINT_TENSOR": (zero, self.dtypes[name])}
            places = {k: self.known.get(((value,), dtype, True)) for k, (value, dtype) in numbers.items()}
            if None not in places.values():
                entries = [onnx.StringStringEntryProto(key=k, value=v) for k, v in places.items()]
                yield onnx.TensorAnnotation(tensor_name=name, quant_parameter_tensor_names=entries)


def kind(dtype: torch.dtype) -> int:
    """The number of a dtype in ONNX."""
    from onnx import TensorProto

    names = {torch.float32: "FLOAT", **{d: str(d).removeprefix("torch.").upper() for d in _INTEGERS}}
    return getattr(TensorProto, names[dtype])


_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
