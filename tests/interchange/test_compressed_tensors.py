"""What compressed-tensors writes, read with its bits."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized

import hop
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, pack_words, random, tensors_of, unpack_words

INT = {"type": "int"}
MX = {"strategy": "group", "group_size": 32, "type": "float"}
SCHEMES: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    **{
        f"packed_{bits}_{'affine' if affine else 'symmetric'}_{strategy}_{str(dtype)[6:]}": (
            "pack-quantized",
            {"num_bits": bits, "symmetric": not affine, "strategy": strategy, **INT, **group},
            dtype,
        )
        for bits, dtype in ((4, torch.bfloat16), (8, torch.float16), (4, torch.float32), (3, torch.bfloat16))
        for affine in (False, True)
        for strategy, group in (("group", {"group_size": 32}), ("channel", {}))
    },
    "packed_2": ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 64, **INT}, torch.bfloat16),
    "packed_5": ("pack-quantized", {"num_bits": 5, "strategy": "channel", **INT}, torch.bfloat16),
    "packed_7": ("pack-quantized", {"num_bits": 7, "strategy": "channel", **INT}, torch.bfloat16),
    "int_channel": ("int-quantized", {"num_bits": 8, "strategy": "channel", **INT}, torch.bfloat16),
    "int_affine": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False, **INT}, torch.bfloat16),
    "int_tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor", **INT}, torch.float16),
    "float_channel": ("float-quantized", {"num_bits": 8, "strategy": "channel", "type": "float"}, torch.bfloat16),
    "float_tensor": ("float-quantized", {"num_bits": 8, "strategy": "tensor", "type": "float"}, torch.float32),
    "float_block": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [16, 32], "type": "float"},
        torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "type": "float"},
        torch.bfloat16,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **MX}, torch.bfloat16),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **MX}, torch.bfloat16),
}


def compressed(name: str, rows: int = 48, size: int = 128) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """The configuration, the tensors and the numbers of a weight that the package quantizes."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is missing")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    utils = pytest.importorskip("compressed_tensors.quantization.utils")
    format, args, dtype = SCHEMES[name]
    if format.startswith("mxfp"):
        args = {**args, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8}
    weights = quantization.QuantizationArgs(**args)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights)
    x = random(rows, size)
    strategy, group = args["strategy"], args.get("group_size")
    cut = {
        "tensor": lambda: x.reshape(1, -1),
        "channel": lambda: x.reshape(rows, 1, -1),
        "block": lambda: x.reshape(rows // 16, 16, size // 32, 32).transpose(1, 2).flatten(2),
    }.get(strategy, lambda: x.reshape(rows, size // (group or 1), -1))()
    low, high = cut.amin(-1), cut.amax(-1)
    state: dict[str, torch.Tensor] = {"weight": x.to(dtype)}
    if format.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([2688.0]) / x.abs().max()
        state["weight_scale"] = (
            (state["weight_global_scale"] * x.reshape(rows, -1, 16).abs().amax(-1) / 6)
            .to(torch.float8_e4m3fn)
            .to(dtype)
        )
    elif format.startswith("mxfp"):
        exponent = torch.floor(torch.log2(torch.maximum(-low, high))) - (2 if "4" in format else 8)
        state["weight_scale"] = torch.exp2(exponent).to(dtype)
    else:
        scale, zero = utils.calculate_qparams(low, high, weights)
        state["weight_scale"] = scale.to(dtype)
        if not weights.symmetric:
            state["weight_zero_point"] = zero.to(torch.int8)
    compressor = compressors.BaseCompressor.get_value_from_registry(format)
    made = compressor.compress(state, scheme)
    held = {key: value.detach() for key, value in made.items()}
    want = compressor.decompress(dict(held), scheme)["weight"]
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {k: v for k, v in args.items() if "dtype" not in k}}
        },
    }
    return config, {f"a.{key}": value for key, value in held.items()}, want


class TestCompressedTensors(InCheckpoint):
    @parameterized.expand(list(SCHEMES))
    def test_scheme(self, name):
        config, tensors, want = compressed(name)
        other = torch.arange(3.0)
        found = self.written(config, {**tensors, "a.bias": other})
        assert set(found) == {"a.weight", "a.bias"} and torch.equal(found["a.bias"], other)
        assert_bits(found["a.weight"], want)
        assert found.permutation("a.weight") is None and found.permutation("a.bias") is None

    def test_odd_sizes(self):
        """Rows and columns that fill no word."""
        for name in ("packed_4_affine_channel_bfloat16", "packed_3_affine_channel_bfloat16", "packed_5", "packed_7"):
            config, tensors, want = compressed(name, 7, 45)
            assert_bits(self.written(config, tensors)["a.weight"], want)

    def test_large(self):
        """More than is unpacked at once."""
        config, tensors, want = compressed("packed_3_symmetric_group_bfloat16", 300, 8192)
        assert_bits(self.written(config, tensors)["a.weight"], want)

    def test_sorted(self):
        """Columns whose groups are not in a row: the permutation is given. Written by an older version of the package,
        whose formula this is."""
        config, tensors, _ = compressed("packed_4_affine_group_float32")
        groups = torch.arange(128).remainder(4).to(torch.int32)
        found = self.written(config, {**tensors, "a.weight_g_idx": groups})
        order = found.permutation("a.weight")
        assert torch.equal(order, torch.argsort(groups, stable=True))
        codes = unpack_words(tensors["a.weight_packed"].numpy(), 4, 128)
        zeros = unpack_words(tensors["a.weight_zero_point"].numpy().T, 4, 48).T
        scale = tensors["a.weight_scale"].numpy()
        want = (codes - zeros[:, groups.numpy()]).astype(np.float32) * scale[:, groups.numpy()]
        numbers = hop.dequantize(found["a.weight"])[:, torch.argsort(order)]
        assert torch.equal(numbers, torch.from_numpy(want))

    def test_two_groups(self):
        """A weight is of the group of the configuration that its tensors fit."""
        config, tensors, want = compressed("packed_4_affine_group_bfloat16")
        other, more, numbers = compressed("packed_8_symmetric_channel_float16")
        groups = {"x": config["config_groups"]["group_0"], "y": other["config_groups"]["group_0"]}
        both = {**tensors, **{f"b{name[1:]}": t for name, t in more.items()}}
        found = self.written({**config, "config_groups": groups}, both)
        assert_bits(found["a.weight"], want)
        assert_bits(found["b.weight"], numbers)

    def test_expressions(self):
        """The first group with a name or an expression that matches the module, as in vLLM."""
        config, tensors, want = compressed("packed_4_affine_group_bfloat16")
        own = config["config_groups"]["group_0"]
        other = {**own, "weights": {**own["weights"], "num_bits": 8}}
        groups = {"x": {**other, "targets": ["re:b.*"]}, "y": {**own, "targets": ["re:.*[abc]$"]}}
        groups["z"] = {**other, "targets": ["a"]}
        assert_bits(self.written({**config, "config_groups": groups}, tensors)["a.weight"], want)
        groups = {"z": groups["z"], **groups}
        self.fails({**config, "config_groups": groups}, tensors, "must fit one of the config_groups, and fits none")
        groups = {"x": {**own, "targets": ["re:(a"]}}
        self.fails({**config, "config_groups": groups}, tensors, "a target of the config_groups cannot be matched")
        groups = {"x": {**own, "targets": ["re:a"] * 257}}
        self.fails({**config, "config_groups": groups}, tensors, "at most 256 are supported")

    @parameterized.expand([(f"{bits}_{group}", bits, group) for bits in (3, 4, 8) for group in (32, -1)])
    def test_zero_points_in_bytes(self, _name, bits, group):
        """As versions of the package before 0.9 write them: int8 in the shape of scales."""
        rng, middle = np.random.default_rng(bits), 2 ** (bits - 1)
        codes, count = rng.integers(0, 2**bits, (48, 128)), 1 if group == -1 else 4
        zeros = rng.integers(-middle, middle, (48, count))
        scale = torch.from_numpy(rng.random((48, count), np.float32)).to(torch.bfloat16)
        tensors = tensors_of("a.", weight_packed=pack_words(codes, bits), weight_zero_point=zeros.astype(np.int8))
        tensors |= {"a.weight_scale": scale, "a.weight_shape": torch.tensor([48, 128])}
        args = {"num_bits": bits, "type": "int", "symmetric": False}
        args |= {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
        groups = {"g": {"targets": ["Linear"], "weights": args}}
        config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
        steps = torch.from_numpy(codes - middle - zeros.repeat(128 // count, 1)).to(torch.bfloat16)
        want = steps * scale.repeat_interleave(128 // count, 1)
        assert_bits(self.written(config, tensors)["a.weight"], want)
        zero = tensors["a.weight_zero_point"]
        if bits < 8:
            self.fails(config, {**tensors, "a.weight_zero_point": zero * 0 + middle}, f"from {middle} to {middle}")
        self.fails(config, {**tensors, "a.weight_zero_point": zero[1:]}, "'weight_zero_point' has shape (47, ")

    def test_many_groups_and_weights(self):
        """Weights are looked up in the groups: the time is that of both, not of each by each."""
        names = [f"layer.{i}" for i in range(500)]
        weight = torch.ones(1, 32, dtype=torch.int8)
        tensors = {
            f"{name}.{end}": t.clone()
            for name in names
            for end, t in (("weight", weight), ("weight_scale", weight[:, :1].float()))
        }
        args = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        groups = {"g": {"targets": [f"other.{i}" for i in range(200_000)] + names, "weights": args}}
        found = self.written({"quant_method": "compressed-tensors", "config_groups": groups}, tensors)
        start = time.process_time()
        assert len(dict(found)) == 500
        assert time.process_time() - start < 2  # 500 times 200,000 comparisons of names take 5 seconds
        groups = {str(i): {"targets": ["Linear"], "weights": args} for i in range(257)}
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
        self.fails(config, {"a": weight}, "at most 256 are supported")

    def test_wrong(self):
        config, tensors, _ = compressed("packed_4_affine_group_bfloat16")
        for change, message in (
            ({"a.weight_shape": torch.tensor([48, 2**40])}, "'weight_shape' says (48, 1099511627776)"),
            ({"a.weight_shape": torch.tensor([47, 128])}, "'weight_shape' says (47, 128)"),
            ({"a.weight_shape": torch.tensor([48, -1])}, "'weight_shape' says (48, -1)"),
            ({"a.weight_scale": torch.ones(48, 5)}, "must fit one of the config_groups, and fits none"),
            ({"a.weight_scale": torch.ones(48, 4, dtype=torch.int32)}, "'weight_scale' is torch.int32"),
            ({"a.weight_zero_point": torch.ones(5, 4, dtype=torch.int32)}, "'weight_zero_point' has shape (5, 4)"),
            ({"a.weight_packed": torch.ones(48, 16)}, "'weight_packed' is torch.float32"),
            ({"a.weight_g_idx": torch.zeros(128, dtype=torch.int32)}, "must assign 32 columns to each group"),
        ):
            self.fails(config, {**tensors, **change}, message)
            self.fails(config, {**tensors, **change}, "tensor 'a.weight'")
        self.fails(config, {k: v for k, v in tensors.items() if "shape" not in k}, "the file lacks its 'weight_shape'")
        for groups in (None, [], {"a": 3}, {"a": {"weights": {"num_bits": "4"}}}):
            self.fails({**config, "config_groups": groups}, tensors, "fits none of them")
