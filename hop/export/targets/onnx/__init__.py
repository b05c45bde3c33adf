"""to_onnx: convert programs to ONNX models with the same integers.

A program is lowered to core ATen, except for its integer products, which become two operators of this package,

    hop_onnx::matmul(a, b, a_zero_point, b_zero_point) -> int32         ONNX MatMulInteger
    hop_onnx::convolution(x, w, x_zero_point, w_zero_point, ...) -> int32     ONNX ConvInteger

on 8-bit codes with at most one zero point each. Such a program still runs in PyTorch, and torch.onnx translates it.

arithmetic.py  the targets ONNX_QDQ and ONNX_INTEGER
operators.py  these operators
products.py   hop.out_dtype as products of 8- or 16-bit codes minus their zero points
factors.py    these products as products of 8-bit codes
others.py     operators that torch.onnx or onnxruntime computes differently
signed.py     a choice between uint8 and int8 weights that the runtime makes
model.py      the ONNX model; constant 4-bit codes are stored as INT4
runner.py     onnxruntime
"""

from hop.export.targets.onnx.model import to_onnx as to_onnx

__all__ = ["to_onnx"]
