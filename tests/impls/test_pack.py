"""hop.pack: the layouts that kernels read faster, and products of packed operands against numpy."""

import copy
import dataclasses
import math
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import Tensor

import hop
from hop import presets
from hop.impls.pack import layout_for
from hop.interchange.gguf_types import TYPES
from hop.kernels.cpu import native
from hop.nn.weights import stored
from hop.numerics import blocks
from hop.numerics.formats import E2M1, INT4, INT8
from hop.numerics.layouts import Decoded, Summed, Tiled, sums_first
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import Static, TwoLevel
from tests.support import numerics, scaled_oracles
from tests.support.files import read_back
from tests.support.scaled_checks import (
    BOOKS,
    BOTH,
    COLUMNS,
    FLOATS,
    WEIGHTS,
    aten,
    decoded,
    generator,
    plain,
)
from tests.support.scaled_oracles import array, assert_bits, assert_buffers, f32, f64


class TestStoredScales(unittest.TestCase):
    """Weights as in GGUF files: products read them fastest as they are."""

    @parameterized.expand([(t.name, t.quantizer) for t in TYPES.values()])
    def test_a_row_in_any_batch(self, _name, q):
        """Packed or not, a row's products have the same bits alone and among others, by floats and by codes."""
        w = hop.quantize(q, torch.randn(48, 512, generator=torch.Generator().manual_seed(1)))
        packed = hop.pack(w)
        assert packed.quantizer == q
        if native.library().missing is not None:
            return  # the reference calls PyTorch's products, which promise nothing
        x = torch.randn(70, 512, generator=torch.Generator().manual_seed(2))
        rows = {str(dtype): x.to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
        for name, operand in (*rows.items(), ("row", presets.INT8_ROW), ("groups", presets.INT8_32)):
            factor = operand if isinstance(operand, Tensor) else hop.quantize(operand, x)
            dtype = operand.dtype if isinstance(operand, Tensor) else torch.float32
            want = hop.scaled(torch.ops.aten.linear.default, dtype, factor, w)
            for weight in (w, packed):
                for m in (1, 4, 17, 70):
                    got = hop.scaled(torch.ops.aten.linear.default, dtype, factor[:m], weight)
                    assert torch.equal(got, want[:m]), (name, m)


class TestPack(unittest.TestCase):
    def test_tiles_are_of_the_row_wise_copy(self):
        q = dataclasses.replace(presets.INT8_ROW, layout=Tiled())
        for usages in ("columnwise", ("rowwise", "columnwise")):
            with pytest.raises(ValueError, match=r"layout=.* is for the row-wise copy only"):
                hop.quantize(q, torch.randn(32, 64), usages=usages)

    """hop.pack: the same numbers in a form that products read fast."""

    @parameterized.expand([*presets.PRESETS, *(name for name in WEIGHTS if name not in BOOKS)])
    @pytest.mark.quick(6)
    def test_numbers(self, name):
        """Bit for bit, of any codes, also where blocks are cut off."""
        q = presets.PRESETS.get(name) or WEIGHTS[name]
        for shape in [(24, 160), (7, 33), (2, 3, 40), (5,), (1, 1), (0, 16), (3, 0)]:
            if q.block == (1, -1, -1, -1):
                shape = (4, 3, 2, 2)
            w = scaled_oracles.make(q, shape, generator(*name.encode(), *shape))
            rest = sum(b.numel() * b.element_size() for n, b in w.t.buffers().items() if n != "codes")
            for packed in (hop.pack(w.t), decoded(w.t)):
                layout = packed.quantizer.layout
                with self.subTest(f"{shape} {layout}"):
                    assert_bits(hop.dequantize(packed), w.values(), name)
                    assert (packed.shape, packed.dtype, packed.usages) == (w.t.shape, w.t.dtype, w.t.usages)
                    if isinstance(layout, Tiled):
                        rows, *summed = reversed(shape) if layout.columns else shape
                        tiles = -(-rows // 32) * -(-math.prod(summed) // 64)
                        sums = 4 * rows if layout.sums else 0
                        assert packed.nbytes == tiles * 32 * 64 * q.format.bits // 8 + rest + sums
                        assert_bits(hop.dequantize(hop.unpack(packed)), w.values(), name)
                        assert_buffers(hop.unpack(packed), q, {n: array(b) for n, b in w.t.buffers().items()})
                    elif isinstance(layout, Decoded):
                        assert packed.codes.dtype == torch.bfloat16
                        assert packed.nbytes == 2 * w.t.numel() + rest
                    else:
                        assert packed.quantizer == q
                        assert packed.nbytes == w.t.nbytes
                    if packed.quantizer.layout is None:
                        assert q.flat or q.format.name not in numerics.FLOATS

    @parameterized.expand([name for name, q in WEIGHTS.items() if q.format.is_integer and q.format.bits in (4, 8)])
    def test_sums_of_codes(self, name):
        """Those of whole rows, by each way to them; groups and convolutions have none."""
        q = WEIGHTS[name]
        w = scaled_oracles.make(q, (37, 96), generator(*name.encode())).t
        packed = hop.pack(w)
        if packed.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        columns = packed.quantizer.layout.columns
        grouped = any(size > 1 for _, block in q.stored().values() for size in block)
        assert packed.quantizer.layout.sums == (not grouped)
        if grouped:
            return
        codes = array(q.format.unpack(w.codes, 96) if q.per_byte() > 1 else w.codes).astype(np.int64)
        want = codes.sum(0 if columns else 1, keepdims=True)
        by_reference = q.packed(w.buffers(), w.shape, packed.quantizer.layout)["code_sums"]
        turned = hop.pack(w).t().code_sums.t()
        without = hop.pack(hop.pack(w, Tiled(columns)), Tiled(columns, sums=True))
        for sums in (packed.code_sums, by_reference, turned, without.code_sums, packed.clone().code_sums):
            assert sums.dtype == torch.int32
            np.testing.assert_array_equal(array(sums), want)
        assert not hasattr(hop.unpack(packed), "code_sums")

    @parameterized.expand(["INT8_ROW_AFFINE", "UINT8_TENSOR_AFFINE", "INT8_ROW"])
    def test_products_with_sums(self, name):
        """The same bits as without them, by rows with zero points and without, of weights of either layout."""
        for of_weight in (w for w, q in WEIGHTS.items() if q.format.is_integer and q.format.bits in (4, 8)):
            for m, k, n in ((1, 64, 32), (5, 200, 33), (40, 1088, 70)):
                q = WEIGHTS[of_weight]
                columns = sums_first(blocks.per_dimension(q.block, 2))
                op, shape = (aten.mm.default, (k, n)) if columns else (aten.linear.default, (n, k))
                w = scaled_oracles.make(q, shape, generator(*of_weight.encode(), m)).t
                x = hop.quantize(presets.PRESETS[name], torch.randn(m, k))
                layout = hop.pack(w).quantizer.layout
                if layout is None or not layout.sums:
                    continue
                with self.subTest(f"{of_weight} {m}x{k}x{n}"):
                    want = hop.scaled(op, torch.float32, x, hop.pack(w, Tiled(columns)))
                    assert_bits(hop.scaled(op, torch.float32, x, hop.pack(w)), array(want))

    @pytest.mark.full
    @pytest.mark.compiler
    def test_compiled_products_with_sums(self):
        x, w = (hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(s)) for s in ((5, 200), (33, 200)))
        w = hop.pack(hop.quantize(presets.INT8_ROW, w.dequantize()))

        def product(x, w):
            return hop.scaled(aten.linear.default, torch.float32, x, w)

        assert_bits(torch.compile(product, fullgraph=True)(x, w), array(product(x, w)))

    def test_sums_of_what_is_written(self):
        """Writes in place keep them those of the codes; an assigned buffer has its form."""
        w = hop.pack(hop.quantize(presets.INT8_ROW, torch.randn(40, 64)))
        if w.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        other = hop.quantize(presets.INT8_ROW, torch.randn(40, 64))
        for write in (
            lambda t: t.zero_(),
            *(lambda t, x=x: t.copy_(x) for x in (torch.ones(40, 64), other, hop.pack(other))),
        ):
            t = w.clone()
            write(t)
            assert torch.equal(t.code_sums, hop.unpack(t).codes.sum(1, keepdim=True, dtype=torch.int32))
        with pytest.raises(ValueError, match=r"code_sums must be torch.int32 of \(40, 1\)"):
            w.code_sums = torch.zeros(3, 1, dtype=torch.int32)

    @parameterized.expand(
        [(name, columns) for name in ("INT8_ROW", "UINT8_TENSOR_AFFINE") for columns in (False, True)]
    )
    def test_sums_beside_plain_codes(self, name, columns):
        """Summed: the codes of the plain form, and sums that follow them; on a CPU too, by its reference."""
        plain = hop.quantize(getattr(presets, name), torch.randn(24, 40))
        if columns:
            plain = plain.t()
        packed, along = hop.pack(plain, Summed(columns)), 0 if columns else 1
        assert torch.equal(packed.codes, plain.codes) and packed.codes.data_ptr() != plain.codes.data_ptr()
        assert packed.nbytes == plain.nbytes + 4 * 24

        def check(t, shape=plain.shape):
            assert t.code_sums.dtype == torch.int32 and t.shape == shape
            along = 0 if t.quantizer.layout.columns else 1
            assert torch.equal(t.code_sums, t.codes.sum(along, keepdim=True, dtype=torch.int32))

        other = hop.quantize(getattr(presets, name), torch.randn(24, 40))
        written = packed.clone().copy_(other.t() if columns else other)
        for t in (packed, packed.clone(), packed.detach(), written, packed.clone().zero_(), copy.deepcopy(packed)):
            check(t)
        check(packed.t(), plain.t().shape)
        assert packed.t().quantizer.layout == Summed(not columns) and torch.equal(packed.t().t().codes, packed.codes)
        assert_bits(hop.dequantize(packed), array(hop.dequantize(plain)))
        assert_bits(hop.dequantize(packed.t()), array(hop.dequantize(plain.t())))
        unpacked = hop.unpack(packed)
        assert_buffers(unpacked, plain.quantizer, {n: array(b) for n, b in plain.buffers().items()})
        assert unpacked.codes.data_ptr() != packed.codes.data_ptr()
        for view in (lambda t: t[3:5], lambda t: t[:, :16], lambda t: t.reshape(-1)):  # sums of parts are others
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*layout=hop1:Summed.* is for whole tensors only")
                viewed = view(packed)
            assert not isinstance(viewed, hop.QuantizedTensor)
            assert_bits(viewed, array(view(hop.dequantize(plain))))
        assert hop.pack(packed, Tiled(columns)).quantizer.layout == Tiled(columns)
        x = hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(5, packed.shape[along]))
        op = aten.mm.default if columns else aten.linear.default
        assert_bits(hop.scaled(op, torch.float32, x, packed), array(hop.scaled(op, torch.float32, x, plain)))

    def test_sums_beside_plain_codes_in_programs_and_files(self):
        q = dataclasses.replace(presets.INT8_ROW, layout=Summed())
        w, x = hop.quantize(q, torch.randn(24, 40)), hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(5, 40))
        want = hop.scaled(aten.linear.default, torch.float32, x, hop.unpack(w))

        def linear(x, w):
            return hop.scaled(aten.linear.default, torch.float32, x, w)

        def mm(x, w):
            return hop.scaled(aten.mm.default, torch.float32, x, w.t())

        for product in (linear, mm):
            assert_bits(torch.compile(product, fullgraph=True, backend="aot_eager")(x, w), array(want))
        turned = w.clone().t()
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "w.safetensors"))
            hop.storage.save_file({"w": w, "turned": turned}, path)
            of_file = hop.storage.load_file(path)
        for found, t in ((of_file["w"], w), (of_file["turned"], turned), (read_back({"w": w})["w"], w)):
            assert found.quantizer == t.quantizer and torch.equal(found.codes, t.codes)
            assert torch.equal(found.code_sums, t.code_sums)

    def test_what_has_no_sums_beside_it(self):
        for make, words in (
            (lambda: hop.pack(hop.quantize(presets.FP8_ROW, torch.randn(4, 8)), Summed()), "8-bit integers"),
            (lambda: hop.pack(hop.quantize(presets.INT8_ROW, torch.randn(2, 4, 8)), Summed()), "is for matrices"),
            (lambda: Summed(columns=1), "columns must be True or False"),
        ):
            with pytest.raises(ValueError, match=words):
                make()

    def test_what_packing_for_a_gpu_is(self):
        """Sums, where all of a row has one scale; a layer's where its scheme has zero points for activations."""
        for q, want in (
            (presets.INT8_ROW, Summed()),
            (presets.INT8_COLUMN, Summed(columns=True)),
            (presets.INT8_TENSOR, Summed()),
            (presets.INT8_256, None),
            (presets.INT4_32, None),
            (presets.FP8_ROW, Decoded()),
        ):
            assert layout_for(q, 2, "cuda") == want, q
        assert layout_for(presets.INT8_ROW, 3, "cuda") is None
        with mock.patch.object(stored, "layout_for", lambda q, ndim, device: layout_for(q, ndim, "cuda")):
            for scheme, want in (
                (hop.Scheme(presets.INT8_ROW_AFFINE, presets.INT8_ROW), Summed()),
                (hop.schemes.INT8_DYNAMIC, None),
                (hop.schemes.INT8_WEIGHT, None),
            ):
                layer = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), scheme)
                x = torch.randn(3, 64)
                assert layer[0].weight.quantizer.layout == want
                state = layer.state_dict()
                assert state["0.weight"].quantizer.layout is None
                again = hop.quantize_(torch.nn.Sequential(torch.nn.Linear(64, 32)), scheme)
                again.load_state_dict(state)
                assert again[0].weight.quantizer.layout == want and torch.equal(again(x), layer(x))

    def test_sums_that_are_none(self):
        """The native operator looks at them before it reads."""
        x, w = (hop.quantize(presets.INT8_ROW_AFFINE, torch.randn(s)) for s in ((3, 64), (40, 64)))
        w = hop.pack(hop.quantize(presets.INT8_ROW, w.dequantize()))
        if w.quantizer.layout is None:
            self.skipTest("needs the native kernels")
        multiply = torch.ops.hop_native.product
        words = "1 lhs int8 zero=stored scale=1,-1 rhs int8 tiled{} output float32"
        args = (x.codes, x.scale, x.zero_point, None, w.codes, None, None, None, None, None, None, 40)
        with torch.no_grad():
            want = multiply(*args, words.format(""))
            assert torch.equal(multiply(*args, words.format(" sums"), w.code_sums), want)
            for sums in (w.code_sums[:-1], w.code_sums.float(), w.code_sums.flatten(), None):
                with pytest.raises(RuntimeError, match="rhs_code_sums must"):
                    multiply(*args, words.format(" sums"), sums)
            with pytest.raises(RuntimeError, match="rhs_code_sums must be omitted, as the description has none"):
                multiply(*args, words.format(""), w.code_sums)

    @parameterized.expand([name for name, q in FLOATS.items()])
    def test_real_numbers(self, name):
        """What hop.quantize makes of numbers of ordinary sizes, with NaN and infinities."""
        q, weight = FLOATS[name], torch.randn(20, 64) * torch.exp2(torch.randint(-20, 20, (20, 1)).float())
        weight[3, 7], weight[4, 9], weight[5], weight[6, 0] = math.nan, math.inf, 0.0, -math.inf
        options = {"scale": torch.tensor(0.125)} if isinstance(q.scale, Static) else {}
        w = scaled_oracles.quantized(q, weight, **options).t
        assert_bits(hop.dequantize(hop.pack(w)), array(hop.dequantize(w)))

    @parameterized.expand(["mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_1x128"])
    def test_tiny_and_huge_blocks(self, name):
        """Every power of two as a block's scale: exact where bfloat16 has normal numbers, near below."""
        q = FLOATS[name]
        size = q.block[-1]
        magnitudes = np.exp2(np.arange(-120, 120)).astype(f32)[:, None]
        weight = torch.from_numpy((generator(5).uniform(0.5, 1, (240, size)) * magnitudes).astype(f32))
        if name == "nvfp4":
            q = Quantizer(E2M1, (1, 16), TwoLevel(outer=(1, -1)))
        w = hop.quantize(q, weight)
        before, after = array(hop.dequantize(w)).astype(f64), array(hop.dequantize(decoded(w))).astype(f64)
        outer = array(w.global_amax).astype(f64) / (6 * 448) if name == "nvfp4" else 1.0
        exact = np.abs(before) >= outer * 2.0**-117  # eight bits of a number below the least normal one, 2^-126
        assert (before == after)[exact].all()
        assert exact.mean() > 0.9
        assert (np.abs(before - after) <= outer * 2.0**-134).all()

    def test_views(self):
        """Of packed tensors whatever their unpacked form has, and more: a transposed matrix of 4-bit numbers."""
        rng = generator(1)
        for name in ("fp8_row", "fp8_128x128", "mxfp4", "nvfp4", "nvfp4_row", "mxfp8"):
            w = scaled_oracles.make(FLOATS[name], (256, 256), rng)
            packed, a = decoded(w.t), w.values()
            for view, of_array in [
                (packed.t(), a.T),
                (packed.t().t(), a),
                (packed[128:], a[128:]),
                (packed[:128, 128:], a[:128, 128:]),
                (packed.transpose(0, 1)[:128], a.T[:128]),
                (packed.unsqueeze(0), a[None]),
                (packed.expand(2, 256, 256), np.broadcast_to(a, (2, 256, 256))),
                *(
                    [(packed[3], a[3]), (packed[::2], a[::2]), (packed.view(2, 128, 256), a.reshape(2, 128, 256))]
                    if name != "fp8_128x128"
                    else []
                ),
            ]:
                with self.subTest(f"{name} {tuple(view.shape)}"):
                    assert isinstance(view, hop.QuantizedTensor)
                    assert view.quantizer.layout == Decoded()
                    assert view.codes.untyped_storage().data_ptr() == packed.codes.untyped_storage().data_ptr()
                    assert_bits(hop.dequantize(view), np.ascontiguousarray(of_array))
            x = plain((3, 128), rng, torch.bfloat16)
            for product, half, right in [
                (aten.linear.default, packed[:, :128], a[:, :128].T),
                (aten.mm.default, packed[:128].t()[128:] if name != "x" else packed, a[:128].T[128:]),
            ]:
                got = hop.scaled(product, torch.float32, x, half)
                found = scaled_oracles.ratio(got, array(x).astype(f32), right, np.matmul, 128)
                assert found <= 1, f"{name} {product}: {found}"

    @parameterized.expand(["fp8_row", "mxfp4", "nvfp4_row", "fp8_e5m2_1x128", "int4_groups_32", "int8_row_affine"])
    def test_files(self, name):
        """torch.save, torch.load and state_dict keep every bit and the layout; a copy too."""
        w = scaled_oracles.make(WEIGHTS[name], (8, 128), generator(2)).t
        packed, half = hop.pack(w), decoded(w)[:4]
        loaded = read_back({"weight": packed, "half": half})
        for got, want in [(loaded["weight"], packed), (loaded["half"], half), (packed.clone(), packed)]:
            assert_buffers(got, want.quantizer, {n: array(b) for n, b in want.buffers().items()})
            assert_bits(hop.dequantize(got), array(hop.dequantize(want)))

    @parameterized.expand([name for name, q in presets.PRESETS.items()])
    def test_spelling(self, name):
        """The quantizer of a packed tensor is read back from its text, and is not the plain one."""
        q = presets.PRESETS[name]
        shape = (4, 3, 2, 2) if q.block == (1, -1, -1, -1) else (8, 32)
        packed = hop.pack(scaled_oracles.make(q, shape, generator(3)).t)
        assert Quantizer.parse(str(packed.quantizer)) == packed.quantizer
        held = not q.flat and q.format.bits in (4, 8) and native.library().missing is None
        assert (packed.quantizer == q) == (not held)
        assert ("Tiled" in str(packed.quantizer)) == held

    def test_quantize_to_a_layout(self):
        """A quantizer with a layout makes what pack makes."""
        x = torch.randn(12, 128)
        for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row"):
            plainly = hop.quantize(FLOATS[name], x)
            q = hop.pack(plainly).quantizer
            want = {n: array(b) for n, b in hop.pack(plainly).buffers().items()}
            assert_buffers(hop.quantize(q, x), q, want, name)
            got = hop.scaled(aten.alias.default, q, plainly)
            again = hop.pack(hop.quantize(FLOATS[name], hop.dequantize(plainly)))
            assert_buffers(got, q, {n: array(b) for n, b in again.buffers().items()}, f"{name} of scaled")

    @parameterized.expand(["fp8_row", "mxfp4", "nvfp4", "int8_row_affine", "state8"])
    def test_new_memory(self, name):
        """Codes and scales of its own: to overwrite the weight leaves the packed one as it is."""
        w = scaled_oracles.make(WEIGHTS[name], (8, 64), generator(6))
        packed = hop.pack(w.t)
        for buffer in w.t.buffers().values():
            buffer.zero_()
        assert_bits(hop.dequantize(packed), w.values())

    def test_again(self):
        """To pack what is packed changes nothing, and gives a new tensor."""
        once = hop.pack(scaled_oracles.make(presets.MXFP8, (8, 64), generator(4)).t)
        twice = hop.pack(once)
        assert_buffers(twice, once.quantizer, {n: array(b) for n, b in once.buffers().items()})
        assert twice.codes.data_ptr() != once.codes.data_ptr()

    def test_errors(self):
        w = torch.randn(32, 32)
        for usages in (COLUMNS, BOTH):
            for q in (presets.MXFP8, presets.NVFP4, presets.FP8_TENSOR):
                with self.assertRaisesRegex(ValueError, f"pack: weight .*row-wise copy.*{usages[-1]}"):
                    hop.pack(hop.quantize(q, w, usages=usages))
        with self.assertRaisesRegex(TypeError, r"pack: weight must be a QuantizedTensor, got \[1.0\]"):
            hop.pack([1.0])
        for format in (INT8, INT4):
            with self.assertRaisesRegex(ValueError, f"layout=.*float formats.*{format.name}"):
                Quantizer(format, layout=Decoded())
