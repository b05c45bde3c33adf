"""The constants and structures of native/hop.h that products and convolutions share."""

import ctypes
from ctypes import c_float, c_int32, c_int64

import torch

NONE, INT8, UINT8, INT4, UINT4, E2M1, E4M3, E5M2, E8M0, FLOAT32, BFLOAT16, FLOAT16, INT32 = range(13)
STRIDED, TILED = range(2)
WHOLE = 2**62

PLAIN = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.int32: INT32}
ITEMS = {FLOAT32: 4, INT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, UINT8: 1}
BYTES = {torch.int8: INT8, torch.uint8: UINT8}


class Scale(ctypes.Structure):
    """hop_scale"""

    _fields_ = [
        ("format", c_int32),
        ("factor", c_float),
        ("rows", c_int64),
        ("ks", c_int64),
        ("row_stride", c_int64),
        ("k_stride", c_int64),
    ]


class Factor(ctypes.Structure):
    """hop_operand"""

    _fields_ = [
        ("format", c_int32),
        ("layout", c_int32),
        ("row_stride", c_int64),
        ("k_stride", c_int64),
        ("zero", c_int32),
        ("zero_format", c_int32),
        ("scale", Scale),
        ("fold", Scale),
    ]


class Output(ctypes.Structure):
    """hop_output"""

    _fields_ = [
        ("format", c_int32),
        ("bias_format", c_int32),
        ("row_stride", c_int64),
        ("requantize", c_int32),
        ("low", c_int32),
        ("high", c_int32),
        ("zero", c_int32),
        ("zero_format", c_int32),
        ("bounded", c_int32),
        ("bounds", c_float * 2),
        ("scale_row_stride", c_int64),
        ("scale_column_stride", c_int64),
    ]


class Steps(ctypes.Structure):
    """hop_steps"""

    _fields_ = [
        ("codes", c_int64),
        ("scale", c_int64),
        ("zero", c_int64),
        ("fold", c_int64),
    ]


class Product(ctypes.Structure):
    """hop_product"""

    _fields_ = [
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("lhs", Factor),
        ("rhs", Factor),
        ("output", Output),
        ("batch", c_int64),
        ("lhs_step", Steps),
        ("rhs_step", Steps),
        ("output_step", c_int64),
    ]


def no_scale() -> Scale:
    return Scale(NONE, 1.0, WHOLE, WHOLE, 0, 0)
