"""Scales in 16 bits, in two levels, with offsets, and codes in planes: against numpy, a block after the other."""

import copy
import io
import unittest
import warnings

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import Quantizer, formats
from hop.numerics.formats import E4M3, INT3, INT5, INT6, INT8, UINT2, UINT4, UINT5, UINT6, Codebook, Float, Integer
from hop.numerics.layouts import Decoded, Planes, Tiled
from hop.numerics.scale_rules import StoredScales
from hop.numerics.stored_scales import E2M1_DOUBLED, E8M0_HALF
from hop.tensor.buffers import operators as leaves
from tests.numerics.test_quantizer import KINDS, generator

E3M2 = Float("e3m2", 6, torch.uint8, exponent_bits=3, mantissa_bits=2, bias=3, largest=0x1F)
THIRDS = Codebook("thirds", 3, torch.uint8, tuple(n / 3 for n in range(-4, 4)))
# A quantizer, and the bits of an element in rows of 256, scales included.
CASES = {
    "float16": (Quantizer(formats.INT4, (1, 32), StoredScales()), 4.5),
    "bfloat16": (Quantizer(INT8, (1, -1), StoredScales(torch.bfloat16)), 8 + 16 / 256),
    "offset": (Quantizer(UINT4, (1, 32), StoredScales(offset=True)), 5.0),
    "planes": (Quantizer(INT5, (1, 32), StoredScales(), layout=Planes()), 5.5),
    "planes_offset": (Quantizer(UINT5, (1, 32), StoredScales(torch.float32, offset=True), layout=Planes()), 7.0),
    "superblock": (Quantizer(UINT4, (1, 32), StoredScales(UINT6, (1, 256), offset=True)), 4.625),
    "superblock_signed": (Quantizer(INT6, (1, 16), StoredScales(INT8, (1, 256)), layout=Planes()), 6.5625),
    "superblock_3": (Quantizer(INT3, (1, 16), StoredScales(INT6, (1, 64)), layout=Planes()), 3.75),
    "superblock_2": (Quantizer(UINT2, (1, 16), StoredScales(UINT4, (1, -1), torch.float32, True)), 3.25),
    "coded": (Quantizer(formats.E2M1, (1, 16), StoredScales(E4M3)), 4.5),
    "divided": (Quantizer(formats.E2M1, (1, 16), StoredScales(E4M3, (1, -1), torch.float32, divided=True)), 4.625),
    "divided_half": (Quantizer(UINT4, (1, 32), StoredScales(UINT6, (1, 256), offset=True, divided=True)), 4.625),
    "floats": (Quantizer(E3M2, (1, 32), StoredScales(), layout=Planes()), 6.5),
    "codebook": (Quantizer(THIRDS, (1, 64), StoredScales(), layout=Planes()), 3.25),
}
ALL = [(name, q) for name, (q, _) in CASES.items()]
SMALL = Quantizer(UINT5, (1, 8), StoredScales(UINT6, (1, 32), offset=True), layout=Planes())


# ---- the rule, in numpy

f32 = np.float32
LARGEST = np.finfo(f32).max


def rounded(x: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """x as a float of `kind`, at most its largest."""
    return torch.from_numpy(x).clamp(max=torch.finfo(kind).max).to(kind).float().numpy()


def coded(x: np.ndarray, q: Quantizer) -> np.ndarray:
    """x, of one row, as what the rule of q stores stands for."""
    rule = q.scale
    assert isinstance(rule, StoredScales)
    if isinstance(rule.scale, torch.dtype):
        return rounded(x, rule.scale)
    numbers = np.array(rule.scale.numbers)
    units, outers = np.ones_like(x), np.ones_like(x)
    if rule.outer is not None:
        count = len(x) if rule.outer[-1] == -1 else rule.outer[-1] // q.block[-1]
        groups = [slice(i, i + count) for i in range(0, len(x), max(count, 1))]
        for group in groups:
            unit = x[group].max(keepdims=True) / f32(numbers[-1])
            if rule.divided:
                with np.errstate(divide="ignore", over="ignore"):
                    inverse = np.where(unit == 0, f32(1), f32(1) / unit)
                unit = rounded(np.maximum(inverse, f32(torch.finfo(rule.outer_dtype).tiny)), rule.outer_dtype)
            outers[group] = rounded(unit, rule.outer_dtype)
            units[group] = f32(1) / outers[group] if rule.divided else outers[group]
    found = np.zeros_like(x)
    for i, (value, unit) in enumerate(zip(x, units, strict=True)):
        wanted = f32(0) if unit == 0 else value / unit
        if np.isnan(wanted):  # all cases have an outer scale, which is NaN, or a NaN among the scales
            found[i] = np.nan
            continue
        near = np.abs(numbers - np.clip(np.float64(wanted), numbers[0], numbers[-1]))
        ties = np.flatnonzero(near == near.min())
        code = ties[np.argmin(ties_even(numbers[ties], rule.scale))]
        found[i] = f32(numbers[code]) / outers[i] if rule.divided else outers[i] * f32(numbers[code])
    return found


def ties_even(numbers: np.ndarray, format: formats.Format) -> np.ndarray:
    """0 for the number that a tie goes to, 1 for another."""
    if isinstance(format, Integer):
        return numbers % 2
    codes = torch.tensor(numbers, dtype=torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    return (codes % 2).numpy()


def expected(q: Quantizer, x: Tensor) -> np.ndarray:
    """What the numbers of a matrix are once they are quantized."""
    out = np.zeros(x.shape, f32)
    for row, result in zip(x.float().numpy(), out, strict=True):
        size = len(row) if q.block[-1] == -1 else q.block[-1]
        parts = [row[i : i + size] for i in range(0, len(row), size)]
        known = [p if np.isfinite(p).all() else np.full_like(p, np.nan) for p in parts]  # a NaN scale, for all of it
        if q.scale.has_offset():
            high = f32(q.format.max)
            with np.errstate(over="ignore"):
                spread = [min(p.max(initial=f32(0)) - p.min(initial=f32(0)), LARGEST) / high for p in known]
            offsets = coded(np.array([-p.min(initial=f32(0)) for p in known], f32) + f32(0), q)
        else:
            spread = [np.abs(p).max() / f32(q.format.max - q.format.zero) for p in known]
            offsets = np.zeros(len(parts), f32)
        scales = coded(np.array(spread, f32), q)
        at = 0
        for part, s, m in zip(parts, scales, offsets, strict=True):
            moved = part + m if q.scale.has_offset() else part
            y = np.zeros_like(part) if s == 0 else moved / s
            zero = 0 if q.scale.has_offset() else None
            numbers = decoded(q.format, y, zero) * s
            result[at : at + len(part)] = numbers - m if q.scale.has_offset() else numbers
            at += len(part)
    return out


def decoded(format: formats.Format, y: np.ndarray, zero: int | None) -> np.ndarray:
    """The numbers of the codes of y; elements have tests of their own (test_formats)."""
    own = (zero,) if zero is not None else (format.zero,) if format.is_integer else ()
    return format.decode(format.encode(torch.from_numpy(y), None, *own), *own).numpy()


def same(got: Tensor, want: np.ndarray, what: str) -> None:
    given = got.float().numpy()
    equal = (given.view(np.int32) == want.view(np.int32)) | (np.isnan(given) & np.isnan(want))
    assert equal.all(), f"{what}: {int((~equal).sum())} differ"


class TestValues(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(5)
    def test_bits(self, _name, q):
        for seed, (kind, make) in enumerate(KINDS.items()):
            x = make((6, 300), generator(seed))
            with np.errstate(all="ignore"):
                want = expected(q, x)
            t = hop.quantize(q, x)
            same(hop.dequantize(t), want, kind)
            same(hop.fake_quantize(q, x), want, kind)
            reference = q.quantize(x)
            for n, b in t.buffers().items():
                if n != "scale":
                    torch.testing.assert_close(b.view(-1), reference[n].view(-1), rtol=0, atol=0, equal_nan=True)
            same(q.dequantize(reference, x.shape), want, kind)

    @parameterized.expand([(name, q, bits) for name, (q, bits) in CASES.items()])
    def test_bits_of_an_element(self, _name, q, bits):
        t = hop.quantize(q, torch.randn(8, 256))
        assert 8 * t.nbytes == bits * t.numel()

    @parameterized.expand(ALL)
    @pytest.mark.quick(3)
    def test_shapes(self, _name, q):
        for shape in [(7,), (1,), (2, 3, 5, 34), (0,), (3, 0), (0, 32), (129, 2), (2, 2, 300)]:
            x = torch.randn(shape, generator=generator())
            t = hop.quantize(q, x)
            assert torch.equal(hop.dequantize(t), hop.fake_quantize(q, x))
            made = list(t.buffers().values())
            reference = leaves.dequantize_buffers.reference(str(q), made, t.usages, shape, torch.float32)
            assert torch.equal(reference, hop.dequantize(t))
            if 0 not in shape:
                same(hop.dequantize(t).reshape(-1, shape[-1]), expected(q, x.reshape(-1, shape[-1])), str(shape))

    @parameterized.expand(ALL)
    def test_text(self, _name, q):
        assert Quantizer.parse(str(q)) == q and hash(Quantizer.parse(str(q))) == hash(q)

    def test_scales_of_columns(self):
        """Blocks and superblocks along the first dimension are those of the transposed matrix."""
        rule = StoredScales(UINT6, (1, 64), offset=True)
        x = torch.randn(200, 12, generator=generator())
        down = Quantizer(UINT4, (16, 1), StoredScales(UINT6, (64, 1), offset=True))
        across = Quantizer(UINT4, (1, 16), rule)
        assert torch.equal(hop.fake_quantize(down, x), hop.fake_quantize(across, x.t().contiguous()).t())
        assert across.transposed(2) == down


class TestPlanes(unittest.TestCase):
    @parameterized.expand([(f.name, f) for f in (INT3, INT5, UINT5, INT6, UINT6)])
    def test_every_code(self, _name, format):
        """In any place of a byte; the bits of both planes are those of the code."""
        codes = torch.arange(format.low, format.high + 1).repeat(3)[: 3 * 2**format.bits - 5].to(format.dtype)
        low = {3: 2, 5: 4, 6: 4}[format.bits]
        held, additional = Planes().arrange(codes, format), Planes().additional(codes, format)
        bits = codes.numpy().astype(np.int64) & (2**format.bits - 1)
        for plane, width, part in (
            (held, low, bits % 2**low),
            (additional["high_codes"], format.bits - low, bits >> low),
        ):
            per_byte = 8 // width
            part = np.append(part, [0] * (-len(part) % per_byte)).reshape(-1, per_byte)
            want = sum(part[:, i] << (width * i) for i in range(per_byte))
            assert (plane.numpy() == want).all()
        assert torch.equal(Planes().restore(held, codes.shape, format, additional), codes)

    @parameterized.expand([("",), ("tiles",), ("values",)])
    def test_floats_that_no_product_reads_are_packed(self, layout):
        """Not by itself; into tiles and bfloat16 where they are asked for."""
        q = Quantizer(E2M1_DOUBLED, (1, 32), StoredScales(E8M0_HALF))
        plain = hop.quantize(q, torch.randn(5, 64, generator=generator()))
        wanted = {"": None, "tiles": Tiled(), "values": Decoded()}[layout]
        packed = hop.pack(plain, wanted)
        assert packed.quantizer.layout == wanted
        assert torch.equal(hop.dequantize(packed), hop.dequantize(plain))

    @parameterized.expand([(name, q) for name, q in ALL if q.layout is not None])
    def test_pack(self, _name, q):
        """Packing changes no number, and unpacking gives the plain form back."""
        x = torch.randn(5, 300, generator=generator())
        plain = hop.quantize(q.plain, x)
        packed = hop.pack(plain, Planes())
        assert packed.quantizer == q and torch.equal(hop.dequantize(packed), hop.dequantize(plain))
        for name, buffer in hop.quantize(q, x).buffers().items():
            assert torch.equal(buffer, packed.buffers()[name]), name
        back = hop.unpack(packed)
        assert back.quantizer == q.plain and torch.equal(back.codes, plain.codes)


class TestTensors(unittest.TestCase):
    """What holds for every quantized tensor."""

    def setUp(self):
        self.x = torch.randn(6, 512, generator=generator())

    def made(self, name: str) -> hop.QuantizedTensor:
        return hop.quantize(CASES[name][0], self.x)

    @parameterized.expand(ALL)
    def test_views(self, name, _q):
        t, d = self.made(name), hop.dequantize(self.made(name))
        views = {
            "rows": lambda v: v[1:4],
            "columns": lambda v: v[:, 256:],
            "a row": lambda v: v[2],
            "reshaped": lambda v: v.reshape(2, 3, 512),
            "batch": lambda v: v.unsqueeze(0),
            "joined": lambda v: torch.cat([v[:2], v[2:]]),
            "chunks": lambda v: v.chunk(3)[2],
        }
        for what, view in views.items():
            if what == "columns" and -1 in (*t.quantizer.block, *(getattr(t.quantizer.scale, "outer", None) or ())):
                continue
            got = view(t)
            assert isinstance(got, hop.QuantizedTensor), what
            assert torch.equal(hop.dequantize(got), view(d)), what

    @parameterized.expand(ALL)
    def test_copies(self, name, _q):
        t = self.made(name)
        file = io.BytesIO()
        torch.save(t, file)
        file.seek(0)
        for other in (t.clone(), copy.deepcopy(t), torch.load(file), t.to(torch.bfloat16).to(torch.float32)):
            assert other.quantizer == t.quantizer and torch.equal(hop.dequantize(other), hop.dequantize(t))
        other = torch.zeros_like(t)
        other.copy_(t)
        assert torch.equal(hop.dequantize(other), hop.dequantize(t))

    @parameterized.expand(ALL)
    def test_padding(self, name, q):
        """Zeros behind: in a block of their own, or in one that they complete, they are zeros or a plain tensor's."""
        t = hop.quantize(q, self.x[:, :300])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of those that are dequantized
            padded = torch.nn.functional.pad(t, (0, 212))
        assert isinstance(padded, hop.QuantizedTensor) != q.scale.has_offset()
        numbers = hop.dequantize(padded) if isinstance(padded, hop.QuantizedTensor) else padded
        assert torch.equal(numbers, torch.nn.functional.pad(hop.dequantize(t), (0, 212)))

    @parameterized.expand(ALL)
    def test_gradient(self, _name, q):
        """Of fake_quantize: one where the code was not clipped, and nothing elsewhere."""
        x = self.x.clone().requires_grad_()
        y = hop.fake_quantize(q, x)
        y.backward(torch.full_like(y, 3.0))
        _, (tensors, units) = q.find(self.x)
        own = q._zero(tensors)
        inside = q.format.inside(units, *own).reshape(self.x.shape)
        assert torch.equal(x.grad, torch.where(inside, 3.0, 0.0)) and inside.float().mean() > 0.9


class TestProducts(unittest.TestCase):
    @parameterized.expand(ALL)
    @pytest.mark.quick(6)
    def test_linear(self, _name, q):
        """Beside floats and beside codes, eager and compiled: within float32's rounding of the product in float64."""
        w = hop.quantize(q, torch.randn(9, 256, generator=generator()))
        x = torch.randn(4, 256, generator=generator(1))
        codes = hop.quantize(hop.presets.INT8_ROW, x)
        for lhs in (x, codes) if q.format.is_integer else (x,):
            numbers = hop.dequantize(lhs) if lhs is not x else x
            want = numbers.double() @ hop.dequantize(w).double().t()
            bound = 256 * 2.0**-22 * float(want.abs().max().clamp(min=1))
            call = lambda a, b: hop.scaled(torch.ops.aten.linear.default, torch.float32, a, b)  # noqa: E731
            torch.compiler.reset()
            for run in (call, torch.compile(call, backend="aot_eager", fullgraph=True)):
                assert (run(lhs, w).double() - want).abs().max() <= bound
            assert "chosen" in hop.explain(torch.ops.aten.linear.default, torch.float32, lhs, w)

    def test_products_read_offsets(self):
        """One block for a row, where a kernel that read codes and scales alone would decline nothing."""
        q = Quantizer(UINT4, (1, -1), StoredScales(offset=True))
        w, x = hop.quantize(q, torch.rand(8, 64) + 3), torch.randn(5, 64).bfloat16()
        for lhs, dtype in ((x, torch.bfloat16), (hop.quantize(hop.presets.INT8_ROW, x), torch.bfloat16)):
            y = hop.scaled(torch.ops.aten.linear.default, dtype, lhs, w)
            numbers = hop.dequantize(lhs) if isinstance(lhs, hop.QuantizedTensor) else lhs
            want = numbers.double() @ hop.dequantize(w).double().t()
            assert (y.double() - want).abs().max() <= 2.0**-7 * want.abs().max()

    @parameterized.expand(ALL)
    def test_embedding(self, _name, q):
        w, rows = hop.quantize(q, torch.randn(9, 256, generator=generator())), torch.tensor([[3, 0], [8, 3]])
        got = hop.scaled(torch.ops.aten.embedding.default, torch.float32, w, rows)
        assert torch.equal(got, hop.dequantize(w)[rows])
