"""The operators and routes that must be tested, and their table in docs/add_an_operator.md.

python -m tests.coverage writes the table.
"""

from pathlib import Path

from tests.distributed import test_out_dtype as test_distributed
from tests.impls import test_routes
from tests.support import pages

# The operators that out_dtype promises, and the routes of a new operator of ours.
PROMISED_OPERATORS = (
    "mm bmm addmm baddbmm matmul linear mv dot convolution conv1d conv2d conv3d conv_transpose2d add sub mul "
    "mul_scalar div div_scalar sum mean cumsum clamp avg_pool2d embedding"
).split()
PROMISED_LEAVES = ["quantize", "fake_quantize", "dequantize"]
PROMISED_SCALED = (
    "mm bmm addmm baddbmm matmul linear linear_groups linear_weight_only linear_superblock linear_fp8 linear_nvfp4 "
    "linear_dynamic linear_static linear_fixed_point conv1d conv2d conv2d_same conv3d conv_transpose2d embedding add "
    "sub mul cat relu clamp relu6 hardtanh upsample_nearest2d max_pool2d avg_pool2d adaptive_avg_pool2d mean permute "
    "gelu gelu_tanh tanh exp hardswish leaky_relu silu_mul div maximum softmax log_softmax layer_norm rms_norm "
    "hadamard attention attention_grouped attention_of_groups attention_floats upsample_bilinear2d linear_offsets "
    "prelu amax"
).split()
PROMISED_QUANTIZED = (
    "mm bmm addmm linear linear_static linear_groups linear_weight_only linear_ternary linear_output linear_codes "
    "linear_mx linear_stochastic conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d embedding"
).split()
PROMISED_ROUTES = (
    "eager full_path reference fake make_fx functionalize vmap flops grad double_backward jvp func aot_eager "
    "aot_eager_dynamic aot_eager_training aot_eager_jvp inductor inductor_dynamic inductor_training export_strict "
    "export_nonstrict save_load run_decompositions aotinductor dtensor"
).split()


PAGE = Path(__file__).parents[1] / "docs" / "add_an_operator.md"


def suite(operator: str, route: str) -> str:
    """T if `make test` runs the pair, A if only `make test-all` does, nothing if neither."""
    if (operator, route) in test_routes.COVERED:
        return "T"
    return "A" if (operator, route) in test_distributed.COVERED else ""


def table() -> str:
    """Routes down, since they are fewer; operators with the same row of suites share a column."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for operator in PROMISED_OPERATORS:
        groups.setdefault(tuple(suite(operator, route) for route in PROMISED_ROUTES), []).append(operator)
    header = ["route", *(", ".join(names) for names in groups.values())]
    rows = [[route, *(column[i] for column in groups)] for i, route in enumerate(PROMISED_ROUTES)]
    return pages.table([header, *rows])


def page(text: str) -> str:
    """The page with the table of today."""
    return pages.filled(text, "python -m tests.coverage", table())


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
