"""TOSA_1_0 and TOSA_1_0_INT16, each row with the source of its arithmetic."""

from hop.export.rewrite.pt2e import BILINEAR, POOLS, VIEWS
from hop.export.rewrite.target import Limits, Row, Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers

_SPECIFICATION = "TOSA specification 1.0"
_TOSA_ROWS = (
    Row(("add.Tensor", "sub.Tensor"), integers.TosaAdd(), f"{_SPECIFICATION}, RESCALE, ADD, SUB"),
    Row(("mul.Tensor",), requantization.TFLITE, f"{_SPECIFICATION}, RESCALE, MUL"),
    Row(("mean.dim",), integers.TosaMean(), f"{_SPECIFICATION}, RESCALE, REDUCE_SUM"),
    Row(POOLS, integers.TosaAveragePool(), f"{_SPECIFICATION}, AVG_POOL2D"),
    Row(("cat.default",), integers.TosaConcatenation(), f"{_SPECIFICATION}, RESCALE, CONCAT"),
    Row(BILINEAR, integers.TosaResizeBilinear(), f"{_SPECIFICATION}, RESIZE of mode BILINEAR, RESCALE"),
    Row(
        (
            "max_pool1d.default",
            "max_pool2d.default",
            "relu.default",
            "upsample_nearest2d.vec",
            "upsample_nearest2d.default",
            *VIEWS,
        ),
        requantization.TFLITE,
        f"{_SPECIFICATION}, RESCALE, where the scale changes",
    ),
)

TOSA_1_0 = Target(
    "TOSA_1_0",
    (
        Row(
            ("conv1d.default", "conv2d.default", "conv_transpose2d.input", "linear.default", "bmm.default"),
            requantization.TFLITE,
            f"{_SPECIFICATION}, CONV2D, DEPTHWISE_CONV2D, TRANSPOSE_CONV2D, MATMUL, RESCALE with SINGLE_ROUND",
        ),
        *_TOSA_ROWS,
        Row(
            ("softmax.int", "_softmax.default"),
            integers.TosaSoftmax(),
            "tensorflow/compiler/mlir/tosa/transforms/legalize_common.cc convertSoftmaxOp",
        ),
        *(
            Row(
                (f"{name}.default",),
                integers.TfliteTable(function=name),
                f"{_SPECIFICATION}, TABLE; its entries as TFLite's",
            )
            for name in ("sigmoid", "tanh", "gelu", "exp", "silu")
        ),
    ),
)
"""TOSA's integer profile with int8 codes: each RESCALE rounds once, ties up, which needs no extension."""

TOSA_1_0_INT16 = Target(
    "TOSA_1_0_INT16",
    (
        Row(
            ("conv1d.default", "conv2d.default", "conv_transpose2d.input", "linear.default", "bmm.default"),
            requantization.WideFixedPoint(),
            f"{_SPECIFICATION}, CONV2D, DEPTHWISE_CONV2D, TRANSPOSE_CONV2D, MATMUL of int16; RESCALE of int48",
            limits=Limits(multiplier=2.0**13),
        ),
        *_TOSA_ROWS,
        Row(
            ("softmax.int", "_softmax.default"),
            integers.TfliteSoftmax(),
            "tensorflow/compiler/mlir/tosa/transforms/legalize_common.cc convertSoftmaxOp, of int16",
        ),
        *(
            Row(
                (f"{name}.default",),
                integers.TfliteTable(function=name),
                f"{_SPECIFICATION}, TABLE of int16; its entries as TFLite's",
            )
            for name in ("sigmoid", "tanh", "gelu", "exp", "silu")
        ),
    ),
    dtypes=("int16",),
)
"""TOSA's extension EXT-INT16: 16-bit activations, without zero points, and 8-bit weights; 48-bit sums have 15-bit
multipliers."""
