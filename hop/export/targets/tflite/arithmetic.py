"""TFLITE and TFLITE_MICRO, of int8 and of 16-bit activations, each row with the source of its arithmetic."""

from dataclasses import replace

from hop.dispatch import operators as families
from hop.export.rewrite.pt2e import BILINEAR, POOLS, SAME, VIEWS, operators_of, with_rows, without
from hop.export.rewrite.target import Limits, Row, Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers

_INTEGER_OPS = "kernels/internal/reference/integer_ops"
_RESIZES = "kernels/internal/reference/resize_bilinear.h ResizeBilinearInteger"
_TRANSPOSED = ("conv_transpose1d.default", "conv_transpose2d.input")
_CONVOLUTIONS = ("conv1d.default", "conv2d.default", "conv1d.padding", "conv2d.padding")
_TABLES = tuple(
    n
    for n in operators_of(families.FUNCTION)
    if n
    not in (
        *("sigmoid.default", "tanh.default", "gelu.default", "exp.default"),
        *("hardswish.default", "leaky_relu.default"),
    )
)
"""Functions of int8 that LiteRT's file has as tables."""

_EXTREMES = Row(
    ("amax.default", "amin.default"),
    requantization.GEMMLOWP,
    "kernels/reduce.cc PrepareMinMax; kernels/internal/reference/requantize.h Requantize, where the scale changes",
)
_LEAKY_RELU = Row(
    ("leaky_relu.default",),
    integers.TfliteLeakyRelu(),
    "kernels/activations.cc LeakyReluPrepare; kernels/internal/reference/leaky_relu.h QuantizeLeakyRelu",
)
_LIMITS_SIGMOID = Limits(units=(1 / 256, -128))
"""TFLite's quantization specification, LOGISTIC of int8: its kernels ignore the result's scale."""

TFLITE = Target(
    "TFLITE",
    (
        Row(
            _CONVOLUTIONS,
            requantization.GEMMLOWP,
            f"{_INTEGER_OPS}/conv.h ConvPerChannel, depthwise_conv.h DepthwiseConvPerChannel; "
            "kernels/kernel_util.cc PopulateConvolutionQuantizationParams",
        ),
        Row(_TRANSPOSED, requantization.GEMMLOWP, f"{_INTEGER_OPS}/transpose_conv.h TransposeConv"),
        Row(
            ("linear.default",),
            requantization.TFLITE,
            f"{_INTEGER_OPS}/fully_connected.h FullyConnectedPerChannel, FullyConnected; kernels/kernel_util.cc "
            "GetQuantizedConvolutionMultipler",
            per_tensor=requantization.FixedPoint(rounding="tflite", multiplier="float32_product"),
        ),
        Row(
            ("bmm.default",),
            requantization.FixedPoint(rounding="gemmlowp", multiplier="float32_product"),
            "kernels/batch_matmul.cc Prepare; kernels/internal/reference/batch_matmul.h BatchMatMul",
        ),
        Row(
            ("mul.Tensor",),
            requantization.FixedPoint(rounding="gemmlowp", multiplier="float32"),
            f"kernels/mul.cc Prepare; {_INTEGER_OPS}/mul.h MulElementwise",
        ),
        Row(
            ("add.Tensor", "sub.Tensor"),
            integers.TfliteAdd(),
            f"kernels/add.cc Prepare; {_INTEGER_OPS}/add.h AddElementwise",
        ),
        Row(("mean.dim",), integers.TfliteMean(), "kernels/internal/reference/reduce.h QuantizedMeanOrSum"),
        Row(
            POOLS,
            integers.TfliteAveragePool(),
            f"{_INTEGER_OPS}/pooling.h AveragePool",
        ),
        Row(("cat.default",), integers.TfliteConcatenation(), "kernels/internal/reference/requantize.h Requantize"),
        Row(BILINEAR, integers.TfliteResizeBilinear(), _RESIZES),
        Row(
            (*SAME, *VIEWS),
            requantization.GEMMLOWP,
            "kernels/internal/reference/requantize.h Requantize, where the scale changes",
        ),
        Row(
            ("softmax.int", "_softmax.default"),
            integers.TfliteSoftmax(),
            "kernels/internal/reference/softmax.h Softmax",
        ),
        Row(
            ("log_softmax.int", "_log_softmax.default"),
            integers.TfliteLogSoftmax(),
            f"{_INTEGER_OPS}/log_softmax.h LogSoftmax",
        ),
        _EXTREMES,
        _LEAKY_RELU,
        Row(
            ("prelu.default",),
            integers.TflitePrelu(),
            "kernels/activations.cc PreluPrepare; kernels/internal/reference/prelu.h BroadcastPrelu4DSlow",
        ),
        Row(
            ("hardswish.default",),
            integers.TfliteHardSwish(),
            "kernels/activations.cc HardSwishPrepare; kernels/internal/reference/hard_swish.h HardSwish",
        ),
        *(
            Row(
                (name,),
                integers.TfliteTable(function=name.partition(".")[0]),
                f"kernels/{file}; common.h LUTPopulate",
                limits=_LIMITS_SIGMOID if name == "sigmoid.default" else Limits(),
            )
            for name, file in (
                ("sigmoid.default", "activations.cc SigmoidPrepare"),
                ("tanh.default", "activations.cc TanhPrepare"),
                ("gelu.default", "activations.cc GeluPrepare"),
                ("exp.default", "elementwise.cc"),
            )
        ),
        Row(_TABLES, requantization.Division(), "kernels/gather.cc, of a table of all codes"),
    ),
)
"""LiteRT's int8 reference kernels, as in wheel 2.3.0: fully connected layers round once, all other operators twice."""


_LIMITS_15_BITS = Limits(multiplier=2.0**7)
"""For 64-bit sums: kernels/internal/common.cc, MultiplyByQuantizedMultiplier, whose shift is below 8."""

TFLITE_16X8 = Target(
    "TFLITE_16X8",
    (
        Row(
            _CONVOLUTIONS,
            requantization.WideFixedPoint(),
            f"{_INTEGER_OPS}/conv.h ConvPerChannel, depthwise_conv.h DepthwiseConvPerChannel, of int16",
            limits=_LIMITS_15_BITS,
        ),
        Row(
            _TRANSPOSED,
            requantization.WideFixedPoint(),
            f"{_INTEGER_OPS}/transpose_conv.h TransposeConv, of int16",
            limits=_LIMITS_15_BITS,
        ),
        Row(
            ("linear.default",),
            requantization.DoubleMultiplier(),
            f"{_INTEGER_OPS}/fully_connected.h FullyConnectedPerChannel, FullyConnected, of int16",
        ),
        Row(
            ("mul.Tensor",),
            requantization.FixedPoint(rounding="gemmlowp", multiplier="float32"),
            f"kernels/mul.cc Prepare; {_INTEGER_OPS}/mul.h MulElementwise",
        ),
        Row(
            ("bmm.default",),
            requantization.WideFixedPoint(),
            "kernels/batch_matmul.cc Prepare; kernels/internal/reference/batch_matmul.h BatchMatMul, of int16",
            limits=_LIMITS_15_BITS,
        ),
        Row(
            ("add.Tensor", "sub.Tensor"),
            integers.TfliteAdd(),
            f"kernels/add.cc Prepare; {_INTEGER_OPS}/add.h AddElementwise",
        ),
        Row(
            (*SAME, *VIEWS),
            requantization.GEMMLOWP,
            "kernels/internal/reference/requantize.h Requantize, where the scale changes",
        ),
        Row(("mean.dim",), integers.TfliteMean(), "kernels/internal/reference/reduce.h QuantizedMeanOrSum, of int16"),
        _EXTREMES,
        _LEAKY_RELU,
        Row(
            POOLS,
            integers.TfliteAveragePool(),
            f"{_INTEGER_OPS}/pooling.h AveragePool, of int16",
        ),
        Row(("cat.default",), integers.TfliteConcatenation(), "kernels/internal/reference/requantize.h Requantize"),
        Row(BILINEAR, integers.TfliteResizeBilinear(), _RESIZES),
        Row(
            ("softmax.int", "_softmax.default"),
            integers.TfliteSoftmax(),
            "kernels/internal/reference/softmax.h SoftmaxInt16",
        ),
        *(
            Row((f"{name}.default",), integers.TfliteSigmoid(function=name), f"{_INTEGER_OPS}/{file}, of int16")
            for name, file in (("sigmoid", "logistic.h Logistic"), ("tanh", "tanh.h Tanh"))
        ),
        Row(
            ("rsqrt.default",),
            integers.TfliteRsqrt(),
            "kernels/elementwise.cc RsqrtPrepare; common.h LUTPopulate of int16",
        ),
        *(
            Row(
                (f"{name}.default",),
                integers.TfliteTable(function=name),
                f"kernels/{file}; common.h LUTPopulate of int16",
            )
            for name, file in (("gelu", "activations.cc GeluPrepare"), ("exp", "elementwise.cc"))
        ),
    ),
    dtypes=("int16",),
)
"""LiteRT's reference kernels for 16-bit activations, without zero points, and 8-bit weights. Products are summed in 64
bits; convolutions use 15-bit multipliers, fully connected layers float64."""


_MICRO = "tflite-micro, tensorflow/lite/micro/kernels"

_REQUANTIZED = "kernels/internal/reference/requantize.h Requantize, where the scale changes"
_MICRO_VIEWS = (
    Row(
        ("permute.default", "transpose.int", "t.default", "movedim.int", "movedim.intlist"),
        requantization.GEMMLOWP,
        f"{_MICRO}/transpose_common.cc TransposePrepare; {_REQUANTIZED}",
        limits=Limits(rank=5),
    ),
    Row(
        ("slice.Tensor", "narrow.default", "select.int"),
        requantization.GEMMLOWP,
        f"{_MICRO}/strided_slice_common.cc StridedSlicePrepare; {_REQUANTIZED}",
        limits=Limits(rank=4),
    ),
)

TFLITE_MICRO = replace(
    with_rows(
        without(TFLITE, "gelu.default", "exp.default", "embedding.default", *_TABLES),
        Row(
            ("linear.default",),
            requantization.GEMMLOWP,
            f"{_MICRO}/fully_connected.cc, fully_connected_common.cc CalculateOpDataFullyConnected",
            per_tensor=requantization.FixedPoint(rounding="gemmlowp", multiplier="float32_product"),
        ),
        Row(("mul.Tensor",), requantization.GEMMLOWP, f"{_MICRO}/mul_common.cc CalculateOpDataMul"),
        Row(
            ("tanh.default",),
            integers.TfliteTable(function="tanh"),
            f"{_MICRO}/tanh.cc CalculateArithmeticOpData, which ignores the result's scale and zero point",
            limits=Limits(units=(1 / 128, 0)),
        ),
        Row(
            ("cat.default",),
            integers.TfliteConcatenation(),
            f"{_MICRO}/concatenation.cc kMaxInputNum; kernels/internal/reference/requantize.h Requantize",
            limits=Limits(operands=10),
        ),
        *_MICRO_VIEWS,
    ),
    name="TFLITE_MICRO",
)
"""TensorFlow Lite Micro's int8 kernels: all round twice, and multipliers of elementwise products are float64."""

TFLITE_MICRO_16X8 = replace(
    with_rows(
        without(
            TFLITE_16X8,
            *("gelu.default", "exp.default", "rsqrt.default", "embedding.default", "softmax.int", "_softmax.default"),
            *("amax.default", "amin.default"),
            *BILINEAR,
        ),
        Row(
            ("linear.default",),
            requantization.WideFixedPoint(),
            f"{_MICRO}/fully_connected.cc, of int16",
            limits=_LIMITS_15_BITS,
        ),
        Row(("mul.Tensor",), requantization.GEMMLOWP, f"{_MICRO}/mul_common.cc CalculateOpDataMul, of int16"),
        Row(
            ("cat.default",),
            integers.TfliteConcatenation(),
            f"{_MICRO}/concatenation.cc kMaxInputNum; kernels/internal/reference/requantize.h Requantize",
            limits=Limits(operands=10),
        ),
        *_MICRO_VIEWS,
    ),
    name="TFLITE_MICRO_16X8",
)
"""TensorFlow Lite Micro's kernels for 16-bit activations and 8-bit weights, except softmax."""
