"""GPTQ and AWQ, packed here by their specifications, against their formulas in numpy."""

from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from parameterized import parameterized
from torch import nn

import hop
from hop.interchange import open_checkpoint, packed
from tests.interchange.checkpoint_files import InCheckpoint, assert_bits, pack_words, tensors_of, unpack_words


def interleaved(codes: np.ndarray) -> np.ndarray:
    """(N, K) codes as llm-awq stores them, (N / 4, K) int16, one code after the other.

    Row r and column k are in tile (r // 4, k // 64), whose rows of 64 codes follow one another, 4 codes to an integer.
    Within 32 columns a thread of the kernel has pairs that are 8 columns apart; it finds the even columns of its four
    pairs first, then the odd ones.
    """
    rows, size = codes.shape
    result = np.zeros((rows // 4, size), np.uint16)
    for r in range(rows):
        for k in range(size):
            tile, within = divmod(k, 64)
            half, column = divmod(within, 32)
            pair, odd = divmod(column, 2)
            thread, step = pair % 4, pair // 4
            at = 64 * (r % 4) + 32 * half + 8 * thread + 4 * odd + step  # of the 256 codes of the tile
            result[r // 4, 64 * tile + at // 4] |= codes[r, k] << (4 * (at % 4))
    return result.view(np.int16)


class Code:
    """An object whose unpickling would call a function."""

    ran: ClassVar[list[str]] = []

    def __reduce__(self):
        return (self.ran.append, ("code",))


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


class TestGPTQ(InCheckpoint):
    def made(self, bits: int, group: int, form: str, order: bool = False) -> Any:
        """A configuration, tensors, and the numbers of the weight."""
        rng, size, rows = np.random.default_rng(bits), 128, 32
        of = np.arange(size) // (size if group == -1 else group)
        groups = int(of.max()) + 1
        of = rng.permutation(of) if order else of
        codes = rng.integers(0, 2**bits, (size, rows))
        zeros = rng.integers(0 if form == "gptq_v2" else 1, 2**bits, (groups, rows))
        scales = rng.random((groups, rows)).astype(np.float16)
        want = scales[of] * (codes - zeros[of]).astype(np.float16)
        tensors = tensors_of(
            "a.",
            qweight=pack_words(codes.T, bits).T,
            qzeros=pack_words(zeros - (form == "gptq"), bits),
            scales=scales,
            g_idx=of.astype(np.int32),
        )
        config = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
        return config, tensors, torch.from_numpy(want.T.copy())

    @parameterized.expand(
        [(f"{b}_{g}_{f}", b, g, f) for b in (2, 3, 4, 8) for g in (32, -1) for f in ("gptq", "gptq_v2")]
    )
    def test_bits(self, _name, bits, group, form):
        config, tensors, want = self.made(bits, group, form)
        found = self.written(config, {**tensors, "a.bias": torch.ones(3)})
        assert set(found) == {"a.weight", "a.bias"} and found.permutation("a.weight") is None
        assert_bits(found["a.weight"], want)
        without = {name: t for name, t in tensors.items() if "g_idx" not in name}
        assert_bits(self.written(config, without)["a.weight"], want)

    def test_words(self):
        """Three words of 32 integers of 3 bits, of which two lie in two words, as AutoGPTQ packs them."""
        codes = np.random.default_rng(0).integers(0, 8, 32)
        first = sum(int(codes[j]) << 3 * j for j in range(10)) | (int(codes[10]) << 30)
        second = int(codes[10]) >> 2 | sum(int(codes[11 + j]) << (3 * j + 1) for j in range(10)) | int(codes[21]) << 31
        third = int(codes[21]) >> 1 | sum(int(codes[22 + j]) << (3 * j + 2) for j in range(10))
        words = np.array([[w & 0xFFFFFFFF for w in (first, second, third)]], dtype=np.uint32).view(np.int32)
        assert np.array_equal(pack_words(codes[None], 3), words)

    @parameterized.expand([(2,), (3,), (4,), (8,)])
    def test_act_order(self, bits):
        """Columns are sorted by group, and the permutation gives the file's order."""
        config, tensors, want = self.made(bits, 32, "gptq", order=True)
        found = self.written(config, tensors)
        w, order = found["a.weight"], found.permutation("a.weight")
        assert torch.equal(order.sort().values, torch.arange(128)) and not torch.equal(order, torch.arange(128))
        assert_bits(w, want[:, order])
        assert torch.equal(hop.dequantize(w)[:, torch.argsort(order)], want)

    def test_carry(self):
        """Zero points of 0, of which the first form stores a word less a 1 in each field."""
        config, tensors, _ = self.made(4, 32, "gptq")
        tensors["a.qzeros"] = torch.zeros_like(tensors["a.qzeros"]) - 0x11111111
        assert not self.written(config, tensors)["a.weight"].zero_point.any()

    @parameterized.expand([(f"{b}_{s}_{f}", b, s, f) for b in (2, 3, 4, 8) for s in (-1, 0) for f in (None, 1, 2)])
    def test_symmetric(self, _name, bits, shift, named):
        """The zero point of symmetric codes is the middle, or the file contradicts itself."""
        middle, form = 2 ** (bits - 1), {None: None, 1: "gptq", 2: "gptq_v2"}[named]
        config, tensors, _ = self.made(bits, 32, "gptq_v2")
        tensors["a.qzeros"] = torch.from_numpy(pack_words(np.full((4, 32), middle + shift), bits))
        codes = unpack_words(tensors["a.qweight"].T.numpy(), bits, 128).T
        want = tensors["a.scales"].repeat_interleave(32, 0) * torch.from_numpy(codes - middle).half()
        found = ("gptq", "gptq_v2")[shift + 1]
        for sym in (True, None):
            described = {**config, "sym": sym, "checkpoint_format": form}
            if form in (None, found):
                assert_bits(self.written(described, tensors)["a.weight"], want.T)
                assert_bits(
                    self.written({**config, "sym": sym, "format": form, "checkpoint_format": None}, tensors)[
                        "a.weight"
                    ],
                    want.T,
                )
            else:
                self.fails(
                    described, tensors, f"checkpoint_format is {form!r}, and 'qzeros' has {middle + shift} alone"
                )
        if form is not None:  # by the form alone where codes are not symmetric
            zero = middle + shift + (form == "gptq")
            want = tensors["a.scales"].repeat_interleave(32, 0) * torch.from_numpy(codes - zero).half()
            assert_bits(self.written({**config, "sym": False, "checkpoint_format": form}, tensors)["a.weight"], want.T)

    def test_rules_of_modules(self):
        """GPTQModel's dynamic: the first rule that matches changes fields, or leaves the module in floats."""
        (config, four, want), (_, eight, other) = self.made(4, 32, "gptq"), self.made(8, -1, "gptq")
        tensors = four | {f"model.layers.1.b{name[1:]}": t for name, t in eight.items()} | {"c.weight": torch.ones(2)}
        rules = {r"-:^c$": {}, r"+:.*\.1\..*b": {"bits": 8, "group_size": -1}, r".*b": {"bits": 2}}
        found = self.written({**config, "dynamic": rules}, tensors)
        assert_bits(found["a.weight"], want)
        assert_bits(found["model.layers.1.b.weight"], other)
        self.fails({**config, "dynamic": {"-:a": {}}}, four, "leaves it in floats, and it has codes")
        self.fails({**config, "dynamic": {"+:(a": {}}}, four, "lacks a ')'")
        self.fails({**config, "dynamic": {"+:a": 4}}, four, "must be an object")

    def test_auto_round(self):
        """Its packings are those of GPTQ, and settings by module count first."""
        _, tensors, want = self.made(4, 32, "gptq")
        described = {"quant_method": "auto-round", "bits": 8, "group_size": 64, "sym": False}
        described |= {"packing_format": "auto_round:auto_gptq", "extra_config": {"a": {"bits": 4, "group_size": 32}}}
        assert_bits(self.written(described, tensors)["a.weight"], want)
        self.fails({**described, "packing_format": "auto_round"}, tensors, "symmetric codes alone")
        middles = torch.from_numpy(pack_words(np.full((4, 32), 8), 4))
        own = {**described, "packing_format": "auto_round", "sym": True}
        codes = unpack_words(tensors["a.qweight"].T.numpy(), 4, 128).T
        want = tensors["a.scales"].repeat_interleave(32, 0) * torch.from_numpy(codes - 8).half()
        assert_bits(self.written(own, {**tensors, "a.qzeros": middles})["a.weight"], want.T)

    def test_contradictions(self):
        config, tensors, _ = self.made(4, 32, "gptq")
        for change, message in (
            ({"sym": True}, "sym is true, and 'qzeros' has values from 0 to 14"),
            ({"sym": "yes"}, "sym is 'yes', and must be true or false"),
            ({"format": "gptq_v2"}, "checkpoint_format is 'gptq' and its format 'gptq_v2'; remove the wrong one"),
            ({"format": "marlin"}, "format is 'marlin'"),
        ):
            self.fails({**config, **change}, tensors, f"tensor 'a.weight': the configuration's {message}")

    def test_wrong(self):
        config, tensors, _ = self.made(4, 32, "gptq", order=True)
        g_idx = tensors["a.g_idx"]
        for change, message in (
            ({"a.g_idx": g_idx.clamp(max=2)}, "'g_idx' must assign 32 columns to each group"),
            ({"a.g_idx": g_idx - 1}, "'g_idx' must assign 32 columns to each group"),
            ({"a.g_idx": g_idx[1:].clone()}, "'g_idx' has shape (127,)"),
            ({"a.qzeros": torch.zeros(4, 3, dtype=torch.int32)}, "'qzeros' has shape (4, 3), and must have (4, 4)"),
            ({"a.scales": torch.zeros(3, 32)}, "'scales' has shape (3, 32), and must have (4, 32)"),
            ({"a.qweight": torch.zeros(16, 32)}, "'qweight' is torch.float32"),
        ):
            self.fails(config, {**tensors, **change}, f"tensor 'a.weight': {message}")
        self.fails({**config, "bits": 5}, tensors, "bits are 5")
        self.fails({**config, "bits": None}, tensors, "bits is None")
        self.fails({**config, "group_size": 2**40}, tensors, "group_size is 1099511627776")
        self.fails({**config, "checkpoint_format": "marlin"}, tensors, "checkpoint_format is 'marlin'")
        config, tensors, _ = self.made(3, 32, "gptq")
        self.fails({**config, "meta": {"quantizer": ["gptqmodel:2.0"]}}, tensors, "save it as 'gptq_v2'")


class TestAWQ(InCheckpoint):
    @parameterized.expand([("groups", 32, True), ("whole", -1, True), ("symmetric", 64, False)])
    def test_gemm(self, _name, group, with_zeros):
        rng, size, rows = np.random.default_rng(1), 128, 40
        of = np.arange(size) // (size if group == -1 else group)
        groups = int(of.max()) + 1
        codes = rng.integers(0, 16, (size, rows))
        zeros = rng.integers(0, 16, (groups, rows)) if with_zeros else np.full((groups, rows), 8)
        scales = rng.random((groups, rows)).astype(np.float16)

        def packed(x: np.ndarray) -> np.ndarray:
            return pack_words(x.reshape(len(x), -1, 8)[:, :, AWQ_ORDER].reshape(len(x), -1), 4)

        tensors = tensors_of("a.", qweight=packed(codes), qzeros=packed(zeros), scales=scales)
        if not with_zeros:
            del tensors["a.qzeros"]
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": with_zeros}
        want = ((codes - zeros[of]).astype(np.float16) * scales[of]).T.copy()
        assert_bits(self.written(config, tensors)["a.weight"], torch.from_numpy(want))
        rounded = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 8, "group_size": 8}
        rounded["extra_config"] = {"a": {"bits": 4, "group_size": group, "sym": not with_zeros}}
        assert_bits(self.written(rounded, tensors)["a.weight"], torch.from_numpy(want))
        self.fails({**rounded, "extra_config": {}}, tensors, "bits is 8, and must be an integer from 4 to 4")
        self.fails({**config, "version": "marlin"}, tensors, "version is 'marlin', and must be 'gemm' or 'gemv'")
        message = "'qzeros' has others than 8" if with_zeros else "lacks its 'qzeros'"
        self.fails({**config, "zero_point": not with_zeros}, tensors, message)
        eights = {**tensors, "a.qzeros": torch.from_numpy(packed(np.full((groups, rows), 8)))}
        want = ((codes - 8).astype(np.float16) * scales[of]).T.copy()
        assert_bits(self.written({**config, "zero_point": False}, eights)["a.weight"], torch.from_numpy(want))
        self.fails(config, {**tensors, "a.scales": torch.ones(3, 40)}, "'scales' has shape (3, 40)")

    @parameterized.expand([("groups", 32), ("padded", 64), ("whole", -1)])
    def test_gemv(self, _name, group):
        """Rows of codes in order, and scales and zero points of each row, filled up to whole words."""
        rng, size, rows = np.random.default_rng(3), 128, 40
        of = np.arange(size) // (size if group == -1 else group)
        groups = int(of.max()) + 1
        codes, zeros = rng.integers(0, 16, (rows, size)), rng.integers(0, 16, (rows, groups))
        scales = rng.random((rows, groups)).astype(np.float16)
        fill = ((0, 0), (0, -groups % 16))
        tensors = tensors_of(
            "a.",
            qweight=pack_words(codes, 4),
            qzeros=pack_words(np.pad(zeros, fill), 4),
            scales=np.pad(scales, fill),
        )
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemv", "zero_point": True}
        want = (codes - zeros[:, of]).astype(np.float16) * scales[:, of]
        assert_bits(self.written(config, tensors)["a.weight"], torch.from_numpy(want))
        self.fails(config, {**tensors, "a.scales": tensors["a.scales"][:, 1:]}, "'scales' has shape (40, 15)")
        self.fails(config, {**tensors, "a.qzeros": tensors["a.qzeros"][:, :0]}, "and must have elements")

    def llm_awq(self, group: int, rows: int = 24, size: int = 128) -> Any:
        """A configuration, tensors, and the numbers of the weight: a fused multiply-add in float16."""
        rng = np.random.default_rng(4)
        of = np.arange(size) // (size if group == -1 else group)
        groups = int(of.max()) + 1
        codes, zeros = rng.integers(0, 16, (rows, size)), rng.integers(0, 16, (rows, groups))
        scales = rng.random((rows, groups)).astype(np.float16)
        scaled = -(scales * zeros.astype(np.float32)).astype(np.float16)
        padded = [np.pad(x, ((0, 0), (0, -groups % 8))).T for x in (scales, scaled)]
        tensors = tensors_of("a.", qweight=interleaved(codes), scales=padded[0], scaled_zeros=padded[1])
        config = {"quant_method": "awq", "bits": 4, "group_size": group, "backend": "llm-awq", "version": "gemv"}
        want = codes * scales[:, of].astype(np.float64) + scaled[:, of].astype(np.float64)
        return config, tensors, torch.from_numpy(want.astype(np.float16))

    @parameterized.expand([("groups", 32), ("padded", 64), ("whole", -1)])
    def test_llm_awq(self, _name, group):
        config, tensors, want = self.llm_awq(group)
        found = self.written(config, {**tensors, "a.bias": torch.ones(3)})
        assert set(found) == {"a.weight", "a.bias"}
        assert_bits(found["a.weight"], want)
        older = {"quant_method": "awq", "w_bit": 4, "q_group_size": group}
        assert_bits(self.written(older, tensors)["a.weight"], want)

    def test_llm_awq_of_torch_save(self):
        """The file that llm-awq itself writes, next to a config.json, has the values of the same safetensors."""
        config, tensors, want = self.llm_awq(32)
        self.written(config, {})
        file = self.folder / "w4-g32-awq-v2.pt"
        torch.save({**tensors, "a.bias": nn.Parameter(torch.ones(3))}, file)
        found = open_checkpoint(file)
        assert set(found) == {"a.weight", "a.bias"} and torch.equal(found["a.bias"], torch.ones(3))
        assert_bits(found["a.weight"], want)
        self.written(None, {})
        with self.assertRaisesRegex(ValueError, "'a.qweight' would be read as codes without their scale, 'a.scales'"):
            open_checkpoint(file)["a.qweight"]

    def test_wrong_files_of_torch_save(self):
        config, tensors, _ = self.llm_awq(32)
        self.written(config, {})
        file = self.folder / "wrong.pt"
        words = tensors["a.qweight"]
        for state, message in (
            ({"a": Code()}, r"cannot be read with torch.load\(weights_only=True\)"),
            ([words], "must have a dict of tensors by name, got 'list'"),
            ({"a": 3}, "'a' must name a plain tensor, got 3"),
            ({3: words}, "3 must name a plain tensor"),
            ({"a": words.to_sparse()}, "'a' must name a plain tensor"),
            ({"a": words.to("meta")}, "'a' must name a plain tensor"),
            ({"a": torch.ones(2, dtype=torch.complex64)}, "'a' must name a plain tensor"),
            ({"a": words.t()}, r"'a' of shape \(128, 6\) and stride \(1, 128\) must be contiguous"),
            ({"a": torch.ones(1).expand(2**40)}, r"stride \(0,\) must be contiguous"),
        ):
            torch.save(state, file)
            with self.assertRaisesRegex(ValueError, message):
                open_checkpoint(file)
        assert not Code.ran
        torch.save(tensors, file)
        content = file.read_bytes()
        for size in range(0, len(content), 97):
            file.write_bytes(content[:size])
            with self.assertRaisesRegex(ValueError, "is not a complete file of torch.save"):
                open_checkpoint(file)

    def test_llm_awq_columns(self):
        """The order of a row's first 32 columns, as the packer of llm-awq documents it."""
        pairs = [[8 * step + 2 * thread + odd for odd in (0, 1) for step in range(4)] for thread in range(4)]
        assert pairs[0] == [0, 8, 16, 24, 1, 9, 17, 25]  # 0, 1, 8, 9, 16, 17, 24, 25, even before odd places
        for at, column in enumerate(column for of in pairs for column in of):
            codes = np.zeros((4, 64), np.int64)
            codes[0, column] = 15
            words = interleaved(codes).view(np.uint16)
            assert words[0, at // 4] == 15 << (4 * (at % 4)) and np.count_nonzero(words) == 1

    def test_llm_awq_in_parts(self):
        """More rows than are unpacked at once, in parts that begin within a tile."""
        config, tensors, _ = self.llm_awq(128, rows=12, size=128)
        _, _, want = self.llm_awq(128, rows=12, size=128)
        with mock.patch.object(packed, "AT_ONCE", 5 * 128):
            assert_bits(self.written(config, tensors)["a.weight"], want)

    def test_llm_awq_wrong(self):
        config, tensors, _ = self.llm_awq(32)
        words, scales = tensors["a.qweight"], tensors["a.scales"]
        for change, message in (
            ({"a.qweight": words[:, :96]}, "'qweight' has 96 columns, and must have a multiple of 64"),
            ({"a.qweight": words.int()}, "'qweight' is torch.int32 of (6, 128), and must be torch.int16"),
            ({"a.scales": scales[:3]}, "'scales' has shape (3, 24), and must have (4 or more, 24)"),
            ({"a.scales": scales[:, :20]}, "'scales' has shape (8, 20), and must have (4 or more, 24)"),
            ({"a.scaled_zeros": scales[:4]}, "'scaled_zeros' has shape (4, 24), and must have (8, 24)"),
        ):
            self.fails(
                config, {**tensors, **{n: t.clone() for n, t in change.items()}}, f"tensor 'a.weight': {message}"
            )
        self.fails({**config, "bits": 3}, tensors, "bits is 3, and must be an integer from 4 to 4")
        self.fails({**config, "group_size": 48}, tensors, "group_size is 48, and must divide the 128 columns")
        self.fails({**config, "group_size": "x"}, tensors, "group_size is 'x'")
        self.fails(None, tensors, "'a.qweight' would be read as codes without their scale, 'a.scales'")

    def test_large(self):
        """More than is unpacked at once, in parts that begin within a word."""
        rng, size, rows = np.random.default_rng(2), 87040, 40
        codes = rng.integers(0, 16, (size, rows))
        words = (codes.reshape(size, -1, 8)[:, :, AWQ_ORDER] << (4 * np.arange(8))).sum(-1)
        scales = rng.random((size // 128, rows)).astype(np.float16)
        tensors = tensors_of("a.", qweight=words.astype(np.uint32).view(np.int32), scales=scales)
        want = (codes - 8).astype(np.float16) * scales.repeat(128, 0)
        found = self.written({"quant_method": "awq", "bits": 4, "group_size": 128}, tensors)
        assert_bits(found["a.weight"], torch.from_numpy(want.T.copy()))
