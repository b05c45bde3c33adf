"""The leaf operator of cutlass_kernels and the cache of its kernels, without a GPU."""

import functools
import os
import stat
import subprocess
import sys
import time
import unittest
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import cutlass_kernels
import hop
from cutlass_kernels import cache, checks, hopper, operators, plain
from cutlass_kernels.product import Product
from cutlass_kernels.variants import Tile, Variant
from hop.dispatch.operand import Operand
from hop.impls.out_dtype import kernels as out_dtype_kernels
from hop.impls.scaled import kernels
from hop.impls.scaled.calls import Call
from hop.kernels.gpu import product as gpu
from tests.support import matching
from tests.support.contexts import enter, trace_for_hopper
from tests.support.kernel_folder import KernelFolder

ROOT = Path(__file__).parents[2]
S8, E4M3 = torch.int8, torch.float8_e4m3fn
aten, MM = torch.ops.aten, torch.ops.cutlass_kernels.mm.default
needs_dsl = pytest.mark.skipif(cutlass_kernels.missing() is not None, reason=str(cutlass_kernels.missing()))
H200 = (9, 0)


def integers(m: int = 4, n: int = 6, k: int = 8, **fused: Any) -> dict[str, Any]:
    return {"lhs": torch.ones(m, k, dtype=S8), "rhs": torch.ones(k, n, dtype=S8), "out": torch.int32, **fused}


def scaled(**fused: Any) -> dict[str, Any]:
    return integers(out=torch.float32, lhs_scale=torch.ones(4), rhs_scale=torch.ones(6)) | fused


def floats(**fused: Any) -> dict[str, Any]:
    ones = {"lhs": torch.ones(4, 256).to(E4M3), "rhs": torch.ones(256, 6).to(E4M3)}
    return {**ones, "out": torch.float32, **fused}


STEP = {"out_scale": torch.ones(1), "requantize": "division", "out": S8}
# What is wrong, the type of the error, and words of it.
WRONG = (
    ("dtypes", integers(rhs=torch.ones(8, 6)), TypeError, "lhs and rhs must be two of int8"),
    ("kinds", integers(rhs=torch.ones(8, 6).to(E4M3)), TypeError, "got torch.int8 and torch.float8_e4m3fn"),
    ("dimensions", integers(rhs=torch.ones(2, 8, 6, dtype=S8)), ValueError, "two matrices, or two batches"),
    ("sizes", integers(rhs=torch.ones(9, 6, dtype=S8)), ValueError, r"got \(4, 8\) and \(9, 6\)"),
    ("device", scaled(bias=torch.ones(6, device="meta")), ValueError, "bias is on meta and lhs on cpu"),
    ("one scale", scaled(rhs_scale=None), ValueError, "rhs_scale is None"),
    ("two scales", scaled(lhs_scale=torch.ones(4, 1).to(E4M3)), TypeError, "must have one dtype"),
    ("scale dtype", scaled(lhs_scale=torch.ones(4).half(), rhs_scale=torch.ones(6).half()), TypeError,
        "must be float32"),
    ("scale size", scaled(lhs_scale=torch.ones(3)), ValueError, "one for each of 4 rows and 6 columns"),
    ("blocks of integers", scaled(lhs_scale=torch.ones(4, 1), rhs_scale=torch.ones(1, 2)), ValueError,
        "factors of floats"),
    ("blocks", floats(lhs_scale=torch.ones(4, 2), rhs_scale=torch.ones(2, 2)), ValueError,
        r"have shapes \(4, 2\) and \(2, 1\)"),
    ("groups", floats(lhs_scale=torch.ones(4, 2).to(E4M3), rhs_scale=torch.ones(2, 6).to(E4M3)), TypeError,
        "groups|two of float4"),
    ("zero of floats", floats(lhs_zero=torch.zeros(1, dtype=S8)), ValueError, "lhs_zero is for factors of integers"),
    ("zero dtype", scaled(lhs_zero=torch.zeros(1)), TypeError, "lhs_zero must be of torch.int32"),
    ("zero size", scaled(rhs_zero=torch.zeros(4, dtype=S8)), ValueError, "one for each of 6; got shape"),
    ("sums", scaled(rhs_sum=torch.zeros(1, dtype=torch.int32)), ValueError,
        "rhs_sum must hold one value for each of 6"),
    ("bias size", scaled(bias=torch.ones(1)), ValueError, "bias must hold one value for each of 6"),
    ("bias dtype", scaled(bias=torch.ones(6).double()), TypeError, "bias must be of"),
    ("bias of a sum", integers(bias=torch.ones(6)), TypeError, "bias must be of torch.int32"),
    ("convention", scaled(**STEP | {"requantize": "nearest"}), ValueError, "got 'nearest'"),
    ("no step", scaled(**STEP | {"out_scale": None}), ValueError, "out_scale is for requantize"),
    ("no convention", scaled(out_scale=torch.ones(1)), ValueError, "out_scale is for requantize"),
    ("codes of floats", floats(**STEP), ValueError, "requantize is for factors of integers"),
    ("rounded bias", scaled(**STEP | {"requantize": "multiplier"}, bias=torch.ones(6)), TypeError,
        "bias must be int32"),
    ("bounds", scaled(low=0.0), ValueError, "low and high are for requantize"),
    ("result", integers(out=torch.float32), TypeError, "out_dtype must be of torch.int32"),
    ("result of scales", scaled(out=torch.int32), TypeError, "got torch.int32"),
    ("result of floats", floats(out=torch.int8), TypeError, "got torch.int8"),
)  # fmt: skip


class TestChecks(unittest.TestCase):
    @parameterized.expand(WRONG)
    def test_errors_are_those_of_tracing(self, _, given, error, words):
        with self.assertRaisesRegex(error, words):
            checks.check(Product(**given))
        if given["lhs"].device == given.get("bias", given["lhs"]).device:
            with FakeTensorMode() as mode, self.assertRaisesRegex(error, words):
                call(**{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()})

    def test_right_ones_pass(self):
        for given in (
            integers(),
            scaled(),
            scaled(**STEP),
            floats(),
            floats(lhs_scale=torch.ones(4, 2), rhs_scale=torch.ones(2, 1)),
        ):
            checks.check(Product(**given))


def call(lhs: Tensor, rhs: Tensor, out: torch.dtype, **fused: Any) -> Tensor:
    return torch.ops.cutlass_kernels.mm(lhs, rhs, out, **fused)


def on_gpu(x: Tensor) -> Tensor:
    """A tensor like x on a GPU, under a mode of fakes."""
    return torch.empty_strided(tuple(x.shape), x.stride(), dtype=x.dtype, device="cuda")


class TestOperator(unittest.TestCase):
    @parameterized.expand([("integers", integers), ("scaled", scaled), ("floats", floats)])
    def test_fakes_are_as_results(self, _, make):
        for given in (
            make(),
            make(lhs=make()["lhs"].expand(2, *make()["lhs"].shape), rhs=make()["rhs"].expand(2, *make()["rhs"].shape)),
        ):
            if "lhs_scale" in given and given["lhs"].dim() == 3:
                continue
            wanted = plain.reference(Product(**given))
            with FakeTensorMode():
                fake = {k: on_gpu(v) if isinstance(v, Tensor) else v for k, v in given.items()}
                got = call(**fake)
            assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())
            assert got.device.type == "cuda"

    def test_one_node_in_graphs(self):
        with FakeTensorMode():
            a, b = (on_gpu(torch.empty(s, dtype=S8, device="meta")) for s in ((32, 64), (64, 48)))
        graph = make_fx(lambda a, b: operators.mm(a, b, torch.int32))(a, b)
        assert [n.target for n in graph.graph.nodes if n.op == "call_function"] == [MM]

    def test_symbolic_sizes_make_no_guards_on_rows(self):
        real = torch.empty(32, 64, dtype=S8)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
            a = mode.from_tensor(real, symbolic_context=context)
            assert isinstance(a.shape[0], torch.SymInt)
            checks.check(
                Product(a, torch.empty(64, 48, dtype=S8), torch.bfloat16, torch.empty(a.shape[0], 1), torch.empty(48))
            )
            guards = [str(g.expr) for g in mode.shape_env.guards]
        assert not guards, guards

    def test_no_device_is_no_kernel(self):
        with self.assertRaises(NotImplementedError):
            call(**integers())

    def test_routes_say_why(self):
        with mock.patch("cutlass_kernels.operators.missing", lambda: None):
            p = Product(**integers())
            assert operators.routes(p, H200) == [("hopper", None)]
            long = replace(p, lhs=torch.ones(4, 2**17, dtype=S8), rhs=torch.ones(2**17, 6, dtype=S8))
            names, reasons = zip(*operators.routes(long, H200), strict=True)
            assert names == ("hopper", "registry", "public") and "saturate" in str(reasons[0]) and reasons[2] is None
            assert "compute capability 9.0" in str(operators.routes(p, (8, 0))[0][1])


class TestCall(unittest.TestCase):
    """A call on the way to the kernel, which only says that it was launched."""

    def setUp(self):
        self.launched: list[Any] = []
        enter(self, mock.patch.object(hopper, "compiled", lambda _: lambda *args: self.launched.append(args)))

    def test_factors_in_form_go_straight_in(self):
        a, b = torch.ones(32, 64, dtype=S8), torch.ones(48, 64, dtype=S8).mT
        hopper.run(Product(a, b, torch.int32))
        lhs, rhs, out, vectors, bounds, _ = self.launched[-1]
        assert lhs is a and rhs is b and vectors is None and bounds is None and out.shape == (32, 48)

    def test_others_are_brought_into_form(self):
        a, b = torch.ones(64, 32, dtype=S8).mT, torch.ones(64, 48, dtype=S8)
        for lhs, rhs in ((a, b), (a[:, :37], b[:37]), (a[:, :0], b[:0]), (a[:1], b[:, :1]), (a[:, 1:33], b[3:35])):
            hopper.run(Product(lhs, rhs, torch.int32))
            x, y, *_ = self.launched[-1]
            for ready, given in ((x, lhs), (y.mT, rhs.mT)):
                k = given.shape[1]
                assert ready.stride(1) == 1 and ready.stride(0) % 16 == 0 and ready.data_ptr() % 16 == 0
                assert torch.equal(ready[:, :k], given) and not ready[:, k:].any() and ready.shape[1] % 16 == 0
                assert ready.shape[1] > 0

    def test_little_is_done_before_a_launch(self):
        """Time on the host, without the dispatcher and the launch; a bound that a busy machine keeps too."""
        a, b = torch.ones(32, 64, dtype=S8), torch.ones(48, 64, dtype=S8).mT
        run = hopper.plan(Product(a, b, torch.bfloat16, torch.ones(32), torch.ones(48)))
        scales = {"lhs_scale": torch.ones(32), "rhs_scale": torch.ones(48)}
        times = []
        for _ in range(200):
            start = time.perf_counter()
            run(a, b, torch.bfloat16, **scales)
            times.append(time.perf_counter() - start)
        assert min(times) < 20e-6


class TestCache(KernelFolder):
    variant = Variant(S8, S8, torch.int32, Tile(64, 64))

    def test_the_folder_is_the_users_alone(self):
        assert cache.folder() == self.folder and stat.S_IMODE(self.folder.stat().st_mode) == 0o700
        for mode in (0o755, 0o770, 0o702):
            self.folder.chmod(mode)
            with self.assertRaisesRegex(PermissionError, f"mode {mode:o}.*HOP_CACHE_DIR"):
                cache.folder()
        for mode in (0o700, 0o2700):  # the second in a folder whose group is inherited
            self.folder.chmod(mode)
            assert cache.folder() == self.folder
        with mock.patch("os.getuid", lambda: os.stat(self.folder).st_uid + 1), self.assertRaises(PermissionError):
            cache.folder()

    def test_no_home_is_no_error(self):
        with mock.patch.dict(os.environ), mock.patch.object(Path, "home", side_effect=RuntimeError("no home")):
            del os.environ[cache.FOLDER]
            os.environ.pop("XDG_CACHE_HOME", None)
            with self.assertWarnsRegex(UserWarning, "not kept: no home.*HOP_CACHE_DIR"):
                assert cache.folder() is None
        with (
            mock.patch.dict(os.environ, {cache.FOLDER: "/dev/null/kernels"}),
            self.assertRaises(OSError),  # what was asked for
        ):
            cache.folder()

    def test_files_may_vanish(self):
        cache.folder()
        gone = self.folder / f"{cache._stem('x', 'sm_90a')}.0.o"
        with mock.patch.object(Path, "glob", lambda *_: [gone]):
            assert not cache.is_kept("x", "sm_90a")

    def test_nothing_is_kept_without_a_folder(self):
        with mock.patch.dict(os.environ, {cache.FOLDER: ""}):
            assert cache.folder() is None and not cache.is_kept("x", "sm_90a")

    def test_only_whole_files_are_read(self):
        path = cache.folder()
        assert path is not None
        kept = path / f"{cache._stem('x', 'sm_90a')}.{cache._digest(b'code')}.o"
        kept.write_bytes(b"code")
        assert cache.is_kept("x", "sm_90a")
        for content in (b"cod", b"Code", b""):
            kept.write_bytes(content)
            assert not cache.is_kept("x", "sm_90a")

    def test_an_interrupted_write_leaves_nothing(self):
        compiled = mock.Mock()
        compiled.export_to_c.side_effect = OSError("disk full")
        with self.assertRaisesRegex(OSError, "disk full"):
            cache.keep("x", "sm_90a", compiled)
        assert list(self.folder.iterdir()) == []

    @needs_dsl
    @pytest.mark.full
    def test_kernels_load_in_milliseconds(self):
        cache._loaded.clear()
        self.addCleanup(cache._loaded.clear)
        first = hopper.compiled(self.variant)
        assert hopper.compiled(self.variant) is first and cache.is_kept(self.variant.name, "sm_90a")
        with mock.patch.dict(os.environ, {cache.FOLDER: ""}):
            cache._loaded.clear()
            assert type(hopper.compiled(self.variant)) is type(first)
        cache._loaded.clear()
        with mock.patch.object(hopper, "build", side_effect=AssertionError("compiled again")):
            start = time.perf_counter()
            again = hopper.compiled(self.variant)
            assert time.perf_counter() - start < 5
        a, b = torch.ones(16, 64, dtype=S8), torch.ones(32, 64, dtype=S8).mT
        with self.assertRaisesRegex(ValueError, "device_type=cuda"):  # its own checks
            again(a, b, torch.empty(16, 32, dtype=torch.int32), None, None, 1)

    @needs_dsl
    @pytest.mark.full
    def test_several_processes_at_once(self):
        code = (
            "import torch; from cutlass_kernels import hopper; from cutlass_kernels.variants import Tile, Variant\n"
            "hopper.compiled(Variant(torch.int8, torch.int8, torch.int32, Tile(64, 64)))"
        )
        running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(3)]
        assert [p.wait(120) for p in running] == [0, 0, 0]
        assert all(f.suffix == ".o" and len(f.suffixes) >= 2 for f in self.folder.iterdir())
        assert cache.is_kept(self.variant.name, "sm_90a")

    def test_the_sources_decide(self):
        assert cache._stem("x", "sm_90a") != cache._stem("x", "sm_100a") != cache._stem("y", "sm_100a")
        with mock.patch("importlib.metadata.version", lambda _: "0"):
            cache._version.cache_clear()
            other = cache._stem("x", "sm_90a")
        cache._version.cache_clear()
        assert other != cache._stem("x", "sm_90a")


class TestOnGpu(unittest.TestCase):
    """What our operators ask a GPU for, traced with tensors that have no data."""

    def setUp(self):
        trace_for_hopper(self)
        enter(self, mock.patch("cutlass_kernels.operators.missing", lambda: None))

    def nodes(self, function: Any, *args: Tensor) -> list[Any]:
        with FakeTensorMode():
            fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in args]
        graph = make_fx(function)(*fakes)
        return [n.target for n in graph.graph.nodes if n.op == "call_function"]

    def test_out_dtype_is_the_leaf(self):
        for dtype, result in ((S8, torch.int32), (E4M3, torch.float32)):

            def multiply(result: torch.dtype, a: Tensor, b: Tensor) -> Any:
                kernels = out_dtype_kernels.candidates(aten.mm.default, result, (a, b), {})
                return next(matching.computed(k, c) for k, c in kernels if not matching.reason(k, c))

            nodes = self.nodes(
                functools.partial(multiply, result), torch.empty(32, 64, dtype=dtype), torch.empty(64, 48, dtype=dtype)
            )
            assert MM in nodes and not any("_int_mm" in str(n) for n in nodes), nodes

    def test_scaled_is_the_leaf(self):
        q = hop.presets.INT8_ROW
        codes, scale = torch.empty(32, 64, dtype=S8), torch.empty(32, 1)

        def linear(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> Any:
            sides = [Operand(q, (c, s), ("rowwise",), tuple(c.shape)) for c, s in ((a, of_a), (b, of_b))]
            asked = Call(aten.linear.default, torch.bfloat16, None, None, tuple(sides), {})
            kernel = next(k for k in kernels.TABLE if not matching.reason(k, asked))
            assert kernel.name == "GPU product"
            return matching.computed(kernel, asked)

        nodes = self.nodes(linear, codes, scale, codes, scale)
        assert MM in nodes and not {aten.mul.Tensor, aten._int_mm.default} & set(nodes), nodes

    def test_older_gpus_take_what_pytorch_has(self):
        with mock.patch("torch.cuda.get_device_capability", lambda *_: (8, 0)):
            reason = gpu.declines(Product(**scaled()))
        assert reason is not None and "compute capability 9.0" in reason and "public: fuses nothing" in reason
