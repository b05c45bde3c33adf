"""Files that torchao's own flatten_tensor_state_dict writes are read with the values of torchao's dequantize."""

import json
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop.interchange import open_checkpoint
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, random, safetensors

pytest.importorskip("torchao", reason="torchao is not installed")
from torchao import quantization as ao
from torchao.prototype.mx_formats import NVFP4WeightOnlyConfig
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
from torchao.quantization.quantize_.workflows import Int4Tensor

group, row, whole = ao.PerGroup(32), ao.PerRow(), ao.PerTensor()
CONFIGS: dict[str, tuple[Any, str, tuple[int, ...]]] = {
    "int8 row": (ao.Int8WeightOnlyConfig(version=2), "int8", (1, -1)),
    "int8 tensor": (ao.Int8WeightOnlyConfig(version=2, granularity=whole), "int8", (-1, -1)),
    "int8 groups": (ao.Int8WeightOnlyConfig(version=2, granularity=group), "int8", (1, 32)),
    "int8 dynamic": (ao.Int8DynamicActivationInt8WeightConfig(version=2), "int8", (1, -1)),
    "float8": (ao.Float8WeightOnlyConfig(), "e4m3", (1, -1)),
    "8da4w": (ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4), "int4", (1, 32)),
    "nvfp4": (NVFP4WeightOnlyConfig(), "e2m1", (1, 16)),
} | {
    f"int{bits} {mapping.name.lower()}": (
        ao.IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), group, mapping),
        f"{'u' * (mapping is ao.MappingType.ASYMMETRIC and bits < 8)}int{bits}",
        (1, 32),
    )
    for bits in (1, 2, 3, 4, 5, 6, 7, 8)
    for mapping in (ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC)
}


def small_model(dtype: torch.dtype, rows: int = 48) -> nn.Sequential:
    layers = [nn.Linear(64, rows, dtype=dtype), nn.Linear(rows, 64, dtype=dtype)]
    with torch.no_grad():
        for i, layer in enumerate(layers):
            layer.weight.copy_(random(*layer.weight.shape, seed=i) + 0.5)
    return nn.Sequential(*layers)


def dequantized(weight: Tensor) -> Tensor:
    values: Any = weight
    return values.dequantize()


class TestTorchaoFiles(InCheckpoint):
    def save(self, state: dict[str, Tensor], change: Any = None) -> Any:
        tensors, metadata = flatten_tensor_state_dict(state)
        if change is not None:
            change(tensors, metadata)
        safetensors.save_file(
            {k: v.contiguous() for k, v in tensors.items()}, self.folder / "model.safetensors", metadata
        )
        return open_checkpoint(self.folder)

    # torchao's NVFP4 quantizes bfloat16 alone
    @parameterized.expand(
        [
            (name, d)
            for name in CONFIGS
            for d in (torch.bfloat16, torch.float32)
            if (name, d) != ("nvfp4", torch.float32)
        ]
    )
    def test_configurations(self, name: str, dtype: torch.dtype):
        config, format, block = CONFIGS[name]
        model = small_model(dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ao.quantize_(model, config, filter_fn=lambda module, fqn: fqn == "0")
        read = self.save(model.state_dict())
        assert set(read) == {"0.weight", "0.bias", "1.weight", "1.bias"} and "0.weight" in read
        assert_bits(read["0.weight"], dequantized(model[0].weight))
        assert (read["0.weight"].quantizer.format.name, read["0.weight"].quantizer.block) == (format, block)
        assert torch.equal(read["1.weight"], model[1].weight) and torch.equal(read["0.bias"], model[0].bias)

    @parameterized.expand(
        [
            (element, swizzled, shape)
            for element in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
            for swizzled in (False, True)
            for shape in ((48, 64), (300, 416))
        ]
    )
    def test_mx(self, element: Any, swizzled: bool, shape: tuple[int, int]):
        weight: Any = MXTensor.to_mx(random(*shape).bfloat16(), element, 32, is_swizzled_scales=swizzled)
        plain: Any = MXTensor.to_mx(random(*shape).bfloat16(), element, 32)
        assert_bits(self.save({"a.weight": weight})["a.weight"], plain.dequantize())

    @parameterized.expand([(scaled, swizzled) for scaled in (False, True) for swizzled in (False, True)])
    def test_nvfp4(self, scaled: bool, swizzled: bool):
        outer = torch.tensor(0.037) if scaled else None
        x = random(200, 96).bfloat16()
        weight: Any = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer, is_swizzled_scales=swizzled)
        assert_bits(self.save({"a.weight": weight})["a.weight"], weight.dequantize())

    def test_float8_by_blocks(self):
        weight: Any = ao.Float8Tensor.from_hp(random(256, 384).bfloat16(), granularity=ao.PerBlock([128, 128]))
        read = self.save({"a.weight": weight})["a.weight"]
        assert_bits(read, weight.dequantize())
        assert read.quantizer.block == (128, 128)

    def test_int4(self):
        """Its quantizer needs a GPU's package: codes are packed here, and decoded in float64."""
        g = torch.Generator().manual_seed(3)
        codes = torch.randint(-8, 8, (24, 64), generator=g)
        scale, zero = (random(2, 24, seed=i).bfloat16() for i in (1, 2))
        packed = (codes[:, ::2] & 15) | ((codes[:, 1::2] & 15) << 4)
        packed = packed.to(torch.uint8).view(torch.int8)
        weight: Any = Int4Tensor(packed, scale.abs(), zero, [1, 32], torch.Size((24, 64)))
        read = self.save({"a.weight": weight})["a.weight"]
        s, z = (t.double().t().repeat_interleave(32, 1) for t in (scale.abs(), zero))
        assert read.dtype == torch.bfloat16 and read.quantizer.format.name == "uint4"
        assert torch.equal(hop.dequantize(read, torch.float32), (codes * s + z).float())

    def test_shards_and_other_parameters(self):
        """Each file has the metadata of its own tensors; parameters have any name."""
        for i, file in enumerate(("a", "b")):
            weight: Any = ao.Float8Tensor.from_hp(random(16, 32, seed=i))
            tensors, metadata = flatten_tensor_state_dict({f"{file}.up_proj": weight, f"{file}.bias": torch.ones(2)})
            safetensors.save_file(tensors, self.folder / f"{file}.safetensors", metadata)
            assert_bits(open_checkpoint(self.folder)[f"{file}.up_proj"], weight.dequantize())
        (self.folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
        assert sorted(open_checkpoint(self.folder)) == ["a.bias", "a.up_proj", "b.bias", "b.up_proj"]

    def test_refused(self):
        weights: dict[str, Any] = {
            "int8": ao.Int8Tensor.from_hp(random(16, 64).bfloat16(), row),
            "intx": ao.IntxUnpackedToInt8Tensor.from_hp(random(16, 64).bfloat16(), (1, 32), torch.int4),
            "mx": MXTensor.to_mx(random(16, 64).bfloat16(), torch.float8_e4m3fn, 32, is_swizzled_scales=True),
        }

        def changed(key: str, value: Any) -> Any:
            def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
                fields = json.loads(metadata["a.weight"])
                (fields if key == "_type" else fields["_data"])[key] = value
                metadata["a.weight"] = json.dumps(fields)

            return change

        def tensor(name: str, value: Any) -> Any:
            return lambda tensors, metadata: tensors.update({f"a._weight_{name}": value})

        cases = [
            ("int8", changed("block_size", [1, 10**12]), "its block_size is [1, 1000000000000]"),
            ("int8", changed("block_size", [64]), "must be a size for each dimension of (16, 64)"),
            ("int8", changed("dtype", "int8"), "its dtype is 'int8', and must be one of"),
            ("int8", changed("_type", "Int4TilePackedTo4dTensor"), "the metadata has 'Int4TilePackedTo4dTensor'"),
            ("int8", lambda tensors, metadata: metadata.pop("a.weight"), "the metadata has None for it"),
            ("int8", tensor("scale", torch.ones(15, 1)), "'_scale' has shape (15, 1), and must have (16, 1)"),
            ("int8", tensor("zero_point", torch.full((16, 1), 300)), "'_zero_point' has values from 300 to 300"),
            ("int8", tensor("act_pre_scale", torch.ones(64)), "multiplies the layer's input"),
            ("intx", tensor("qdata", torch.full((16, 64), 8, dtype=torch.int8)), "'_qdata' has values from 8 to 8"),
            ("intx", changed("target_dtype", "int9"), "its target_dtype is 'int9', and must be int1 to int8"),
            ("intx", tensor("qdata", torch.empty((2**60, 0), dtype=torch.int8)), "and must have elements"),
            ("mx", changed("block_size", 2**40), "its block_size is 1099511627776, and must be 32"),
            ("mx", changed("elem_dtype", "float6"), "its elem_dtype is 'float6', and must be that of MXFP8"),
            ("mx", tensor("scale", torch.ones(4).to(torch.float8_e8m0fnu)), "'_scale' has 4 scales, and 16 rows of 2"),
        ]
        for name, change, message in cases:
            read = self.save({"a.weight": weights[name]}, change)
            with self.assertRaises(ValueError) as caught:
                read["a.weight"]
            assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception

    @parameterized.expand(
        [("not JSON", "[", "not"), ("not names", "[1]", "must be a list of names"), ("a text", '"a"', "list")]
    )
    def test_refused_names(self, _name: str, text: str, message: str):
        with pytest.raises(ValueError, match=message):
            self.save(
                {"a.weight": ao.Int8Tensor.from_hp(random(16, 64), row)},
                lambda tensors, metadata: metadata.update(tensor_names=text),
            )
