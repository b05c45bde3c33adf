"""Checkpoints with fp8 in blocks, of ModelOpt, and of bitsandbytes, against the tools or their formulas."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from hop.numerics.presets import FP8_128X128
from hop.numerics.scale_rules import BlockScaling
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, random


class TestFP8Blocks(InCheckpoint):
    @parameterized.expand([(str(d)[6:], d) for d in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu)])
    def test_transformers(self, _name, dtype):
        module = pytest.importorskip("transformers.integrations.finegrained_fp8", reason="transformers is missing")
        weight = random(256, 384).to(torch.float8_e4m3fn)
        scale = (random(2, 3).abs() * 0.01).to(torch.float32 if dtype == torch.uint8 else dtype)
        if dtype == torch.uint8:
            scale = torch.tensor([[120, 127, 130], [100, 3, 141]], dtype=torch.uint8)
        want = module.Fp8Dequantize(None)._dequantize_one(weight, scale)
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": torch.ones(3)}
        found = self.written(config, tensors)
        assert set(found) == {"a.weight", "norm.weight"}
        assert_bits(found["a.weight"], want)
        powers = dtype in (torch.uint8, torch.float8_e8m0fnu)  # other scales are any numbers, for products too
        assert found["a.weight"].quantizer == replace(FP8_128X128, scale=BlockScaling(power_of_two=powers))
        x, linear = random(5, 384, seed=3).to(want.dtype), torch.ops.aten.linear.default
        got = hop.scaled(linear, torch.float32, x, found["a.weight"])
        exact = x.to(torch.float64) @ hop.dequantize(found["a.weight"], torch.float64).t()
        assert (got - exact).abs().max() < 1e-5 * exact.abs().max()

    def test_cut_off_and_stacks(self):
        """Blocks at the edge, and experts in one tensor."""
        scale = torch.rand(3, 2, 2, generator=torch.Generator().manual_seed(1))
        weight = random(3, 130, 200).to(torch.float8_e4m3fn)
        found = self.written({"quant_method": "fp8"}, {"e.up": weight, "e.up_scale_inv": scale})
        whole = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :130, :200]
        assert_bits(found["e.up"], weight.to(torch.float32) * whole)

    def test_wrong(self):
        tensors = {"a.weight": torch.zeros(256, 256, dtype=torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(2, 3)}
        config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        self.fails(config, tensors, "tensor 'a.weight': '_scale_inv' has shape (2, 3), and must have (2, 2)")
        self.fails({**config, "weight_block_size": [0, 128]}, tensors, "weight_block_size is [0, 128]")
        self.fails(config, {**tensors, "a.weight": torch.ones(2, 2)}, "is torch.float32 of (2, 2)")


MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


class TestModelOpt(InCheckpoint):
    def test_nvfp4(self):
        """The formula of its NVFP4QTensor.dequantize."""
        rng = np.random.default_rng(4)
        packed = torch.from_numpy(rng.integers(0, 256, (32, 64), dtype=np.uint8))
        scale = random(32, 8).abs().to(torch.float8_e4m3fn)
        outer = torch.tensor(0.0123)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        raw = packed.numpy()
        codes = np.stack([raw & 15, raw >> 4], -1).reshape(32, 128)
        blocks = scale.to(torch.float32).numpy() * outer.numpy()
        want = torch.from_numpy(numbers[codes] * blocks.repeat(16, 1)).to(torch.bfloat16)
        tensors = {"a.weight": packed, "a.weight_scale": scale, "a.weight_scale_2": outer, "a.input_scale": outer + 1}
        found = self.written({"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors)
        assert set(found) == {"a.weight", "a.input_scale"}
        assert_bits(found["a.weight"], want)
        (self.folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
        assert_bits(self.written(None, tensors)["a.weight"], want)
        self.fails(None, {**tensors, "a.weight_scale": scale[1:]}, "tensor 'a.weight': 'scale' has shape (31, 8)")
        del tensors["a.weight_scale"]
        self.fails({"quant_method": "modelopt"}, tensors, "the file lacks its 'weight_scale'")

    def test_fp8(self):
        weight, scale = random(8, 16).to(torch.float8_e4m3fn), torch.tensor(0.037)
        found = self.written({"quant_method": "modelopt"}, {"a.weight": weight, "a.weight_scale": scale})
        assert_bits(found["a.weight"], (weight.to(torch.float32) * scale).to(torch.bfloat16))

    def test_other_fp8(self):
        """Scales of rows (FP8_PER_CHANNEL_PER_TOKEN), of blocks in four dimensions (FP8_PB_WO) and exponents (MXFP8),
        next to one another as in MIXED_PRECISION."""
        weight, rows, blocks = random(192, 256).to(torch.float8_e4m3fn), random(192).abs(), random(2, 1, 2, 1).abs()
        exponents = torch.from_numpy(np.random.default_rng(0).integers(100, 140, (192, 8), dtype=np.uint8))
        packed = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (32, 64), dtype=np.uint8))
        nvfp4 = {"weight": packed, "weight_scale": random(32, 8).to(torch.float8_e4m3fn)}
        nvfp4 |= {"weight_scale_2": torch.tensor(0.01)}
        tensors = {f"{name}.weight": weight.clone() for name in "abc"} | {f"d.{end}": t for end, t in nvfp4.items()}
        tensors |= {"a.weight_scale": rows, "b.weight_scale": blocks, "c.weight_scale": exponents}
        found = self.written({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, tensors)
        assert set(found) == {f"{name}.weight" for name in "abcd"}
        whole = blocks[:, 0, :, 0].repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
        powers = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        for name, scale in (("a", rows[:, None]), ("b", whole), ("c", powers)):
            assert_bits(found[f"{name}.weight"], (weight.to(torch.float32) * scale).to(torch.bfloat16))
        alone = self.written({"quant_method": "modelopt"}, {f"d.{end}": t for end, t in nvfp4.items()})
        assert torch.equal(hop.dequantize(found["d.weight"]), hop.dequantize(alone["d.weight"]))
        for scale in (torch.ones(191), torch.ones(2, 1, 3, 1), exponents[:, 1:]):
            tensors = {"a.weight": weight, "a.weight_scale": scale}
            self.fails({"quant_method": "modelopt"}, tensors, "tensor 'a.weight'")

    @parameterized.expand([("rows", 1), ("transposed", 0)])
    def test_nvfp4_of_experts(self, _name, first):
        """The formula for each expert, whose groups run along the last dimension or the one before it."""
        rng = np.random.default_rng(5)
        packed = rng.integers(0, 256, (3, 12, 32), dtype=np.uint8)
        scale = random(3, 12, 4).abs().to(torch.float8_e4m3fn)
        outer = torch.tensor([0.01, 0.03, 0.05])
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
        values = numbers[np.stack([packed & 15, packed >> 4], -1).reshape(3, 12, 64)]
        codes = torch.from_numpy(packed)
        parts = {"up": codes, "up_weight_scale": scale}
        if not first:
            parts = {name: t.transpose(1, 2).contiguous() for name, t in parts.items()}
        for stored in (outer, outer[:1], outer[0], outer.reshape(3, 1)):
            blocks = scale.float().numpy() * stored.reshape(-1, 1, 1).numpy()
            want = torch.from_numpy(values * blocks.repeat(16, 2)).to(torch.bfloat16)
            tensors = {**parts, "up_weight_scale_2": stored.clone(), "up_input_scale": torch.ones(3)}
            found = self.written(MODELOPT, {f"e.{name}": t for name, t in tensors.items()})
            assert set(found) == {"e.up", "e.up_input_scale"}
            assert_bits(found["e.up"], want if first else want.transpose(1, 2))

        def fails(message: str, **change: torch.Tensor) -> None:
            changed = {**tensors, **change}
            self.fails(MODELOPT, {f"e.{name}": t.clone() for name, t in changed.items()}, f"tensor 'e.up': {message}")

        fails("'_weight_scale' has shape", up_weight_scale=parts["up_weight_scale"][:, :2])
        fails("'_weight_scale_2' has shape (2,)", up_weight_scale_2=outer[:2])
        fails("'_weight_scale_2' is torch.float64", up_weight_scale_2=outer.double())
        fails("'' is torch.uint8 of (3, 12)", up=codes[:, :, 0])
        if not first:
            odd = {"up": parts["up"][:, :, :11], "up_weight_scale": parts["up_weight_scale"][:, :, :11]}
            fails("it has 11 columns of transposed codes", **odd)

    def test_fp8_of_experts(self):
        """A scale for all, for each expert, row or column, and exponents along either dimension."""
        weight, rng = random(3, 32, 64).to(torch.float8_e4m3fn), np.random.default_rng(0)
        scales = [torch.tensor(0.03), random(1).abs(), random(3).abs(), random(3, 1, 1).abs(), random(3, 32).abs()]
        scales += [random(3, 64).abs(), random(3, 1, 64).abs(), random(3, 32, 1).abs()]
        scales += [torch.from_numpy(rng.integers(90, 140, shape, dtype=np.uint8)) for shape in ((3, 32, 2), (3, 1, 64))]
        for scale in scales:
            whole = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale
            if scale.dim() == 2:
                whole = scale[:, :, None] if scale.shape[1] == 32 else scale[:, None]
            elif scale.shape == (3,):
                whole = scale[:, None, None]
            elif scale.dtype == torch.uint8:
                whole = whole.repeat_interleave(32, 1 if scale.shape[1] == 1 else 2)
            found = self.written(MODELOPT, {"e.up": weight, "e.up_weight_scale": scale})
            assert_bits(found["e.up"], (weight.float() * whole).to(torch.bfloat16))
        for scale in (random(3, 30), random(2), random(3, 2, 2), scales[-2][:, :, :1]):
            self.fails(MODELOPT, {"e.up": weight, "e.up_weight_scale": scale.clone()}, "tensor 'e.up'")
        square = {"e.up": weight[:, :, :32].clone(), "e.up_weight_scale": random(3, 32)}
        self.fails(MODELOPT, square, "may be of the rows or the columns of (3, 32, 32); reshape it to (3, 32, 1)")

    def test_mxfp4_of_gpt_oss(self):
        """As transformers dequantizes it."""
        module = pytest.importorskip("transformers.integrations.mxfp4", reason="transformers is missing")
        rng = np.random.default_rng(6)
        blocks = torch.from_numpy(rng.integers(0, 256, (3, 12, 2, 16), dtype=np.uint8))
        scales = torch.from_numpy(rng.integers(100, 140, (3, 12, 2), dtype=np.uint8))
        tensors = {"e.up_blocks": blocks, "e.up_scales": scales, "e.up_bias": torch.ones(3, 12)}
        found = self.written({"quant_method": "mxfp4"}, tensors)
        assert set(found) == {"e.up", "e.up_bias"}
        assert_bits(found["e.up"], module.convert_moe_packed_tensors(blocks, scales))
        for change, message in (
            ({"e.up_blocks": blocks[..., :8]}, "'_blocks' has shape (3, 12, 2, 8), and must have (3, 12, 2, 16)"),
            ({"e.up_scales": scales[:, :11]}, "'scale' has shape (3, 11, 2), and must have (3, 12, 2)"),
            ({"e.up_blocks": blocks[:, :11]}, "'_blocks' has 11 rows, and must have an even number"),
            ({"e.up_blocks": blocks[0]}, "'_blocks' is torch.uint8 of (12, 2, 16)"),
        ):
            change = {name: t.clone() for name, t in change.items()}
            self.fails({"quant_method": "mxfp4"}, {**tensors, **change}, f"tensor 'e.up': {message}")

    def test_fp8_blocks(self):
        """Scales as DeepSeek names them, for blocks of 128×128 or those of the configuration."""
        weight = random(192, 256).to(torch.float8_e4m3fn)
        for sizes, config in (((128, 128), {}), ((64, 32), {"weight_block_size": [64, 32]})):
            scale = random(-(-192 // sizes[0]), 256 // sizes[1]).abs()
            whole = scale.repeat_interleave(sizes[0], 0)[:192].repeat_interleave(sizes[1], 1)
            tensors = {"a.weight": weight, "a.weight_scale_inv": scale}
            found = self.written({"quant_method": "modelopt", "quant_algo": "FP8", **config}, tensors)
            assert set(found) == {"a.weight"}
            assert_bits(found["a.weight"], weight.to(torch.float32) * whole)
        self.fails({"quant_method": "modelopt"}, {**tensors, "a.weight_scale_inv": scale[1:]}, "tensor 'a.weight'")

    def test_codes_without_their_scale(self):
        """Never the codes alone where the file has a scale that the method does not read."""
        codes = {
            torch.float8_e4m3fn: random(8, 16).to(torch.float8_e4m3fn),
            torch.int8: torch.ones(8, 16).to(torch.int8),
        }
        packed = torch.ones(8, 16, dtype=torch.uint8)
        words = torch.ones(2, 16, dtype=torch.int32)
        for config in (None, {"quant_method": "fp8"}, {"quant_method": "gptq"}, {"quant_method": "bitsandbytes"}):
            for weight in codes.values():
                tensors = {"a.weight": weight, "a.weight_scale": torch.ones(8), "a.input_scale": torch.ones(1)}
                self.fails(config, tensors, "'a.weight' would be read as codes without their scale, 'a.weight_scale'")
        for config, tensors in (
            ({"quant_method": "bitsandbytes"}, {"weight": packed, "weight.absmax": torch.ones(4)}),
            ({"quant_method": "bitsandbytes"}, {"weight": packed, "weight.quant_state.bitsandbytes__fp4": packed[0]}),
            ({"quant_method": "gptq"}, {"weight": codes[torch.int8], "SCB": torch.ones(8)}),
            ({"quant_method": "fp8"}, {"qweight": words, "scales": torch.ones(1, 16)}),
            (None, {"gate_up_proj": codes[torch.float8_e4m3fn], "gate_up_proj_scale_inv": torch.ones(1, 1)}),
            ({"quant_method": "compressed-tensors"}, {"weight": codes[torch.int8], "weight_scale_inv": torch.ones(8)}),
        ):
            self.fails(config, {f"m.{name}": t.clone() for name, t in tensors.items()}, "codes without their scale")
        plain = {"a.weight": codes[torch.int8], "a.input_scale": torch.ones(1), "weight_scale": torch.ones(1)}
        assert torch.equal(self.written(None, plain)["a.weight"], codes[torch.int8])


CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}


class TestBitsAndBytes(InCheckpoint):
    def quantized(self, shape: tuple[int, ...], dtype: torch.dtype, nested: bool) -> Any:
        f = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is missing")
        x = random(*shape).to(dtype)
        codes, state = f.quantize_4bit(x, blocksize=64, compress_statistics=nested, quant_type="nf4")
        held = {f"a.weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        return {"a.weight": codes, **held}, f.dequantize_4bit(codes, state)

    @parameterized.expand(
        [
            (f"{str(dtype)[6:]}_{nested}_{i}", shape, dtype, nested)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
            for nested in (False, True)
            for i, shape in enumerate([(48, 128), (300, 64), (7, 192)])
        ]
    )
    def test_nf4(self, _name, shape, dtype, nested):
        tensors, want = self.quantized(shape, dtype, nested)
        found = self.written(CONFIG, {**tensors, "a.bias": torch.ones(3)})
        assert set(found) == {"a.weight", "a.bias"}
        assert_bits(found["a.weight"], want)

    @pytest.mark.full
    def test_rows_of_no_whole_blocks(self):
        """Blocks run over the flat tensor, as the package quantizes; its dequantizing on CPUs takes the scales of other
        blocks there (0.50), so that this is the formula."""
        tensors, _ = self.quantized((7, 49), torch.float32, False)
        codes = tensors["a.weight"].flatten().numpy()
        flat = np.stack([codes >> 4, codes & 15], 1).reshape(-1)[: 7 * 49]
        scales = tensors["a.weight.absmax"].numpy().repeat(64)[: 7 * 49]
        want = (tensors["a.weight.quant_map"].numpy()[flat] * scales).reshape(7, 49)
        assert_bits(self.written(CONFIG, tensors)["a.weight"], torch.from_numpy(want))

    def test_int8(self):
        f = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is missing")
        codes, amax, _ = f.int8_vectorwise_quant(random(48, 128).to(torch.float16))
        want = f.int8_vectorwise_dequant(codes, amax)
        tensors = {"a.weight": codes, "a.SCB": amax, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
        got = hop.dequantize(self.written({"quant_method": "bitsandbytes"}, tensors)["a.weight"])
        apart = (got.view(torch.int32) - want.view(torch.int32)).abs()
        assert got.dtype == want.dtype and apart.max() <= 2, apart.max()
        tensors["a.weight_format"] = torch.tensor(2, dtype=torch.uint8)
        self.fails({"quant_method": "bitsandbytes"}, tensors, "'weight_format' must be 0")

    def test_wrong(self):
        tensors, _ = self.quantized((48, 128), torch.float32, True)
        key = "a.weight.quant_state.bitsandbytes__nf4"
        state = json.loads(bytes(tensors[key].tolist()))

        def said(**change: Any) -> dict[str, torch.Tensor]:
            return {key: torch.tensor(list(json.dumps({**state, **change}).encode()), dtype=torch.uint8)}

        for change, message in (
            (said(shape=[2**39, 2**39]), "it has 3072 bytes of codes, and shape"),
            (said(shape=[48, -1]), "shape [48, -1]"),
            (said(shape="x"), "shape 'x'"),
            (said(dtype="int8"), "dtype 'int8'"),
            (said(blocksize=0), "blocksize is 0"),
            (said(blocksize=128), "'.absmax' has shape (96,), and must have (48,)"),
            (said(nested_blocksize=1), "'.nested_absmax' has shape (1,)"),
            (said(nested_offset="1"), "nested_offset '1'"),
            ({key: torch.tensor([1, 2], dtype=torch.uint8)}, "is not JSON"),
            ({"a.weight.quant_map": torch.zeros(16)}, "must be the values of NF4"),
        ):
            self.fails(CONFIG, {**tensors, **change}, message)
            self.fails(CONFIG, {**tensors, **change}, "tensor 'a.weight'")
