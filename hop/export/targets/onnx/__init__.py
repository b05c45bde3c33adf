"""Programs as ONNX models whose integers are those of the program.

A program is lowered to core ATen, but for its products of integers, which become two operators of this package,

    hop_onnx::matmul(a, b, a_zero_point, b_zero_point) -> int32         ONNX MatMulInteger
    hop_onnx::convolution(x, w, x_zero_point, w_zero_point, ...) -> int32     ONNX ConvInteger

on codes of 8 bits with at most one zero point each. Such a program still runs in PyTorch; torch.onnx translates it.

operators.py  these operators
products.py   products of codes less their zero points, of 8 or 16 bits
factors.py    the same products, of 8-bit codes alone
constants.py  what a program holds, and what is added to it
others.py     what ONNX computes otherwise
model.py      the ONNX model; constant codes of 4 bits are stored as INT4
"""

from hop.export.targets.onnx.model import to_onnx as to_onnx

__all__ = ["to_onnx"]
