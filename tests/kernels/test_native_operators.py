"""The operators hop_native::* themselves: what PyTorch asks of an operator, and what they make of damaged arguments."""

import re
import subprocess
import sys
import tempfile
import threading
import unittest
import warnings
from pathlib import Path

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch.autograd import forward_ad

import hop
from hop import presets
from hop.kernels.cpu import native
from hop.kernels.cpu.quantizers import Description, describe
from tests import fuzz
from tests.support.files import reloaded

pytestmark = pytest.mark.skipif(native.library().missing is not None, reason=str(native.library().missing))

SHIM = Path(__file__).parents[2] / "native/torch/shim.h"
PRODUCT = "1 lhs int8 scale=1,-1 rhs int8 scale=1,-1 output float32"
SEARCH = "1 scale block=32 bits=16 low=-8 high=7 candidates=1088421888,1090519040"
OF_FLOATS = "1 lhs bfloat16 rhs int8 scale=1,-1 output float32"


def described(q: hop.Quantizer) -> Description:
    found = describe(str(q))
    assert isinstance(found, Description)
    return found


def operators() -> dict[str, tuple[object, ...]]:
    """A call of each that returns something."""
    torch.manual_seed(0)
    t, w = hop.quantize(presets.INT8_ROW, torch.randn(5, 64)), hop.quantize(presets.INT8_ROW, torch.randn(7, 64))
    image, kernel = torch.randint(-9, 9, (2, 4, 6, 6)).to(torch.int8), torch.randint(-9, 9, (6, 2, 3, 3)).to(torch.int8)
    of_kernel = "kernel=3,3 stride=1,2 before=1,0 after=1,0 dilation=1,1 groups=2"
    conv = f"1 x int8 zero=0 weight int8 {of_kernel} output bfloat16"
    tokens = torch.randint(-9, 9, (1, 2, 5, 16)).to(torch.int8)
    heads = (tokens, torch.ones(1, 2, 5, 1)) * 3
    none = (None, None, None)
    held = (torch.randint(-9, 9, (7, 64)).to(torch.int8), None, torch.rand(7, 2).half())
    row = described(presets.INT8_ROW).words.removeprefix("1 ")
    return {
        "product": (t.codes, t.scale, None, None, w.codes, w.scale, *none, None, None, 7, PRODUCT),
        "convolution": (image, torch.ones(1, 1, 1, 1), None, kernel, torch.ones(6, 1, 1, 1), *none, 6, conv),
        "pack": (w.codes, "1 lhs int8 rhs int8"),
        "quantize": (torch.randn(5, 64), *none, described(presets.NVFP4).words),
        "quantize_product": (torch.randn(5, 64), torch.randn(1, 64), None, -1, described(presets.MXFP8).words),
        "dequantize": (t.codes, t.scale, None, [5, 64], described(presets.INT8_ROW).back(torch.bfloat16)),
        "search_scales": (torch.randn(5, 64), torch.rand(5, 2), *none, SEARCH),
        "noise": (torch.tensor(5), [3, 7], 2, 24),
        "function": (torch.randn(5, 64), "gelu"),
        "attention": (*heads, None, 0.25, True, "1 result=bfloat16 per=token"),
        "group_product": (
            torch.randn(5, 64),
            *held,
            *none,
            torch.randn(7),
            "1 codes=int8 scale=float16:32 result=bfloat16",
        ),
        "rows": (torch.randn(5, 64), *none, None, None, f"1 softmax sums=1 floats=bfloat16 quantizer {row}"),
    }


_Refused = dict[str, dict[str, tuple[list[object], str]]]


def _refused_products() -> _Refused:
    """Arguments of products that fit each other, and mean nothing, with the message, by operator and name."""
    ones, x = torch.ones(4, 64, dtype=torch.int8), torch.ones(64, 64)

    def product(words: str, lhs: Tensor = ones, n: int = 4, output_scale: Tensor | None = None) -> list[object]:
        return [lhs, None, None, None, ones, None, None, None, None, output_scale, None, n, words]

    def convolution(words: str, weight: Tensor, size: int) -> list[object]:
        image, one = torch.ones(1, 4, *[size] * (weight.dim() - 2), dtype=torch.int8), torch.ones([1] * weight.dim())
        return [image, one, None, weight, one, None, None, None, 4, words]

    def listed(size: int, kernel: int, before: int = 0) -> str:
        values = {"kernel": kernel, "stride": 2**31, "before": before, "after": 0, "dilation": 1}
        return (
            " ".join(f"{name}={','.join([str(v)] * size)}" for name, v in values.items()) + " groups=1 output float32"
        )

    wide, tall = torch.ones(1, 1, dtype=torch.int8).expand(2**31, 2**31), torch.ones(1, 100_000, dtype=torch.int8)
    taps, whole = torch.ones(4, 4, 1, dtype=torch.int8), 2**31
    batch, row = torch.ones(3, 4, 64, dtype=torch.int8), "1 lhs int8 rhs int8 output int8 requantize=0"
    of_batch = [batch, *[None] * 3, batch, *[None] * 4, torch.ones(3, 1, 1), None, 4]
    tiled = torch.zeros(0, 1, 2, 16, 64).char()
    return {
        "product": {
            "columns of lhs": (
                product("1 lhs int8 columns rhs int8 output int32", tall),
                "neither tiled nor in columns",
            ),
            "lhs of floats": (
                product("1 lhs float32 scale=-1 rhs int8 output float32", x[:4]),
                "a float lhs cannot have scales",
            ),
            "zero points without scales": (
                product("1 lhs int8 rhs int8 zero=stored output float32"),
                "zero points but no scales",
            ),
            "zero": (product("1 lhs int8 zero=4294967296 rhs int8 output int32"), "is not understood"),
            "block scale": (product("1 lhs e4m3 block_scale=int32:1,32 rhs int8 output float32"), "is not understood"),
            "n": (product("1 lhs int8 rhs int8 tiled output int32", n=-1), "n must not be negative"),
            "size": (product("1 lhs int8 rhs int8 output int32", wide), "lhs is too large"),
            "a scale of each row of a batch": (
                [*of_batch, f"{row} low=-128 high=127 scale=1,-1,-1"],
                "must share the scales of the result",
            ),
        },
        "pack": {"tiles of floats": ([x, "1 lhs int8 rhs float32"], "tiles are for codes")},
        "convolution": {
            "kernel": (
                convolution(f"1 x int8 weight int8 tiled {listed(3, whole, whole)}", tiled, 4),
                "kernel is too large",
            ),
            "zero points of a weight": (
                convolution(f"1 x int8 weight int8 zero=5 {listed(1, 1)}", taps, 4),
                "cannot have a zero point",
            ),
        },
    }


def _refused_quantizers() -> _Refused:
    """The same for operators that quantize, dequantize, search or update."""
    x = torch.ones(64, 64)
    square = "1 integer codes=int8 block=1,-1 bits=8 low=-128 high=127 zero=0 range=1065353216 rule="
    flat = square.replace("block=1,-1", "block=-1 flat")
    e2m1 = "1 float codes=uint8 block=16,16 bits=4 mantissa_bits=1 bias=1 largest=7 rule="

    def step(words: str, *states: Tensor, gradients: int = 1, numbers: int = 6) -> list[object]:
        return [[x], [x] * gradients, list(states), [0.0] * numbers, 0, [0], words]

    huge, nothing = torch.ones(1, dtype=torch.int8).expand(2**62), [None] * 3
    of_state = f"1 lion least=0;{flat.replace('-1', '64', 1)}amax"
    return {
        "quantize": {
            name: ([x, *nothing, words], said)
            for name, words, said in (
                ("minmax without zero points", square + "minmax", "minmax finds zero points"),
                ("zero points of amax", square + "amax affine=1", "minmax finds zero points"),
                ("outer", e2m1 + "two_level scale=e4m3 outer=4,-1", "the outer block is the tensor or a row"),
                (
                    "blocks of rows below an amax of a row",
                    e2m1 + "two_level scale=e4m3 outer=1,-1",
                    "blocks must be within a row",
                ),
            )
        },
        "quantize_product": {
            "flat blocks of a product": ([x, torch.ones(64), None, -1, flat + "amax"], "blocks that are not flat")
        },
        "dequantize": {"size of a result": ([huge, torch.ones(1), None, [2**62], flat + "amax"], "too large")},
        "step_": {
            "states": (step("1 lion"), "lion 1"),
            "numbers": (step("1 lion least=0;", x.clone(), numbers=1), "6 entries per parameter"),
            "gradients": (
                step("1 lion least=0;", x.clone(), gradients=0),
                "grads and streams must have one entry per parameter",
            ),
            "a buffer too many": (step("1 lion least=0;", x.clone(), x.clone()), "more tensors than the states need"),
            "codes of a state": (step(of_state, x.long(), torch.ones(64)), "must be int8"),
        },
        "search_scales": {
            name: ([x, scale, *nothing, words], said)
            for name, scale, words, said in (
                ("blocks that are searched", torch.ones(64, 3), SEARCH, "scale must be contiguous, of shape"),
                (
                    "a search for zero points",
                    torch.ones(64, 2),
                    SEARCH.replace("scale", "affine"),
                    "an affine search needs zero_point",
                ),
                (
                    "a search without values",
                    torch.ones(64, 2, dtype=torch.uint8),
                    SEARCH.replace("scale", "code"),
                    "needs values",
                ),
                (
                    "a search without candidates",
                    torch.ones(64, 2),
                    "1 scale block=32 bits=16 candidates=",
                    "needs block, bits and candidates",
                ),
                ("candidates", torch.ones(64, 2), "1 scale block=32 bits=16 candidates=2139095040", "from -512 to 512"),
                ("units", x[:, :2], SEARCH.replace("16", "21"), "is not understood"),
            )
        },
        "noise": {
            "seed": ([torch.ones(2, dtype=torch.int64), [3], 0], "one int64"),
            "bits": ([torch.tensor(1), [3], 0, 16], "bits must be 8 or 24"),
        },
    }


def refused() -> dict[str, tuple[str, list[object], str]]:
    """The operator, its arguments and the message of each refused call."""
    both = _refused_products() | _refused_quantizers()
    return {name: (op, *row) for op, rows in both.items() for name, row in rows.items()}


NAMES = (
    "product",
    "convolution",
    "pack",
    "quantize",
    "quantize_product",
    "dequantize",
    "noise",
    "function",
    "rows",
    "attention",
    "group_product",
    "search_scales",
)


def listed(x: Tensor | list[Tensor]) -> list[Tensor]:
    return x if isinstance(x, list) else [x]


def operator(name: str):
    return getattr(torch.ops.hop_native, name).default


class TestOperators(unittest.TestCase):
    @parameterized.expand(NAMES)
    @pytest.mark.quick(3)
    def test_as_pytorch_checks_operators(self, name):
        tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
        found = torch.library.opcheck(operator(name), operators()[name], test_utils=tests)
        assert set(found.values()) == {"SUCCESS"}, found

    def test_each_is_here(self):
        defined = {
            name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("hop_native::")
        }
        assert defined == {*NAMES, "step_"}

    @parameterized.expand(NAMES)
    @pytest.mark.full
    @pytest.mark.compiler
    def test_programs(self, name):
        """Exported, saved and loaded, and compiled."""
        given, op = operators()[name], operator(name)
        tensors = [x for x in given if isinstance(x, Tensor)]

        class Model(torch.nn.Module):
            def forward(self, *tensors: Tensor) -> list[Tensor]:
                rest = iter(tensors)
                return listed(op(*(next(rest) if isinstance(x, Tensor) else x for x in given)))

        model = Model()
        want = model(*tensors)
        program = reloaded(torch.export.export(model, tuple(tensors)))
        for run in (program.module(), torch.compile(model, fullgraph=True)):
            for got, x in zip(run(*tensors), want, strict=True):
                assert torch.equal(got.view(torch.uint8), x.view(torch.uint8)) and got.stride() == x.stride()


class TestDerivatives(unittest.TestCase):
    """There are none: who asks for one is told so, and not given None."""

    def product(self, x: Tensor) -> Tensor:
        w = hop.quantize(presets.INT8_ROW, torch.ones(3, 64))
        return operator("product")(x, None, None, None, w.codes, w.scale, *[None] * 5, 3, OF_FLOATS)

    def test_gradient(self):
        x = torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"hop_native::product.*needs a gradient.*call hop\.scaled"):
            self.product(x)
        with torch.no_grad():
            assert not self.product(x).requires_grad

    def test_tangent(self):
        x = torch.ones(2, 64, dtype=torch.bfloat16)
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="has a tangent"):
            self.product(forward_ad.make_dual(x, x))

    def test_vmap(self):
        x = torch.randn(4, 2, 64).bfloat16()
        with warnings.catch_warnings():  # in which PyTorch says, once in a process, that it is a loop
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            got = torch.func.vmap(self.product)(x)
        assert torch.equal(got, torch.stack([self.product(row) for row in x]))


class TestThreads(unittest.TestCase):
    def test_any_number_of_threads_and_of_callers(self):
        """Of PyTorch's, of Python's at once, and in a process that was forked after they ran."""
        a, b = torch.randint(-128, 128, (40, 512)).to(torch.int8), torch.randint(-128, 128, (300, 512)).to(torch.int8)

        def multiply() -> Tensor:
            return operator("product")(a, *[None] * 3, b, *[None] * 6, 300, "1 lhs int8 rhs int8 output int32")

        want, before = (a.double() @ b.double().t()).int(), torch.get_num_threads()
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert torch.equal(multiply(), want)
        finally:
            torch.set_num_threads(before)
        results: list[Tensor] = []
        threads = [threading.Thread(target=lambda: results.extend(multiply() for _ in range(20))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 80 and all(torch.equal(x, want) for x in results)

    @pytest.mark.skipif(
        not hasattr(sys, "getwindowsversion") and sys.platform == "darwin", reason="forks are for Linux"
    )
    @pytest.mark.full
    def test_a_forked_process(self):
        code = """
import os, torch, hop
from hop.kernels.cpu import native
native.library()
torch.set_num_threads(2)
a, b = torch.ones(64, 512, dtype=torch.int8), torch.ones(512, 512, dtype=torch.int8)
run = lambda: torch.ops.hop_native.product(a, *[None] * 3, b, *[None] * 6, 512, "1 lhs int8 rhs int8 output int32")
run()
if not (pid := os.fork()):
    os._exit(0 if (run() == 512).all() else 3)
print(os.waitpid(pid, 0)[1])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.split() == ["0"]


class TestFuzz(unittest.TestCase):
    @pytest.mark.full
    def test_few(self):
        assert not fuzz.faults("tests.fuzz_operators", 0, 60)

    @pytest.mark.full
    def test_some(self):
        assert not fuzz.faults("tests.fuzz_operators", 60, 1000)

    @pytest.mark.exhaustive
    def test_many(self):
        assert not fuzz.faults("tests.fuzz_operators", 10**6, 20_000)

    @parameterized.expand(sorted(refused()))
    def test_refused(self, name):
        """Without these checks kernels read or write beyond memory, divide by zero, or return something wrong."""
        op, args, said = refused()[name]
        with pytest.raises(RuntimeError, match=re.escape(said)):
            operator(op)(*args)

    def test_damaged_descriptions_say_what_is_wrong(self):
        given = operators()["product"]
        for words, said in (
            ("", "begin with 1, the version of its grammar"),
            ("2 lhs int8", "the version of its grammar, got '2 lhs int8'"),
            ("1 lhs int9 rhs int8 output float32", "'int9' is not understood"),
            ("1 lhs int8 scale=0 rhs int8 output float32", "'scale=0' is not understood"),
            ("1 lhs int8 rhs int8 output", "ends before the format of the output"),
            ("1 lhs int8 scale=1,-1 rhs int8 scale=1,-1 output e4m3", "'e4m3' is not a format of this result"),
        ):
            with pytest.raises(RuntimeError, match=re.escape(said)):
                operator("product")(*given[:-1], words)


@pytest.mark.compiler
class TestShim(unittest.TestCase):
    """The declarations of PyTorch's C interface are those of the PyTorch that is installed."""

    def compiled(self, text: str) -> "subprocess.CompletedProcess[str]":
        headers = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "both.cpp"
            source.write_text("\n".join([*(f"#include <{h}>" for h in headers), text]))
            flags = ["-std=c++20", "-fsyntax-only", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
            command = ["c++", *flags, f"-I{Path(torch.__file__).parent / 'include'}", str(source)]
            return subprocess.run(command, capture_output=True, text=True, check=False)

    @pytest.mark.full
    def test_declarations(self):
        own = SHIM.read_text()
        done = self.compiled(own)
        assert done.returncode == 0, done.stderr
        for before, after in (
            ("aoti_torch_get_dim(AtenTensorHandle, int64_t*)", "aoti_torch_get_dim(AtenTensorHandle, int32_t*)"),
            ("int32_t aoti_torch_dtype_int8()", "int64_t aoti_torch_dtype_int8()"),
        ):
            assert before in own
            done = self.compiled(own.replace(before, after))
            assert (done.returncode != 0 and "conflicting declaration" in done.stderr) or "ambiguat" in done.stderr
