"""The predefined targets, each row with the source of its arithmetic."""

from dataclasses import replace

from hop.dispatch import operators as families
from hop.export.rewrite.target import Limits, Row, Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers

_VIEWS = (
    *("view.default", "reshape.default", "flatten.using_ints", "unflatten.int", "unsqueeze.default"),
    *("squeeze.default", "squeeze.dim", "squeeze.dims", "permute.default", "transpose.int", "t.default"),
    *("slice.Tensor", "narrow.default", "select.int", "clone.default", "contiguous.default", "alias.default"),
    *("movedim.int", "movedim.intlist"),
)
_SAME = (
    *("max_pool1d.default", "max_pool2d.default", "relu.default", "embedding.default"),
    *("upsample_nearest2d.vec", "upsample_nearest2d.default"),
)  # operators that return codes of their operand
_POOLS = tuple(f"{kind}avg_pool{n}d.default" for kind in ("", "adaptive_") for n in (1, 2))
_BILINEAR = ("upsample_bilinear2d.vec", "upsample_bilinear2d.default")
_INTEGER_OPS = "kernels/internal/reference/integer_ops"
_RESIZES = "kernels/internal/reference/resize_bilinear.h ResizeBilinearInteger"

_LIMITS_SIGMOID = Limits(units=(1 / 256, -128))
"""TFLite's quantization specification, LOGISTIC of int8: its kernels ignore the result's scale."""

TFLITE = Target(
    "TFLITE",
    (
        Row(
            ("conv1d.default", "conv2d.default"),
            requantization.GEMMLOWP,
            f"{_INTEGER_OPS}/conv.h ConvPerChannel, depthwise_conv.h DepthwiseConvPerChannel; "
            "kernels/kernel_util.cc PopulateConvolutionQuantizationParams",
        ),
        Row(("conv_transpose2d.input",), requantization.GEMMLOWP, f"{_INTEGER_OPS}/transpose_conv.h TransposeConv"),
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
            _POOLS,
            integers.TfliteAveragePool(),
            f"{_INTEGER_OPS}/pooling.h AveragePool",
        ),
        Row(("cat.default",), integers.TfliteConcatenation(), "kernels/internal/reference/requantize.h Requantize"),
        Row(_BILINEAR, integers.TfliteResizeBilinear(), _RESIZES),
        Row(
            (*_SAME, *_VIEWS),
            requantization.GEMMLOWP,
            "kernels/internal/reference/requantize.h Requantize, where the scale changes",
        ),
        Row(
            ("softmax.int", "_softmax.default"),
            integers.TfliteSoftmax(),
            "kernels/internal/reference/softmax.h Softmax",
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
    ),
)
"""LiteRT's int8 reference kernels, as in wheel 2.3.0: fully connected layers round once, all other operators twice."""


_LIMITS_15_BITS = Limits(multiplier=2.0**7)
"""For 64-bit sums: kernels/internal/common.cc, MultiplyByQuantizedMultiplier, whose shift is below 8."""

TFLITE_16X8 = Target(
    "TFLITE_16X8",
    (
        Row(
            ("conv1d.default", "conv2d.default"),
            requantization.WideFixedPoint(),
            f"{_INTEGER_OPS}/conv.h ConvPerChannel, depthwise_conv.h DepthwiseConvPerChannel, of int16",
            limits=_LIMITS_15_BITS,
        ),
        Row(
            ("conv_transpose2d.input",),
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
            (*_SAME, *_VIEWS),
            requantization.GEMMLOWP,
            "kernels/internal/reference/requantize.h Requantize, where the scale changes",
        ),
        Row(("mean.dim",), integers.TfliteMean(), "kernels/internal/reference/reduce.h QuantizedMeanOrSum, of int16"),
        Row(
            _POOLS,
            integers.TfliteAveragePool(),
            f"{_INTEGER_OPS}/pooling.h AveragePool, of int16",
        ),
        Row(("cat.default",), integers.TfliteConcatenation(), "kernels/internal/reference/requantize.h Requantize"),
        Row(_BILINEAR, integers.TfliteResizeBilinear(), _RESIZES),
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


def _without(target: Target, *names: str) -> Target:
    """The target without some operators."""
    kept = [(row, tuple(n for n in row.operators if n not in names)) for row in target.rows]
    return replace(target, rows=tuple(replace(row, operators=own) for row, own in kept if own))


def _with(target: Target, *rows: Row) -> Target:
    """The target with other rows for some operators."""
    return replace(target, rows=(*_without(target, *(n for row in rows for n in row.operators)).rows, *rows))


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
    _with(
        _without(TFLITE, "gelu.default", "exp.default", "embedding.default"),
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
    _with(
        _without(
            TFLITE_16X8,
            *("gelu.default", "exp.default", "rsqrt.default", "embedding.default", "softmax.int", "_softmax.default"),
            *_BILINEAR,
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


_SPECIFICATION = "TOSA specification 1.0"
_TOSA_ROWS = (
    Row(("add.Tensor", "sub.Tensor"), integers.TosaAdd(), f"{_SPECIFICATION}, RESCALE, ADD, SUB"),
    Row(("mul.Tensor",), requantization.TFLITE, f"{_SPECIFICATION}, RESCALE, MUL"),
    Row(("mean.dim",), integers.TosaMean(), f"{_SPECIFICATION}, RESCALE, REDUCE_SUM"),
    Row(_POOLS, integers.TosaAveragePool(), f"{_SPECIFICATION}, AVG_POOL2D"),
    Row(("cat.default",), integers.TosaConcatenation(), f"{_SPECIFICATION}, RESCALE, CONCAT"),
    Row(_BILINEAR, integers.TosaResizeBilinear(), f"{_SPECIFICATION}, RESIZE of mode BILINEAR, RESCALE"),
    Row(
        (
            "max_pool1d.default",
            "max_pool2d.default",
            "relu.default",
            "upsample_nearest2d.vec",
            "upsample_nearest2d.default",
            *_VIEWS,
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


def _uniform_target(name: str, convention: requantization.Requantization, source: str) -> Target:
    """A target with one convention for all operators of scaled but attention and transforms; others stay in floats."""
    other = (families.ATTENTION, families.TRANSFORM)
    every = dict.fromkeys(row.family for row in families.SCALED.values() if row.family not in other)
    rows = tuple(Row(_names(family), convention, source) for family in every)
    return Target(name, rows, False, ("int8", "uint8", "int16"))


def _names(family: families.Family) -> tuple[str, ...]:
    """The operators of a family."""
    return tuple(sorted(str(o).removeprefix("aten.") for o, r in families.SCALED.items() if r.family is family))


PT2E = _with(
    _uniform_target(
        "PT2E",
        requantization.Reciprocal(),
        "torch/ao/quantization/fx/_decomposed.py quantize_per_tensor: x times 1 / scale, ties to even",
    ),
    Row(("mean.dim",), integers.Pt2eMean(), "aten/src/ATen/native/cpu/SumKernel.cpp cascade_sum, in float32"),
    Row(
        tuple(f"{'adaptive_' if adaptive else ''}avg_pool{n}d.default" for n in (1, 2, 3) for adaptive in (0, 1))[:-1],
        integers.Pt2eAveragePool(),
        "aten/src/ATen/native/cpu/AvgPoolKernel.cpp cpu_avg_pool2d, in float32",
    ),
    Row(_BILINEAR, integers.Pt2eResizeBilinear(), "aten/src/ATen/native/cpu/UpSampleKernel.cpp, in float32"),
)
"""PyTorch's quantize and dequantize nodes around float operators; the default of to_integer."""

ONNX_QDQ = _uniform_target(
    "ONNX_QDQ", requantization.Division(), "ONNX operators, QuantizeLinear: x / y_scale, to nearest, ties to even"
)
"""ONNX's QuantizeLinear and DequantizeLinear around float operators."""

_MLAS, _CONTRIB = "onnxruntime/core/mlas/lib", "onnxruntime/contrib_ops/cpu/quantization"

ONNX_INTEGER = Target(
    "ONNX_INTEGER",
    (
        Row(
            ("conv1d.default", "conv2d.default", "conv3d.default", "linear.default", "bmm.default"),
            requantization.FloatMultiplier(),
            f"{_MLAS}/quantize.cpp MlasRequantizeOutput; QLinearConv, QGemm, QLinearMatMul",
        ),
        Row(("add.Tensor",), integers.OrtAdd(), f"{_MLAS}/intrinsics/avx2/qladd_avx2.cpp; QLinearAdd"),
        Row(("mul.Tensor",), integers.OrtMultiply(), f"{_MLAS}/qlmul.cpp; QLinearMul"),
        Row(("mean.dim",), integers.OrtMean(), f"{_MLAS}/qlgavgpool.cpp; QLinearGlobalAveragePool"),
        Row(
            ("avg_pool2d.default", "adaptive_avg_pool2d.default"),
            integers.OrtAveragePool(),
            f"{_CONTRIB}/qlinear_pool.cc; QLinearAveragePool",
        ),
        Row(
            ("softmax.int", "_softmax.default"), integers.OrtSoftmax(), f"{_CONTRIB}/qlinear_softmax.cc; QLinearSoftmax"
        ),
        Row(
            ("cat.default", *(name for name in _SAME if name not in ("relu.default", "max_pool1d.default")), *_VIEWS),
            requantization.Division(),
            f"{_CONTRIB}/qlinear_concat.cc, where the scale changes; QLinearConcat",
        ),
        Row(("sub.Tensor",), requantization.Division(), "ONNX operators, DequantizeLinear, Sub, QuantizeLinear"),
        Row(
            (*_names(families.FUNCTION), *_names(families.BOUND)),
            requantization.Division(),
            "ONNX operators, Gather from a table of all codes; Clip",
        ),
    ),
    dtypes=("int8", "uint8"),
)
"""onnxruntime's integer operators on x86 CPUs with AVX2, such as QLinearConv, QGemm, QLinearMatMul and QLinearAdd, to
which it converts ONNX_QDQ's graphs by default."""

TARGETS = (TFLITE, TFLITE_16X8, TFLITE_MICRO, TFLITE_MICRO_16X8, TOSA_1_0, TOSA_1_0_INT16, PT2E, ONNX_QDQ, ONNX_INTEGER)
"""All predefined targets."""
