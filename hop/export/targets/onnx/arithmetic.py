"""ONNX_QDQ and ONNX_INTEGER, each row with the source of its arithmetic."""

from dataclasses import replace

from hop.dispatch import operators as families
from hop.export.rewrite.pt2e import SAME, VIEWS, operators_of, uniform_target, with_rows, without
from hop.export.rewrite.target import Row, Target
from hop.numerics import requantization
from hop.numerics.integer import functions as integers

ONNX_QDQ = uniform_target(
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
            ("cat.default", *(name for name in SAME if name not in ("relu.default", "max_pool1d.default")), *VIEWS),
            requantization.Division(),
            f"{_CONTRIB}/qlinear_concat.cc, where the scale changes; QLinearConcat",
        ),
        Row(("sub.Tensor",), requantization.Division(), "ONNX operators, DequantizeLinear, Sub, QuantizeLinear"),
        Row(
            (*operators_of(families.FUNCTION), *operators_of(families.BOUND)),
            requantization.Division(),
            "ONNX operators, Gather from a table of all codes; Clip",
        ),
    ),
    dtypes=("int8", "uint8"),
)
"""onnxruntime's integer operators on x86 CPUs with AVX2, such as QLinearConv, QGemm, QLinearMatMul and QLinearAdd, to
which it converts ONNX_QDQ's graphs by default."""

ONNXRUNTIME = replace(
    with_rows(
        ONNX_QDQ,
        Row(
            (*operators_of(families.MATRIX), *operators_of(families.CONVOLUTION)),
            requantization.FloatMultiplier(),
            f"{_MLAS}/quantize.cpp MlasRequantizeOutput; QLinearConv, QGemm, QLinearMatMul",
        ),
        *without(ONNX_INTEGER, *ONNX_INTEGER.rows[0].operators, "mean.dim").rows,
    ),
    name="ONNXRUNTIME",
)
"""ONNX_INTEGER where onnxruntime makes an integer operator of a group of ONNX_QDQ, else ONNX_QDQ; for from_onnx."""
