"""Weights written in the format of compressed-tensors: decompressed by the package to the same bits, and read again."""

import gc
import json
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized

import hop
from hop import formats, presets, scale_rules
from hop.interchange import gguf_quantizer, open_checkpoint, save_compressed_tensors
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, random
from tests.interchange.test_gguf_writing import Made

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is missing")

Q = hop.Quantizer
AFFINE = scale_rules.MinMax()
NVFP4 = Q(
    formats.E2M1,
    (1, 16),
    scale_rules.StoredScales(formats.E4M3, outer=(-1, -1), outer_dtype=torch.float32, divided=True),
)
PACKED, PLAIN, FLOATS = "pack-quantized", "int-quantized", "float-quantized"
CASES: dict[str, tuple[Any, str, str | None]] = {
    "int4_group": (presets.INT4_32, PACKED, None),
    "int4_group_128": (presets.INT4_128, PACKED, None),
    "int4_channel": (Q(formats.INT4, (1, -1)), PACKED, None),
    "int4_tensor": (Q(formats.INT4), PACKED, None),
    "uint4_group": (presets.UINT4_32_AFFINE, PACKED, None),
    "uint4_channel": (Q(formats.UINT4, (1, -1), AFFINE), PACKED, None),
    "uint4_tensor": (Q(formats.UINT4, scale=AFFINE), PLAIN, None),
    "int8_group": (Q(formats.INT8, (1, 64)), PACKED, None),
    "int8_channel_packed": (presets.INT8_ROW, PACKED, PACKED),
    "int8_affine_packed": (presets.INT8_ROW_AFFINE, PACKED, PACKED),
    "int8_group_affine": (Q(formats.INT8, (1, 32), AFFINE), PACKED, None),
    "int8_group_plain": (Q(formats.INT8, (1, 32), AFFINE), PLAIN, PLAIN),
    "int8_channel": (presets.INT8_ROW, PLAIN, None),
    "int8_channel_affine": (presets.INT8_ROW_AFFINE, PLAIN, None),
    "int8_tensor": (presets.INT8_TENSOR, PLAIN, None),
    "int8_tensor_affine": (presets.INT8_TENSOR_AFFINE, PLAIN, PACKED),
    "int8_block": (Q(formats.INT8, (16, 32)), PLAIN, None),
    "uint8_channel": (presets.UINT8_ROW_AFFINE, PLAIN, None),
    "uint8_group": (Q(formats.UINT8, (1, 32), AFFINE), PACKED, None),
    "uint8_tensor": (presets.UINT8_TENSOR, PLAIN, None),
    "int3_group": (Q(formats.INT3, (1, 32)), PACKED, None),
    "int5_planes": (Q(formats.INT5, (1, 32), layout=hop.layouts.Planes()), PACKED, None),
    "uint6_affine": (Q(formats.UINT6, (1, -1), AFFINE, layout=hop.layouts.Planes()), PACKED, None),
    "ternary": (presets.TERNARY_ROW, PACKED, None),
    "q4_0": (gguf_quantizer("Q4_0"), PACKED, None),
    "q5_0": (gguf_quantizer("Q5_0"), PACKED, None),
    "fp8_tensor": (presets.FP8_TENSOR, FLOATS, None),
    "fp8_channel": (presets.FP8_ROW, FLOATS, None),
    "fp8_group": (presets.FP8_1X128, FLOATS, None),
    "fp8_block": (presets.FP8_128X128, FLOATS, None),
    "nvfp4": (NVFP4, "nvfp4-pack-quantized", None),
    "mxfp4": (presets.MXFP4, "mxfp4-pack-quantized", None),
    "mxfp8": (presets.MXFP8, "mxfp8-quantized", None),
}


def made(q: Any, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    """A weight in `dtype` whose scales are numbers of it, where it stores them in floats."""
    w = hop.quantize(q, random(*shape).to(dtype))
    if dtype != torch.float32 and w.scale.dtype in (torch.float32, torch.float16):
        w.scale = w.scale.to(dtype).to(w.scale.dtype)
    return w


class TestWriting(InCheckpoint):
    def decompressed(self, name: str) -> torch.Tensor:
        """What the package makes of a weight of the folder."""
        compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is missing")
        quantization = pytest.importorskip("compressed_tensors.quantization")
        config = json.loads((self.folder / "config.json").read_text())["quantization_config"]
        groups = quantization.QuantizationConfig(**config).config_groups.values()
        (scheme,) = (group for group in groups if name in group.targets)
        held: dict[str, torch.Tensor] = {}
        for file in self.folder.glob("*.safetensors"):
            held |= safetensors.load_file(file)
        state = {key.removeprefix(f"{name}."): t for key, t in held.items() if key.startswith(f"{name}.weight")}
        compressor = compressors.BaseCompressor.get_value_from_registry(scheme.format)
        assert set(state) <= set(compressor.compression_param_names(scheme)), state.keys()
        return compressor.decompress(state, scheme)["weight"]

    @parameterized.expand(
        [(f"{name}_{str(d)[6:]}", name, d) for name in CASES for d in (torch.float32, torch.bfloat16)]
    )
    @pytest.mark.quick(3)
    def test_form(self, _name, name, dtype):
        q, format, wanted = CASES[name]
        w, other = made(q, (48, 256), dtype), torch.arange(3.0)
        save_compressed_tensors(self.folder, {"a.weight": w, "a.bias": other}, integers=wanted)
        config = json.loads((self.folder / "config.json").read_text())["quantization_config"]
        assert config["format"] == config["config_groups"]["group_0"]["format"] == format
        numbers = hop.dequantize(w)
        if format.startswith(("nvfp4", "mx")):
            numbers = hop.dequantize(w, torch.bfloat16)
        got = self.decompressed("a")
        assert got.dtype == numbers.dtype and torch.equal(got, numbers)
        assert torch.equal(got.signbit(), numbers.signbit())
        found = open_checkpoint(self.folder)
        assert set(found) == {"a.weight", "a.bias"} and torch.equal(found["a.bias"], other)
        assert_bits(found["a.weight"], numbers)
        again = found["a.weight"]
        if (again.quantizer.format, again.quantizer.layout) == (w.quantizer.format, w.quantizer.layout):
            assert torch.equal(again.codes.view(torch.uint8), w.codes.view(torch.uint8))
        assert torch.equal(again.scale.to(torch.float32), w.scale.to(torch.float32).reshape(again.scale.shape))

    def test_odd_sizes(self):
        """Rows and columns that fill no word and no block; more than is written at once."""
        tensors = {
            "a.weight": made(Q(formats.UINT4, (1, -1), AFFINE), (7, 45), torch.float32),
            "b.weight": made(Q(formats.INT3, (1, -1)), (7, 45), torch.float32),
            "c.weight": made(presets.FP8_128X128, (130, 200), torch.float32),
            "d.weight": made(Q(formats.INT5, (1, -1), layout=hop.layouts.Planes()), (300, 8190), torch.float32),
            "e.weight": made(presets.INT4_128, (3, 96), torch.float32),  # a group that is the row
            "f.weight": made(presets.INT8_ROW, (1, 3), torch.float32),
        }
        save_compressed_tensors(self.folder, tensors)
        found = open_checkpoint(self.folder)
        for name, w in tensors.items():
            assert torch.equal(self.decompressed(name.rpartition(".")[0]), hop.dequantize(w)), name
            assert_bits(found[name], hop.dequantize(w))

    def test_scales_that_a_dtype_has_not(self):
        """They are written in float32, and the numbers are those of float32."""
        w = hop.quantize(presets.INT8_ROW, random(8, 64).to(torch.bfloat16))
        save_compressed_tensors(self.folder, {"a.weight": w})
        assert torch.equal(self.decompressed("a"), hop.dequantize(w, torch.float32))
        assert_bits(open_checkpoint(self.folder)["a.weight"], hop.dequantize(w, torch.float32))

    def test_many(self):
        """Several formats in several files, whose groups name the modules."""
        tensors = {f"{name}.weight": made(CASES[name][0], (32, 128), torch.bfloat16) for name in CASES}
        save_compressed_tensors(self.folder, {**tensors, "norm.weight": torch.ones(9)}, {"a": 1}, shard_size=20_000)
        held = json.loads((self.folder / "config.json").read_text())
        assert held["a"] == 1 and held["quantization_config"]["format"] == "mixed-precision"
        index = json.loads((self.folder / "model.safetensors.index.json").read_text())
        files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        assert len(files) > 3 and sorted(set(index["weight_map"].values())) == files
        assert all((self.folder / file).stat().st_size < 25_000 for file in files)
        found = open_checkpoint(self.folder)
        assert torch.equal(found["norm.weight"], torch.ones(9))
        for name in CASES:
            assert torch.equal(self.decompressed(name), hop.dequantize(found[f"{name}.weight"])), name

    def test_tiled(self):
        w = made(presets.INT8_ROW, (64, 128), torch.float32)
        save_compressed_tensors(self.folder, {"a.weight": hop.pack(w, hop.layouts.Tiled())})
        assert_bits(open_checkpoint(self.folder)["a.weight"], hop.dequantize(w))

    def test_one_at_a_time(self):
        tensors = Made(5)
        gc.disable()
        try:
            save_compressed_tensors(self.folder, tensors)
        finally:
            gc.enable()
        assert tensors.asked == 10 and len(open_checkpoint(self.folder)) == 5

    @parameterized.expand(["int4", "int8", "fp8", "mxfp8"])
    @pytest.mark.full
    def test_model(self, scheme):
        """A model of transformers, tied, which transformers decompresses by the package."""
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing")
        transformers: Any = pytest.importorskip("transformers", reason="transformers is missing")
        from tests.integrations.models import llama

        both = scheme.startswith("mx")  # weights of MX have bfloat16 in the package, which adds no float32 to them
        dtype, other = (torch.bfloat16, scheme) if both else (torch.float32, "int8")
        model = hop.quantize_(llama(tie=True).to(dtype), {"*.mlp.*": scheme, "*.self_attn.*": other, "*": None})
        save_compressed_tensors(self.folder, model)
        names = safetensors.load_file(self.folder / "model.safetensors")
        assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
        ids = torch.arange(8)[None]
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            floats = transformers.LlamaForCausalLM.from_pretrained(self.folder)
            logits = floats(ids).logits  # the package decompresses weights as they are first used
        want = {name: hop.dequantize(t) for name, t in open_checkpoint(self.folder).items() if hasattr(t, "quantizer")}
        assert len(want) == 14
        for name, numbers in want.items():
            assert torch.equal(floats.get_parameter(name), numbers), name
        again = hop.load_model(self.folder)
        assert (again(ids).logits - logits).abs().max() < (0.1 if both else 1e-4) * logits.abs().max()

    def test_refused(self):
        x = random(32, 128)
        cases: list[tuple[type[Exception], Any, str]] = [
            (ValueError, {"a.weight": hop.quantize(presets.NVFP4, x)}, "NVFP4 whose scales a float divides"),
            (ValueError, {"a.weight": hop.quantize(presets.FP8_E5M2_ROW, x)}, "and the package has integers"),
            (ValueError, {"a.weight": hop.quantize(gguf_quantizer("Q4_1"), x)}, "are not one float per block"),
            (ValueError, {"a.weight": hop.quantize(gguf_quantizer("Q6_K"), random(2, 256))}, "are not one float"),
            (ValueError, {"a.weight": hop.quantize(presets.STATE8, x)}, "flat=True"),
            (
                ValueError,
                {"a.weight": hop.quantize(presets.INT8_CONV, random(4, 3, 3, 3))},
                "the package supports matr",
            ),
            (
                ValueError,
                {"a.weight": hop.quantize(presets.INT4_32, random(4, 48))},
                "not a multiple of its groups of 32",
            ),
            (
                ValueError,
                {"a.weight": hop.quantize(presets.MXFP4, random(4, 48))},
                "not a multiple of its groups of 32",
            ),
            (ValueError, {"a.bias": hop.quantize(presets.INT8_ROW, x)}, "must be a module's weight"),
            (ValueError, {"weight": hop.quantize(presets.INT8_ROW, x)}, "must be a module's weight"),
            (ValueError, {"a": x.to(torch.complex64)}, "which safetensors lacks"),
            (
                ValueError,
                {"a.weight": hop.quantize(presets.INT8_ROW, x), "a.input_order": x[0]},
                "has permuted columns",
            ),
            (TypeError, {"a": [1]}, "must be a tensor with data"),
            (TypeError, {3: x}, "names of tensors must be text"),
            (TypeError, [x], "tensors must be a mapping or a module"),
        ]
        for error, tensors, message in cases:
            with self.assertRaisesRegex(error, message):
                save_compressed_tensors(self.folder / "new", tensors)
        for options, message in (
            ({"integers": "int"}, "integers must be one of"),
            ({"shard_size": 0}, "shard_size must be a number of bytes"),
            ({"config": {"a": x}}, "config must be what JSON has"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                save_compressed_tensors(self.folder / "new", {"a": x}, **options)
        with self.assertRaisesRegex(TypeError, "folder must be text or a Path"):
            save_compressed_tensors(3, {})
        assert not (self.folder / "new").exists()
        (self.folder / "config.json").write_text('{"model_type": "x", "quantization_config": {"a": 1}}')
        save_compressed_tensors(self.folder, {"a": x})
        assert json.loads((self.folder / "config.json").read_text())["model_type"] == "x"
        with self.assertRaisesRegex(FileExistsError, "has safetensors already"):
            save_compressed_tensors(self.folder, {"a": x})
