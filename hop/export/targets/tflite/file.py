# pyright: reportMissingImports=false
"""A .tflite file under construction, built from the classes that its public schema was compiled to."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hop.export.targets.integer.model import Names

_IDENTIFIER = b"TFL3"
_DTYPES = {
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float32: "FLOAT32",
}
_LAST_OLD_CODE = 127  # larger operator codes are only in a 32-bit field
_VERSIONS = {  # the first version that supports int8, where it is not 2
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 3,
    "FULLY_CONNECTED": 4,
    "QUANTIZE": 2,
    "TRANSPOSE_CONV": 3,
    "GELU": 2,
    "RESHAPE": 1,
    "SQUEEZE": 1,
    "EXPAND_DIMS": 1,
    "HARD_SWISH": 1,
    "PRELU": 1,
}


class File:
    """Tensors and operators, in the order in which they are added."""

    def __init__(self) -> None:
        try:
            import flatbuffers
            from ai_edge_litert import schema_py_generated as schema
        except ImportError as error:
            raise ImportError("to_tflite needs LiteRT: pip install 'torch-hop[litert]'") from error
        self.flatbuffers: Any = flatbuffers
        self.schema: Any = schema
        self.model: Any = schema.ModelT()
        self.model.version, self.model.description = 3, "hop"
        self.graph: Any = schema.SubGraphT()
        self.graph.tensors, self.graph.operators = [], []
        self.model.subgraphs, self.model.operatorCodes = [self.graph], []
        self.model.buffers = [schema.BufferT()]  # the first buffer is empty, for all computed tensors
        self.codes: dict[str, int] = {}
        self.names = Names()

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.int8,
        quantization: tuple[Sequence[float], Sequence[int], int] | None = None,
        data: Tensor | None = None,
    ) -> int:
        """Add a tensor and return its index. `quantization` has the scales, zero points and their dimension."""
        entry: Any = self.schema.TensorT()
        entry.name, entry.shape = self.names.free(name), list(shape)
        entry.type, entry.buffer = getattr(self.schema.TensorType, _DTYPES[dtype]), 0
        if quantization is not None:
            its = self.schema.QuantizationParametersT()
            its.scale, its.zeroPoint, its.quantizedDimension = (*map(list, quantization[:2]), quantization[2])
            entry.quantization = its
        if data is not None:
            buffer = self.schema.BufferT()
            buffer.data = data.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
            self.model.buffers.append(buffer)
            entry.buffer = len(self.model.buffers) - 1
        self.graph.tensors.append(entry)
        return len(self.graph.tensors) - 1

    def integers(self, name: str, values: Sequence[int]) -> int:
        """A constant int32 tensor: axes, shapes, paddings."""
        data = torch.tensor(list(values), dtype=torch.int32)
        return self.tensor(name, data.shape, torch.int32, data=data)

    def name(self, tensor: int) -> str:
        return self.graph.tensors[tensor].name

    def operator(
        self, name: str, inputs: Sequence[int], output: int, kind: str = "", options: Mapping[str, object] = {}
    ) -> int:
        """Add an operator by its name in the schema, with `options` of its options table `kind`; returns `output`."""
        if name not in self.codes:
            code: Any = self.schema.OperatorCodeT()
            code.builtinCode = getattr(self.schema.BuiltinOperator, name)
            code.deprecatedBuiltinCode = min(code.builtinCode, _LAST_OLD_CODE)
            code.version = _VERSIONS.get(name, 2)
            self.model.operatorCodes.append(code)
            self.codes[name] = len(self.codes)
        entry: Any = self.schema.OperatorT()
        entry.opcodeIndex, entry.inputs, entry.outputs = self.codes[name], list(inputs), [output]
        if kind:
            entry.builtinOptionsType = getattr(self.schema.BuiltinOptions, kind)
            entry.builtinOptions = getattr(self.schema, f"{kind}T")()
            for field, value in options.items():
                if not hasattr(entry.builtinOptions, field):
                    raise AttributeError(f"{kind} has no {field}")
                setattr(entry.builtinOptions, field, value)
        self.graph.operators.append(entry)
        return output

    def transposed(self, tensor: int, by: Sequence[int], output: int) -> int:
        order = self.integers(f"{self.name(output)}_order", by)
        return self.operator("TRANSPOSE", [tensor, order], output, "TransposeOptions")

    def activation(self, name: str) -> int:
        return getattr(self.schema.ActivationFunctionType, name)

    def padding(self, name: str) -> int:
        return getattr(self.schema.Padding, name)

    def finish(self, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> bytes:
        """The file's bytes, with the signature serving_default of named inputs and outputs."""
        self.graph.inputs, self.graph.outputs = list(inputs.values()), list(outputs.values())
        signature: Any = self.schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = "serving_default", 0
        signature.inputs, signature.outputs = ([self._mapped(*x) for x in m.items()] for m in (inputs, outputs))
        self.model.signatureDefs = [signature]
        builder = self.flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), _IDENTIFIER)
        return bytes(builder.Output())

    def _mapped(self, name: str, tensor: int) -> Any:
        entry: Any = self.schema.TensorMapT()
        entry.name, entry.tensorIndex = name, tensor
        return entry
