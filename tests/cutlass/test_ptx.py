"""The emulator of PTX against numpy, and against mistakes that it must see."""

import importlib
import importlib.util
import tempfile
import unittest

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parameterized import parameterized

from tests.ptx import Deadlock, Fault, Memory, Report, TensorMap, contractable, launch, products
from tests.ptx.host import Host
from tests.ptx.tensormap import swizzled

SIZES = {8: "b8", 16: "b16", 32: "b32", 64: "b64"}
RNG = np.random.default_rng(0)
SEEDS = range(24)
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
EDGES = np.array([0, 1, 2, 3, 7, 31, 32, 33, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
WORDS = np.concatenate([EDGES, RNG.integers(0, 2**32, 4080, dtype=np.uint32)])
OTHERS = RNG.permutation(WORDS)
FLOATS = np.concatenate([
    WORDS.view(np.float32), (RNG.normal(size=4096) * 2.0 ** RNG.integers(-20, 20, 4096)).astype("f4"),
    np.array([0, -0.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, 448, 464, 465, 57344, 61440, 65520, 2.0**-149], "f4"),
])  # fmt: skip
FLOATS = np.resize(FLOATS, (len(FLOATS) + 31) // 32 * 32)


PARAMETERS = ".param .align 64 .b8 a[128], .param .u64 c"


def kernel(body: str, parameters: str = "", threads: int = 32, shared: int = 0) -> str:
    """A module of one kernel, with some registers of each type."""
    return f"""
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({parameters})
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<80>;
    .reg .b64 %d<16>;
    .reg .f32 %f<8>;
{body}
    ret;
}}
"""


def apply(text: str, *sources: NDArray, out: type) -> NDArray:
    """What an instruction makes of arrays: of %a, %b, %c, in %z."""
    result = np.zeros(sources[0].shape, out)
    arrays, names = [*sources, result], "abcz"[: len(sources)] + "z"
    parameters = ", ".join(f".param .u64 {n}" for n in names)
    registers = "".join(f".reg .b{max(16, 8 * x.itemsize)} %{n};" for n, x in zip(names, arrays, strict=True))
    loads = "".join(
        f"ld.param.u64 %d1, [{n}]; mad.wide.u32 %d1, %r0, {x.itemsize}, %d1;"
        + (f"ld.global.{SIZES[8 * x.itemsize]} %{n}, [%d1];" if n != "z" else "")
        for n, x in zip(names, arrays, strict=True)
    )
    store = f"st.global.{SIZES[8 * result.itemsize]} [%d1], %z;"
    head = "mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r0, %r1, 32, %r0;"
    memory = Memory()
    pointers = [memory.add(x) for x in arrays]
    body = f"{registers} {head} {loads} {text} {store}"
    launch(kernel(body, parameters), "k", grid=(result.size // 32,), block=(32,), parameters=pointers, memory=memory)
    return result


def of_bytes(a: NDArray, b: NDArray) -> NDArray:
    """The sums of the products of every four."""
    return (a.astype("i4") * b.astype("i4")).reshape(-1, 4).sum(1)


class Arithmetic(unittest.TestCase):
    @parameterized.expand([
        ("add.s32 %z, %a, %b;", lambda a, b: a + b), ("sub.s32 %z, %a, %b;", lambda a, b: a - b),
        ("mul.lo.s32 %z, %a, %b;", lambda a, b: a * b),
        ("shl.b32 %z, %a, %b;", lambda a, b: np.where(b < 32, a << (b & 31), 0)),
        ("mul.hi.u32 %z, %a, %b;", lambda a, b: (a.astype("u8") * b) >> 32),
        ("mul.hi.s32 %z, %a, %b;", lambda a, b: (a.view("i4").astype("i8") * b.view("i4")) >> 32),
        ("shr.u32 %z, %a, %b;", lambda a, b: np.where(b < 32, a >> (b & 31), 0)),
        ("shr.s32 %z, %a, %b;", lambda a, b: a.view("i4") >> np.minimum(b, 31).astype("i4")),
        ("div.u32 %z, %a, %b;", lambda a, b: np.where(b == 0, 2**32 - 1, a // np.maximum(b, 1))),
        ("div.s32 %z, %a, %b;", lambda a, b: truncated(a, b)),
        ("rem.s32 %z, %a, %b;", lambda a, b: a.view("i4") - truncated(a, b) * b.view("i4")),
        ("min.s32 %z, %a, %b;", lambda a, b: np.minimum(a.view("i4"), b.view("i4"))),
        ("max.u32 %z, %a, -2;", lambda a, b: np.maximum(a, 2**32 - 2)),
        ("lop3.b32 %z, %a, %b, %a, 0x3c;", lambda a, b: a ^ b), ("not.b32 %z, %a;", lambda a, b: ~a),
        ("shf.l.wrap.b32 %z, %a, %b, 8;", lambda a, b: b << 8 | a >> 24),
        ("shf.r.clamp.b32 %z, %a, %b, 40;", lambda a, b: b),
        ("prmt.b32 %z, %a, %b, 0x7210;", lambda a, b: (a & 0xFFFFFF) | (b & 0xFF000000)),
        ("prmt.b32 %z, %a, %b, 0x8888;", lambda a, b: np.where(a & 128, 2**32 - 1, 0)),
        ("dp4a.s32.s32 %z, %a, %b, %a;", lambda a, b: of_bytes(a.view("i1"), b.view("i1")) + a.view("i4")),
        ("dp4a.s32.u32 %z, %a, %b, 7;", lambda a, b: of_bytes(a.view("i1"), b.view("u1")) + 7),
        ("bfi.b32 %z, %a, %b, 4, 8;", lambda a, b: (b & ~np.uint32(0xFF0)) | ((a & 255) << 4)),
        ("bfe.u32 %z, %a, 5, 7;", lambda a, b: a >> 5 & 127),
        ("bfe.s32 %z, %a, 5, 7;", lambda a, b: ((a >> 5 & 127) ^ 64) - np.uint32(64)),
        ("popc.b32 %z, %a;", lambda a, b: np.array([bin(x).count("1") for x in a])),
        ("setp.lt.s32 %p1, %a, %b; selp.b32 %z, 1, 0, %p1;", lambda a, b: a.view("i4") < b.view("i4")),
        ("setp.hs.and.u32 %p1|%p2, %a, %b, !%p3; selp.b32 %z, 1, 0, %p1;", lambda a, b: a >= b),
        ("cvt.sat.s8.s32 %z, %a;", lambda a, b: np.clip(a.view("i4"), -128, 127)),
        ("cvt.u32.u8 %z, %a;", lambda a, b: a & 255), ("cvt.s32.s8 %z, %a;", lambda a, b: a.astype("i1").astype("i4")),
        ("cvt.pack.sat.s8.s32.b32 %z, %a, %b, %a;", lambda a, b: packed(a, b) | a << 16),
        ("mul.wide.s32 %d2, %a, %b; mov.b64 {%r2, %r3}, %d2; xor.b32 %z, %r2, %r3;",
         lambda a, b: (p := a.view("i4").astype("i8") * b.view("i4")) ^ p >> 32),
        ("mov.b64 %d2, {%a, %b}; shr.s64 %d2, %d2, 16; mov.b64 {%z, %r3}, %d2;", lambda a, b: a >> 16 | b << 16),
        ("max.s16x2 %z, %a, %b;", lambda a, b: np.maximum(a.view("i2"), b.view("i2")).view("u4")),
        ("min.u16x2 %z, %a, %b;", lambda a, b: np.minimum(a.view("u2"), b.view("u2")).view("u4")),
    ])  # fmt: skip
    @pytest.mark.quick(7)
    def test_integers(self, text, oracle):
        got = apply(text, WORDS, OTHERS, out=np.uint32)
        with np.errstate(all="ignore"):
            expected = np.asarray(oracle(WORDS, OTHERS))
        np.testing.assert_array_equal(got, expected.astype(np.int64).astype(np.uint32))

    @parameterized.expand([
        ("max.f32", np.fmax), ("max.NaN.f32", np.maximum), ("min.NaN.f32", np.minimum), ("mul.rn.f32", np.multiply),
        ("div.rn.f32", np.divide), ("rcp.rn.f32", lambda a, b: np.float32(1) / a),
    ])  # fmt: skip
    @pytest.mark.quick(3)
    def test_floats_have_one_nan(self, name, oracle):
        """NaN results are all the canonical one."""
        others = FLOATS[::-1].copy()
        text = f"{name} %z, %a;" if name.startswith("rcp") else f"{name} %z, %a, %b;"
        got = apply(text, FLOATS, others, out=np.uint32)
        with np.errstate(all="ignore"):
            expected = oracle(FLOATS, others)
        np.testing.assert_array_equal(got, np.where(np.isnan(expected), 0x7FFFFFFF, expected.view(np.uint32)))

    @parameterized.expand([
        ("cvt.rn.bf16.f32 %z, %a;", ml_dtypes.bfloat16), ("cvt.rn.f16.f32 %z, %a;", np.float16),
    ])  # fmt: skip
    def test_narrow_floats(self, text, dtype):
        got = apply(text, FLOATS, out=np.uint16).view(dtype).astype(np.float32)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, FLOATS.astype(dtype).astype(np.float32))

    @parameterized.expand([
        ("cvt.rn.bf16x2.f32 %z, %a, %b;", ml_dtypes.bfloat16, np.uint32),
        ("cvt.rn.f16x2.f32 %z, %a, %b;", np.float16, np.uint32),
        ("cvt.rn.satfinite.e4m3x2.f32 %z, %a, %b;", ml_dtypes.float8_e4m3fn, np.uint16),
        ("cvt.rn.satfinite.e5m2x2.f32 %z, %a, %b;", ml_dtypes.float8_e5m2, np.uint16),
    ])  # fmt: skip
    @pytest.mark.quick(2)
    def test_pairs_of_floats(self, text, dtype, out):
        """The first operand is the upper half; satfinite clips to the largest finite."""
        others = FLOATS[::-1].copy()
        got = apply(text, FLOATS, others, out=out).view(dtype).astype(np.float32).reshape(-1, 2)
        top = float(ml_dtypes.finfo(dtype).max) if "satfinite" in text else np.inf
        with np.errstate(all="ignore"):
            expected = [np.clip(x, -top, top).astype(dtype).astype(np.float32) for x in (others, FLOATS)]
        np.testing.assert_array_equal(got, np.stack(expected, axis=1))

    @parameterized.expand([("cvt.rni.s32.f32", np.rint, "i4"), ("cvt.rzi.u32.f32", np.trunc, "u4"),
                           ("cvt.rni.s8.f32", np.rint, "i1")])  # fmt: skip
    @pytest.mark.quick(3)
    def test_floats_to_integers(self, name, round_, dtype):
        got = apply(f"{name} %z, %a;", FLOATS, out=np.uint32).view(np.int32)
        limits = np.iinfo(dtype)
        with np.errstate(all="ignore"):  # signalling NaN
            exact = np.clip(np.nan_to_num(round_(FLOATS.astype(np.float64)), nan=0), limits.min, limits.max)
        np.testing.assert_array_equal(got, exact.astype(np.int64).astype(dtype).astype(np.uint32).view(np.int32))

    @parameterized.expand([("add", np.add), ("sub", np.subtract), ("mul", np.multiply), ("div", np.divide),
                           ("min", np.fmin), ("max", np.fmax)])  # fmt: skip
    @pytest.mark.quick(3)
    def test_floats(self, name, oracle):
        others = FLOATS[::-1].copy()
        rounding_ = "" if name in ("min", "max") else ".rn"
        got = apply(f"{name}{rounding_}.f32 %z, %a, %b;", FLOATS, others, out=np.float32)
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(got, oracle(FLOATS, others))

    def test_fma_rounds_once(self):
        """The product's low half decides a tie that the sum of the high half makes."""
        a, c = np.float32(1 + 2.0**-12), np.float32(2.0**30)
        x = np.resize(np.array([a, 1 + 2.0**-23, -a, 3], np.float32), 32)
        z = np.resize(np.array([c, 2.0**-60, c, -9], np.float32), 32)
        exact = [np.longdouble(p) * np.longdouble(p) + np.longdouble(q) for p, q in zip(x, z, strict=True)]
        got = apply("fma.rn.f32 %z, %a, %a, %b;", x, z, out=np.float32)
        np.testing.assert_array_equal(got, np.array(exact).astype(np.float32))
        tie = np.full(32, 1 + 2.0**-12, np.float32)  # its square is 1 + 2^-11 + 2^-24: half a unit and nothing more
        small = np.full(32, 2.0**-80, np.float32)
        got = apply("fma.rn.f32 %z, %a, %a, %b;", tie, small, out=np.float32)
        np.testing.assert_array_equal(got, np.float32(1 + 2.0**-11 + 2.0**-23))

    def test_contractable(self):
        ptx = kernel("mul.f32 %f1, %f2, %f3; add.rn.f32 %f1, %f1, %f2; add.ftz.f32 %f1, %f1, %f2; add.s32 %r1, %r2, 1;")
        self.assertEqual([x.split(": ")[1].split()[0] for x in contractable(ptx)], ["mul.f32", "add.ftz.f32"])

    def test_unknown(self):
        with self.assertRaisesRegex(NotImplementedError, "frobnicate.b32"):
            apply("frobnicate.b32 %z, %a;", WORDS, out=np.uint32)


def truncated(a: NDArray, b: NDArray) -> NDArray:
    a, b = a.view("i4").astype("i8"), b.view("i4").astype("i8")
    return np.where(b == 0, -1, np.sign(a) * np.sign(b) * (abs(a) // np.maximum(abs(b), 1)))


def packed(a: NDArray, b: NDArray) -> NDArray:
    high, low = (np.clip(x.view("i4"), -128, 127).astype("i1").view("u1").astype("u4") for x in (a, b))
    return high << 8 | low


class Warps(unittest.TestCase):
    def test_divergence(self):
        """Loops of different lengths, a branch in each, and lanes that leave early; then they meet to vote."""
        text = """
        mov.b32 %z, 0; and.b32 %r1, %a, 31; setp.eq.u32 %p1, %r1, 5; mov.b32 %r2, %r1;
        @%p1 bra DONE;
        LOOP: setp.eq.u32 %p2, %r2, 0;
        @%p2 bra DONE;
        and.b32 %r3, %r2, 1; setp.eq.u32 %p3, %r3, 0;
        @!%p3 add.s32 %z, %z, 100;
        @%p3 bra EVEN;
        add.s32 %z, %z, 1;
        bra.uni NEXT;
        EVEN: add.s32 %z, %z, 10;
        NEXT: sub.s32 %r2, %r2, 1;
        bra LOOP;
        DONE: vote.sync.ballot.b32 %r4, %p1, -1; popc.b32 %r5, %r4; add.s32 %z, %z, %r5;"""
        lanes = np.arange(32, dtype=np.uint32)
        expected = [(0 if n == 5 else (n + 1) // 2 * 101 + n // 2 * 10) + 1 for n in range(32)]
        np.testing.assert_array_equal(apply(text, lanes, out=np.uint32), expected)

    def test_code_out_of_line(self):
        """Lanes that branch past the end come back before the others may shuffle."""
        text = """
        mov.b32 %z, 1; and.b32 %r1, %a, 1; setp.eq.u32 %p1, %r1, 1;
        @%p1 bra FAR;
        NEAR: shfl.sync.bfly.b32 %z, %z, 1, 31, -1; bra.uni END;
        FAR: mov.b32 %z, 2; bra.uni NEAR;
        END: """
        lanes = np.arange(32, dtype=np.uint32)
        np.testing.assert_array_equal(apply(text, lanes, out=np.uint32), np.where(lanes % 2, 1, 2))

    @parameterized.expand([
        ("idx.b32 %z, %a, 3, 31", lambda i: 0 * i + 3), ("up.b32 %z, %a, 2, 0", lambda i: np.where(i < 2, i, i - 2)),
        ("down.b32 %z, %a, 4, 31", lambda i: np.where(i > 27, i, i + 4)), ("bfly.b32 %z, %a, 16, 31", lambda i: i ^ 16),
        ("bfly.b32 %z, %a, 2, 0x1c1f", lambda i: i ^ 2),
    ])  # fmt: skip
    def test_shuffles(self, text, source):
        lanes = np.arange(32, dtype=np.uint32)
        np.testing.assert_array_equal(apply(f"shfl.sync.{text}, -1;", lanes, out=np.uint32), source(lanes))

    def test_scoped_names_and_election(self):
        text = "{ .reg .pred P; elect.sync _|P, -1; @P bra.uni L; mov.b32 %z, 0; bra M; L: mov.b32 %z, 1; M: }" * 2
        np.testing.assert_array_equal(apply(text, WORDS[:32], out=np.uint32), np.arange(32) == 0)


def gemm(*, stages: int, late_release: bool = True, waits: bool = True, announced: int = 0) -> str:
    """(64, 128 · 4) times (16, 128 · 4) by one warpgroup, and a fifth warp that loads through a ring of stages."""
    accumulators = ", ".join(f"%r{40 + i}" for i in range(8))
    release = "mbarrier.arrive.shared.b64 _, [%r7+64];"
    wait = "wgmma.wait_group.sync.aligned 0;" if waits else ""
    size = announced or 64 * 128 + 16 * 128
    products = "".join(
        f"wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {{{accumulators}}}, %d1, %d2, 1;"
        "add.s64 %d1, %d1, 2; add.s64 %d2, %d2, 2;"
        for _ in range(4)
    )
    spin = "{{ .reg .pred P; W: mbarrier.try_wait.parity.shared.b64 P, [{}], {}; @P bra.uni E; bra.uni W; E: }}"
    return kernel(f"""
    mov.u32 %r0, %tid.x; mov.b32 %r1, smem; mov.b32 %r2, 0; mov.b32 %r3, 0; mov.b32 %r4, 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    {" ".join(f"mbarrier.init.shared.b64 [%r1+{8 * i}], 1;" for i in range(stages))}
    {" ".join(f"mbarrier.init.shared.b64 [%r1+{64 + 8 * i}], 128;" for i in range(stages))}
    fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
    shr.u32 %r5, %r0, 5; setp.eq.u32 %p2, %r5, 4;
    {" ".join(f"mov.b32 %r{40 + i}, 0;" for i in range(8))}
LOOP:  // %r2 the slice of K, %r3 the stage, %r4 the parity
    shl.b32 %r6, %r3, 3; add.s32 %r7, %r1, %r6;
    mad.lo.s32 %r8, %r3, 10240, 1024; add.s32 %r8, %r8, %r1;
    @!%p2 bra CONSUMER;
    add.s32 %r9, %r7, 64; xor.b32 %r10, %r4, 1;
    {spin.format("%r9", "%r10")}
    elect.sync _|%p3, -1;
    @!%p3 bra NEXT;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r7], {size};
    shl.b32 %r11, %r2, 7; mov.b64 %d3, a; cvta.param.u64 %d3, %d3; mov.b64 %d4, b; cvta.param.u64 %d4, %d4;
    {LOAD} [%r8], [%d3, {{%r11, 0}}], [%r7];
    {LOAD} [%r8+8192], [%d4, {{%r11, 0}}], [%r7];
    bra NEXT;
CONSUMER:
    {spin.format("%r7", "%r4")}
    shr.u32 %r12, %r8, 4; cvt.u64.u32 %d1, %r12; or.b64 %d1, %d1, 4611686293305294848; add.s64 %d2, %d1, 512;
    wgmma.fence.sync.aligned;
    {products}
    wgmma.commit_group.sync.aligned;
    {wait + release if late_release else release + wait}
NEXT: add.s32 %r3, %r3, 1; setp.eq.u32 %p4, %r3, {stages}; selp.b32 %r3, 0, %r3, %p4;
    selp.b32 %r13, 1, 0, %p4; xor.b32 %r4, %r4, %r13;
    add.s32 %r2, %r2, 1; setp.ne.u32 %p5, %r2, 4;
    @%p5 bra LOOP;
    @%p2 bra END;
    ld.param.u64 %d5, [c]; mad.wide.u32 %d5, %r0, 32, %d5;
    st.global.v4.b32 [%d5], {{%r40, %r41, %r42, %r43}};
    st.global.v4.b32 [%d5+16], {{%r44, %r45, %r46, %r47}};
END: """, ".param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .u64 c", 160)  # fmt: skip


def operand(array: NDArray, memory: Memory) -> TensorMap:
    """Of (rows, k) bytes, in boxes of all rows and 128 bytes."""
    rows, k = array.shape
    return TensorMap(memory.add(array), 1, (k, rows), (k,), (128, rows), 128)


def multiply(ptx: str, seed: int = 0) -> tuple[NDArray, NDArray]:
    """What a `gemm` gives, and the right product."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-128, 128, (64, 512), dtype=np.int8), rng.integers(-128, 128, (16, 512), dtype=np.int8)
    fragments, memory = np.zeros((128, 8), np.int32), Memory()
    maps = operand(a, memory), operand(b, memory)
    run(ptx, [*maps, memory.add(fragments)], memory, block=160, dynamic_shared_bytes=1024 + 2 * 10240, seed=seed)
    thread, i = np.arange(128)[:, None], np.arange(8)[None]
    result = np.zeros((64, 16), np.int32)
    row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2)
    result[row, 2 * (thread % 4) + i % 2 + 8 * (i // 4)] = fragments
    return result, a.astype(np.int32) @ b.T.astype(np.int32)


def run(ptx: str, parameters: list, memory: Memory, *, block: int = 32, grid: int = 1, **options) -> Report:
    return launch(ptx, "k", grid=(grid,), block=(block,), parameters=parameters, memory=memory, **options)


class Pipelines(unittest.TestCase):
    @parameterized.expand([(1,), (2,)])
    @pytest.mark.quick(2)
    def test_right(self, stages):
        for seed in SEEDS:
            got, expected = multiply(gemm(stages=stages), seed)
            np.testing.assert_array_equal(got, expected)

    @pytest.mark.full
    def test_stage_released_too_early(self):
        wrong = 0
        for seed in SEEDS:
            try:
                got, expected = multiply(gemm(stages=1, late_release=False), seed)
                wrong += not np.array_equal(got, expected)
            except Fault:
                wrong += 1
        self.assertGreater(wrong, 0)

    def test_accumulators_read_too_early(self):
        with self.assertRaisesRegex(Fault, "wgmma that is not waited for"):
            multiply(gemm(stages=2, waits=False))

    def test_deadlock(self):
        """Bytes that never come."""
        with self.assertRaisesRegex(Deadlock, r"warp 0 at line .*try_wait.* waits for the mbarrier at 1024"):
            multiply(gemm(stages=2, announced=10241))


class Copies(unittest.TestCase):
    @parameterized.expand([(0,), (32,), (64,), (128,)])
    def test_swizzles(self, swizzle):
        """There and back through shared memory, over the bounds; and where the bytes lie between."""
        inner = (swizzle or 64) // 4
        x = RNG.integers(0, 2**32, (13, 40), dtype=np.uint32)
        y, seen, memory = np.zeros_like(x), np.zeros(8 * inner, np.uint32), Memory()
        source, target = (TensorMap(memory.add(t), 4, (40, 13), (160,), (inner, 8), swizzle) for t in (x, y))
        ptx = kernel(f"""
        mov.b32 %r1, smem; elect.sync _|%p1, -1;
        @!%p1 bra WAIT;
        mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], {8 * inner * 4};
        mov.b64 %d1, a; cvta.param.u64 %d1, %d1; mov.b64 %d2, b; cvta.param.u64 %d2, %d2; ld.param.u64 %d3, [c];
        {LOAD} [%r1+1024], [%d1, {{-4, 9}}], [%r1];
        WAIT: bar.warp.sync -1;
        L: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0;
        @!%p2 bra L;
        mov.u32 %r2, %laneid;
        COPY: shl.b32 %r3, %r2, 2; add.s32 %r4, %r3, %r1; ld.shared.b32 %r5, [%r4+1024];
        ld.param.u64 %d3, [c]; cvt.u64.u32 %d4, %r3; add.s64 %d3, %d3, %d4; st.global.b32 [%d3], %r5;
        add.s32 %r2, %r2, 32; setp.lt.u32 %p3, %r2, {8 * inner};
        @%p3 bra COPY;
        @!%p1 bra END;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{-4, 9}}], [%r1+1024];
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
        END: """, ".param .align 64 .b8 a[128], .param .align 64 .b8 b[128], .param .u64 c")  # fmt: skip
        run(ptx, [source, target, memory.add(seen)], memory, dynamic_shared_bytes=4096)
        box = np.zeros((8, inner), np.uint32)
        box[:4, 4:] = x[9:, : inner - 4]
        expected = np.zeros_like(x)
        expected[9:, : inner - 4] = x[9:, : inner - 4]
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(
            seen.view(np.uint8)[swizzled(np.arange(32 * inner), swizzle)], box.view(np.uint8).ravel()
        )

    def test_barrier_without_fence(self):
        with self.assertRaisesRegex(Fault, "initialized without fence.mbarrier_init"):
            multiply(gemm(stages=2).replace("fence.mbarrier_init.release.cluster;", ""))

    def test_store_without_proxy_fence(self):
        body = """
        mov.b32 %r1, smem; mov.u32 %r2, %tid.x; shl.b32 %r3, %r2, 2; add.s32 %r3, %r3, %r1; st.shared.b32 [%r3], %r2;
        {fence} bar.warp.sync -1; elect.sync _|%p1, -1;
        @!%p1 bra END;
        ld.param.u64 %d1, [c]; cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
        END: """
        for fence, right in (("fence.proxy.async.shared::cta;", True), ("", False)):
            memory, out = Memory(), np.zeros(32, np.uint32)
            ptx = kernel(body.format(fence=fence), ".param .u64 c")
            parameters = [memory.add(out)]
            if right:
                run(ptx, parameters, memory, dynamic_shared_bytes=128)
                np.testing.assert_array_equal(out, np.arange(32))
            else:
                with self.assertRaisesRegex(Fault, "without fence.proxy.async"):
                    run(ptx, parameters, memory, dynamic_shared_bytes=128)

    def test_multicast(self):
        """Each of two blocks loads half of a row for both, and tells the other when it has read it."""
        ptx = kernel("""
        mov.b32 %r1, smem; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, %tid.x; setp.ne.u32 %p1, %r3, 0;
        @%p1 bra READY;
        mbarrier.init.shared.b64 [%r1], 1; mbarrier.init.shared.b64 [%r1+8], 64;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 128; fence.mbarrier_init.release.cluster;
        READY: barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
        @%p1 bra WAIT;
        mov.b64 %d1, a; cvta.param.u64 %d1, %d1; shl.b32 %r4, %r2, 4; mov.b16 %h1, 3; shl.b32 %r5, %r2, 7;
        add.s32 %r5, %r5, %r1;
        LOAD [%r5+128], [%d1, {%r4}], [%r1], %h1;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
        @!%p2 bra WAIT;
        shl.b32 %r7, %r3, 2; and.b32 %r8, %r7, 64; add.s32 %r9, %r7, %r8; add.s32 %r9, %r9, %r1;
        ld.shared.b32 %r10, [%r9+128]; ld.param.u64 %d2, [c]; shl.b32 %r11, %r2, 7; add.s32 %r11, %r11, %r7;
        cvt.u64.u32 %d3, %r11; add.s64 %d2, %d2, %d3; st.global.b32 [%d2], %r10;
        mapa.shared::cluster.u32 %r13, %r1, 0;
        mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r13+8];
        setp.ne.u32 %p3, %r2, 0;
        @%p3 bra END;
        LAST: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+8], 0;
        @!%p2 bra LAST;
        END: """.replace("LOAD", LOAD.replace("2d", "1d") + ".multicast::cluster"), PARAMETERS)  # fmt: skip
        for seed in SEEDS:
            x, y, memory = np.arange(32, dtype=np.uint32) + 7, np.zeros((2, 32), np.uint32), Memory()
            source = TensorMap(memory.add(x), 4, (32,), (), (16,))
            parameters = [source, memory.add(y)]
            run(ptx, parameters, memory, grid=2, cluster=(2,), dynamic_shared_bytes=512, seed=seed)
            np.testing.assert_array_equal(y, np.stack([x, x]))


class Products(unittest.TestCase):
    @parameterized.expand([
        ("f32.e4m3.e4m3", "e4m3", "e4m3"), ("f32.e5m2.e4m3", "e5m2", "e4m3"), ("s32.u8.s8", "u8", "s8"),
    ])  # fmt: skip
    def test_one(self, types, lhs, rhs):
        """64 × 32 by 32 × 24, both in shared memory without a swizzle."""
        codes = [RNG.integers(0, 120, (rows, 32), dtype=np.uint8) for rows in (64, 24)]
        if types.startswith("s32"):
            codes = [RNG.integers(0, 256, x.shape, dtype=np.uint8) for x in codes]
        numbers = [products.decode(x, t) for x, t in zip(codes, (lhs, rhs), strict=True)]
        # Core matrices of 8 rows of 16 bytes: all rows of the first half of k, then those of the second.
        cores = np.concatenate([x.reshape(-1, 8, 2, 16).transpose(2, 0, 1, 3).reshape(-1) for x in codes])
        fragments, memory, scales = np.zeros((128, 12), np.uint32), Memory(), ", 1, 1" if types.startswith("f") else ""
        names = [f"%r{40 + i}" for i in range(12)]
        stores = " ".join(f"st.global.b32 [%d5+{4 * i}], {r};" for i, r in enumerate(names))
        ptx = kernel(f"""
        mov.u32 %r0, %tid.x; mov.b32 %r1, smem; mul.lo.s32 %r2, %r0, 4; ld.param.u64 %d1, [a]; mov.b32 %r3, 0;
        FILL: cvt.u64.u32 %d2, %r2; add.s64 %d3, %d1, %d2; ld.global.b32 %r4, [%d3]; add.s32 %r5, %r1, %r2;
        st.shared.b32 [%r5], %r4; add.s32 %r2, %r2, 512; setp.lt.u32 %p1, %r2, {cores.size};
        @%p1 bra FILL;
        fence.proxy.async; bar.sync 0; setp.ne.b32 %p2, %r3, 0;
        shr.u32 %r6, %r1, 4; cvt.u64.u32 %d6, %r6;
        or.b64 %d7, %d6, {(1024 >> 4) << 16 | (128 >> 4) << 32}; or.b64 %d8, %d6, {(384 >> 4) << 16 | (128 >> 4) << 32};
        add.s64 %d8, %d8, 128; wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n24k32.{types} {{{", ".join(names)}}}, %d7, %d8, %p2{scales};
        wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
        ld.param.u64 %d4, [c]; mad.wide.u32 %d5, %r0, 48, %d4; {stores}
        """, ".param .u64 a, .param .u64 c", 128)  # fmt: skip
        run(ptx, [memory.add(cores), memory.add(fragments)], memory, block=128, dynamic_shared_bytes=4096)
        thread, i = np.arange(128)[:, None], np.arange(12)[None]
        got = np.zeros((64, 24))
        row, column = 16 * (thread // 32) + thread % 32 // 4 + 8 * (i // 2 % 2), 2 * (thread % 4) + i % 2 + 8 * (i // 4)
        got[row, column] = fragments.view("i4" if types.startswith("s32") else "f4")
        np.testing.assert_allclose(got, numbers[0] @ numbers[1].T, rtol=1e-6)

    @parameterized.expand([("",), (".trans",)])
    def test_matrices(self, trans):
        """stmatrix lays out what ldmatrix reads: of each 8 × 8 matrix, lane t has two neighbours of row t / 4."""
        registers = "{%r2, %r3, %r4, %r5}"
        ptx = kernel(f"""
        mov.u32 %r0, %tid.x; mov.b32 %r1, smem; shl.b32 %r6, %r0, 4; add.s32 %r7, %r1, %r6;
        mul.lo.s32 %r8, %r0, 0x20002; add.s32 %r2, %r8, 0x10000;
        add.s32 %r3, %r2, 0x400040; add.s32 %r4, %r3, 0x400040; add.s32 %r5, %r4, 0x400040;
        stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r7], {registers}; bar.warp.sync -1;
        ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r7];
        ldmatrix.sync.aligned.m8n8.x2{trans}.shared.b16 {{%r14, %r15}}, [%r7];
        ld.param.u64 %d1, [c]; mad.wide.u32 %d1, %r0, 16, %d1; st.global.v4.b32 [%d1], {{%r10, %r11, %r12, %r13}};
        sub.s32 %r14, %r14, %r2; sub.s32 %r15, %r15, %r3; or.b32 %r14, %r14, %r15; setp.eq.u32 %p1, %r14, 0;
        @!%p1 trap;
        """, ".param .u64 c")  # fmt: skip
        out, memory = np.zeros((4, 8, 8), np.uint16), Memory()
        run(ptx, [memory.add(out)], memory, dynamic_shared_bytes=512)
        expected = np.arange(256).reshape(4, 8, 8)
        np.testing.assert_array_equal(out, expected.transpose(0, 2, 1) if trans else expected)


class Mistakes(unittest.TestCase):
    @parameterized.expand([
        ("out of bounds", "st.global.b32 [%d1+4], %r0;"), ("misaligned", "st.global.b16 [%d1+1], %h0;"),
        ("out of bounds", "st.shared.b32 [%r1+64], %r0;"), ("no mbarrier", "mbarrier.arrive.shared.b64 _, [%r1];"),
        ("3 arrivals", "@%p1 mbarrier.init.shared.b64 [%r1], 2; @%p1 mbarrier.arrive.shared.b64 _, [%r1], 3;"),
        ("a store to an mbarrier", "@%p1 mbarrier.init.shared.b64 [%r1], 1; st.shared.b8 [%r1+3], %h0;"),
        ("rank 1", "mapa.shared::cluster.u32 %r2, %r1, 1;"), ("gives up", "trap;"),
    ])  # fmt: skip
    def test_faults(self, message, text):
        out, memory = np.zeros(1, np.uint32), Memory()
        ptx = kernel(f"ld.param.u64 %d1, [c]; mov.b32 %r1, smem; elect.sync _|%p1, -1; {text}", ".param .u64 c")
        with self.assertRaisesRegex(Fault, message):
            run(ptx, [memory.add(out)], memory, dynamic_shared_bytes=64)

    def test_barriers_of_different_sizes(self):
        ptx = kernel(
            "mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 32; selp.b32 %r1, 64, 96, %p1; bar.sync 1, %r1;", threads=64
        )
        with self.assertRaisesRegex(Fault, "others expect"):
            run(ptx, [], Memory(), block=64)

    def test_exchange_through_a_barrier(self):
        """Right with the barrier in every order of warps; wrong without it in some."""
        body = """
        mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.b32 %r2, smem; add.s32 %r3, %r2, %r1; st.shared.b32 [%r3], %r0;
        {barrier} xor.b32 %r4, %r1, 128; add.s32 %r5, %r2, %r4; ld.shared.b32 %r6, [%r5];
        ld.param.u64 %d1, [c]; cvt.u64.u32 %d2, %r1; add.s64 %d1, %d1, %d2; st.global.b32 [%d1], %r6;"""
        for barrier in ("bar.sync 1, 64;", ""):
            ptx, right = kernel(body.format(barrier=barrier), ".param .u64 c", 64), []
            for seed in SEEDS:
                out, memory = np.zeros(64, np.uint32), Memory()
                run(ptx, [memory.add(out)], memory, block=64, dynamic_shared_bytes=256, seed=seed)
                right.append(np.array_equal(out, np.arange(64) ^ 32))
            self.assertEqual(all(right), bool(barrier))


REGISTRY = "cutlass.operators.providers.cutedsl.gemm.implementations.sm90_static_persistent_impl"
HAS_REGISTRY = bool(importlib.util.find_spec("cutlass") and importlib.util.find_spec("cutlass.operators"))


@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the registry itself uses
@unittest.skipUnless(HAS_REGISTRY, "nvidia-cutlass-dsl or nvidia-cutlass-operators is not installed")
class Registry(unittest.TestCase):
    """NVIDIA's own Hopper kernel: host code and all, over bounds, in clusters, with several tiles for a block."""

    @parameterized.expand([
        (torch.int8, torch.int32, (128, 128), (1, 1), (200, 384, 512)),
        (torch.int8, torch.int32, (64, 64), (2, 1), (130, 192, 256)),
        (torch.float8_e4m3fn, torch.bfloat16, (128, 128), (1, 1), (250, 128, 256)),
        (torch.float8_e4m3fn, torch.float32, (128, 256), (2, 2), (250, 608, 256)),
        (torch.float16, torch.float32, (64, 128), (1, 1), (65, 128, 96)),
    ])  # fmt: skip
    @pytest.mark.full
    def test_gemm(self, dtype, out_dtype, tile, cluster, sizes):
        m, n, k = sizes
        lhs, rhs = (torch.randn(1, rows, k).mul(20).to(dtype) for rows in (m, n))
        out = torch.full((1, m, n), -1, dtype=out_dtype)
        exact = lhs.double() @ rhs.double().mT
        host = registry_gemm(dtype, out_dtype, tile, cluster)
        for host.seed in range(2):
            host(lhs, rhs.mT, out)
            if dtype == torch.int8:
                self.assertTrue(torch.equal(out.double(), exact))
            else:
                torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-5 * float(exact.abs().max()))


def registry_gemm(dtype: torch.dtype, out_dtype: torch.dtype, tile: tuple[int, int], cluster: tuple[int, int]) -> Host:
    import cutlass  # pyright: ignore[reportMissingImports]
    from cutlass import cute  # pyright: ignore[reportMissingImports]

    types = {torch.int8: cutlass.Int8, torch.int32: cutlass.Int32, torch.float8_e4m3fn: cutlass.Float8E4M3FN}
    types |= {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16, torch.float32: cutlass.Float32}

    def matrix(of: torch.dtype, inner: int):
        strides = [cute.sym_int64(divisibility=16) for _ in range(3)]
        strides[inner] = 1
        shape = (1, cute.sym_int(), cute.sym_int())
        return cute.runtime.make_fake_tensor(types[of], shape, tuple(strides), assumed_align=16)

    accumulates = types[torch.int32 if dtype == torch.int8 else torch.float32]
    kernel = importlib.import_module(REGISTRY).Sm90StaticPersistentGemmKernel(accumulates, tile, cluster)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    arguments = matrix(dtype, 2), matrix(dtype, 1), matrix(out_dtype, 2), 2, stream
    with tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch sm_90a --enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        return Host(cute.compile(kernel, *arguments, options=options))
