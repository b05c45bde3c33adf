"""Keys of GGUF metadata: all that the package gguf knows are read, without effect on the model, or refused."""

import copy
import math
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from parameterized import parameterized

from hop.interchange import open_gguf
from tests.integrations.gguf_files import MODELS, write
from tests.support.files import InFolder

pytest.importorskip("transformers", reason="transformers is missing")
gguf = pytest.importorskip("gguf", reason="the package gguf is missing")

from hop import load_model  # noqa: E402
from hop.integrations import gguf_configs, gguf_keys, gguf_models  # noqa: E402  they need transformers

VALUES = {"general.type": "adapter", "{arch}.classifier.output_labels": ["a", "b"], "{arch}.attention.causal": False}


def keys(of: Any = gguf.Keys) -> Iterator[str]:
    for name, value in vars(of).items():
        if isinstance(value, type):
            yield from keys(value)
        elif isinstance(value, str) and name.isupper():
            yield value


def named(template: str, architecture: str) -> str:
    """A key as files have it."""
    return template.format(arch=architecture, id=0, name="tool_use", dense="dense_2")


class TestTables(unittest.TestCase):
    def test_every_key(self):
        assert len(set(keys())) > 200
        for key in keys():
            found = [
                table for table in ("USED", "IRRELEVANT", "REFUSED") if gguf_keys.find(getattr(gguf_keys, table), key)
            ]
            assert found, f"{key} is in no table of gguf_keys"

    def test_every_row(self):
        """No row is of a key that does not exist."""
        for table in (gguf_keys.USED, gguf_keys.IRRELEVANT, gguf_keys.REFUSED):
            for pattern in table:
                assert any(gguf_keys.find({pattern: True}, key) for key in keys()), pattern


# Tensors that gguf lists, and that its converters do not write, or that are read into the configuration.
UNREAD = {
    "": {"blk.{}.attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short"},
    "deepseek2": {"blk.{}.attn_k", "blk.{}.attn_v"},  # of its first version
    "gptneox": {"blk.{}.attn_q", "blk.{}.attn_k", "blk.{}.attn_v"},
    "bert": {"cls", "cls.output", "output_norm", "blk.{}.attn_qkv", "blk.{}.layer_output_norm_2", "blk.{}.ffn_gate"},
}


class TestNames(unittest.TestCase):
    @parameterized.expand([(name, name) for name in gguf_models.MODELS])
    def test_every_tensor_of_the_package(self, _name, named):
        """Each name that the package gguf has for an architecture is read, and no other."""
        (arch,) = (key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == named)
        known = {gguf.TENSOR_NAMES[t].replace("{bid}", "{}") for t in gguf.MODEL_TENSORS[arch]}
        models = [gguf_models.MODELS[named], *(v[1] for n, v in gguf_models.VARIANTS.items() if n == named)]
        own = set[str]()
        for model in models:
            names = {*model.layout.names, *(part for parts in model.layout.joins for part in parts)}
            own |= {name.removesuffix(".weight").removesuffix(".bias") for name in names}
        unread = UNREAD[""] | UNREAD.get(named, set())
        assert known - own <= unread, known - own - unread
        # Some converters write the head of tied models too, and llama.cpp reads merged experts of every architecture.
        assert own - known <= {"output", "blk.{}.ffn_gate_up_exps"}, own - known


class TestFiles(InFolder):
    def written(self, model: str, **changes: Any) -> Path:
        write(MODELS[model](), self.folder / "base.gguf", "F32", **changes)
        return self.folder / "base.gguf"

    def with_key(self, file: Any, key: str, value: Any) -> Any:
        """The file, with a key more of its metadata."""
        result = copy.copy(file)
        result.metadata = file.metadata | {key: value}
        return result

    def test_used_are_read(self):
        """By the configuration of one architecture or another; those of splits by open_gguf."""
        read = set[str]()
        yarn = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 32}
        for model in MODELS:
            path = self.written(model, **(yarn if model in ("llama", "qwen3", "gemma3", "gptneox") else {}))
            name = str(open_gguf(path).metadata["general.architecture"])
            with mock.patch.object(
                gguf_keys,
                "check",
                lambda file, own, sizes, name=name: read.update(key.replace(f"{name}.", "{arch}.") for key in own),
            ):
                file = open_gguf(path)
                gguf_models.config_of(file, gguf_models.model_of(file))
        assert read - {"{arch}.rope.scale_linear"} == {key for key in gguf_keys.USED if not key.startswith("split.")}

    def test_refused(self):
        """An error that names the key, its value, the rule and the remedy."""
        count = 0
        for model in ("llama", "bert"):
            base = open_gguf(self.written(model))
            kind = gguf_models.model_of(base)
            for key in keys():
                own = named(key, model)
                if gguf_keys.find(gguf_keys.REFUSED, key) is None or own in base.metadata:
                    continue
                if (model, key) == ("llama", "{arch}.attention.key_length") or gguf_keys.find(
                    gguf_keys.IRRELEVANT, key
                ):
                    continue
                value = VALUES.get(key, 7)
                value = not value if isinstance(value, bool) and model == "bert" else value
                with self.assertRaises(ValueError, msg=own) as caught:
                    gguf_models.config_of(self.with_key(base, own, value), kind)
                message = str(caught.exception)
                assert own in message and repr(value) in message and "must be" in message, message
                assert "llama.cpp" in message and str(self.folder) in message, message
                count += 1
        assert count > 250, count

    def test_allowed(self):
        """Values that mean what the model does anyway, and keys that mean nothing for it."""
        base = open_gguf(self.written("llama"))
        kind = gguf_models.model_of(base)
        values: dict[str, Any] = {
            **dict.fromkeys(("llama.expert_count", "llama.expert_used_count", "llama.attention.sliding_window"), 0),
            **dict.fromkeys(("llama.attn_logit_softcapping", "llama.rope.scaling.alpha"), 0.0),
            **dict.fromkeys(("llama.logit_scale", "llama.rope.scaling.attn_factor", "llama.embedding_scale"), 1.0),
            **dict.fromkeys(("llama.attention.value_length", "llama.attention.key_length_swa"), 16),
            **dict.fromkeys(("llama.attention.causal", "llama.rope.scaling.finetuned"), True),
            **dict.fromkeys(("general.base_model.0.name", "quantize.imatrix.file", "somebody.note"), "x"),
            "llama.attention.scale": 0.25,
            "llama.pooling_type": 3,
            "general.type": "model",
            "general.quantization_version": 2,
            "general.sampling.temp": 0.7,
            "tokenizer.ggml.add_bos_token": True,
        }
        for key, value in values.items():
            gguf_models.config_of(self.with_key(base, key, value), kind)

    @parameterized.expand(
        [
            ("rope", "llama", {"rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8, and must be 16, the"),
            ("rope of qwen", "qwen3", {"rope.dimension_count": 8}, "'qwen3.rope.dimension_count' is 8, and must be 16"),
            ("odd", "gptneox", {"rope.dimension_count": 7}, "gptneox.rope.dimension_count must be an even number"),
            ("wide", "gptneox", {"rope.dimension_count": 18}, "an even number up to the size of a head, 16, got 18"),
            ("window", "llama", {"attention.sliding_window": 64}, "attention.sliding_window' is 64, and must be 0"),
            ("width", "bert", {"embedding_length": 65}, "must be a multiple of attention.head_count, 4, got 65"),
            ("unknown", "llama", {"attention.new_kind": 1}, "'llama.attention.new_kind' is 1, and must be absent"),
            ("eps", "llama", {"attention.layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_eps"),
            ("context", "qwen3", {"context_length": None}, "the metadata lacks qwen3.context_length"),
            ("no window", "gemma3", {"attention.sliding_window": None}, "lacks gemma3.attention.sliding_window"),
            ("theta", "llama", {"rope.freq_base": 0.0}, "llama.rope.freq_base must be one number above 0, got 0.0"),
            ("theta of bert", "bert", {"rope.freq_base": 10000.0}, "bert.rope.freq_base' is 10000.0, and must be"),
            ("pattern", "gemma3", {"attention.sliding_window_pattern": 0}, "must be an integer above 0"),
            ("heads", "bert", {"attention.head_count_kv": 2}, "'bert.attention.head_count_kv' is 2, and must be 4"),
            ("values", "gemma3", {"attention.value_length": 8}, "'gemma3.attention.value_length' is 8"),
            ("extrapolation", "llama", {"rope.scaling.yarn_ext_factor": 1.0}, "-1 or 0 where rope.scaling.type is"),
            ("attention", "llama", {"rope.scaling.attn_factor": 1.5}, "1 where rope.scaling.type is 'linear', got 1.5"),
        ]
    )  # fmt: skip
    def test_wrong(self, _name, model, changes, message):
        with self.assertRaises(ValueError) as caught:
            load_model(self.written(model, **changes))
        assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception

    def test_linear_is_the_default(self):
        """As in llama.cpp, where a factor alone is that of linear scaling; and "none" leaves it out."""
        model = load_model(self.written("llama", **{"rope.scaling.factor": 4.0}))
        assert model.config.rope_parameters["rope_type"] == "linear" and model.config.rope_parameters["factor"] == 4
        model = load_model(self.written("llama", **{"rope.scaling.factor": 4.0, "rope.scaling.type": "none"}))
        assert model.config.rope_parameters["rope_type"] == "default"

    def test_layers_with_a_window(self):
        windows = [True, False, True, True, False, True, False]
        for pattern, want in ((windows, "sfssfsf"), (2, "sfsfsfs"), (1, "fffffff"), (6, "sssssfs")):
            base = open_gguf(self.written("gemma3"))
            file = self.with_key(base, "gemma3.attention.sliding_window_pattern", pattern)
            config = gguf_models.config_of(file, gguf_models.model_of(file))
            assert "".join(name[0] for name in config.layer_types) == want

    def test_softcapping(self):
        for value, want in ((0.0, None), (30.0, 30.0)):
            base = open_gguf(self.written("gemma3", final_logit_softcapping=value))
            assert gguf_models.config_of(base, gguf_models.model_of(base)).final_logit_softcapping == want


def rotations(size: int, positions: int, theta: float, factor: float, original: int, fast: float, slow: float) -> Any:
    """Cosines and sines as ggml's rope_yarn computes them, with an extrapolation factor of 1; float64."""
    pairs = np.arange(size // 2)
    ends = [size * math.log(original / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in (fast, slow)]
    low, high = max(0, math.floor(ends[0])), min(size - 1, math.ceil(ends[1]))
    extrapolated = np.arange(positions)[:, None] * theta ** (-2 * pairs / size)
    ramp = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
    angles = extrapolated / factor * (1 - ramp) + extrapolated * ramp
    scale = 1 + 0.1 * math.log(factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


class TestYarn(InFolder):
    def loaded(self, model: str = "llama", **changes: Any) -> Any:
        scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32} | changes
        keys = {f"rope.scaling.{key}": value for key, value in scaling.items()}
        write(MODELS[model](), self.folder / "model.gguf", "F32", **keys)
        return load_model(self.folder / "model.gguf")

    @parameterized.expand(
        [
            ("default", {}, 32, 1, 1),
            ("betas", {"yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}, 8, 2, 1),
            ("attention", {"attn_factor": 1.5, "yarn_ext_factor": 1.0}, 32, 1, 1.5),
            ("one", {"yarn_beta_fast": 1.0, "original_context_length": 128}, 1, 1, 1),
        ]
    )
    def test_rotations(self, _name, changes, fast, slow, attention):
        """Those of llama.cpp."""
        model = self.loaded(**changes)
        original = changes.get("original_context_length", 32)
        want = rotations(16, 100, 10000.0, 4.0, original, fast, slow)
        got = model.model.rotary_emb(torch.zeros(1, 1), torch.arange(100)[None])
        for a, b in zip(got, want, strict=True):
            assert np.allclose(a[0, :, :8].numpy(), b * attention, atol=2e-5), np.abs(a[0, :, :8].numpy() - b).max()

    @parameterized.expand([("gptneox", 8), ("gemma3", 32)])
    def test_others(self, name, size):
        """Of a part of a head, and of the layers without a window alone."""
        model = self.loaded(name)
        theta = 10000.0 if name == "gptneox" else 1e6
        (rotary,) = (m for n, m in model.named_modules() if n.endswith("rotary_emb"))
        which = ("full_attention",) if name == "gemma3" else ()
        got = rotary(torch.zeros(1, 1), torch.arange(100)[None], *which)
        want = rotations(size, 100, theta, 4.0, 32, 32, 1)
        for a, b in zip(got, want, strict=True):
            assert np.allclose(a[0, :, : size // 2].numpy(), b, atol=2e-5)
        if name == "gemma3":
            assert model.config.rope_parameters["sliding_attention"]["rope_type"] == "default"

    def test_refused(self):
        for changes, message in (
            ({"yarn_ext_factor": 0.5}, "yarn_ext_factor must be -1 or 1"),
            ({"yarn_ext_factor": 0.0}, "yarn_ext_factor must be -1 or 1"),
            ({"yarn_attn_factor": 1.2}, "'llama.rope.scaling.yarn_attn_factor' is 1.2"),
            ({"yarn_log_multiplier": 0.1}, "'llama.rope.scaling.yarn_log_multiplier' is 0.1"),
            ({"yarn_beta_fast": -1.0}, "yarn_beta_fast must be one number above 0"),
            ({"yarn_beta_slow": 64.0}, "original_context_length must be long enough"),
            ({"original_context_length": 1}, "original_context_length must be long enough"),
            ({"original_context_length": None}, "the metadata lacks llama.rope.scaling.original_context_length"),
            ({"factor": -2.0}, "rope.scaling.factor must be a number, 0 or more"),
        ):  # fmt: skip
            with self.assertRaises(ValueError) as caught:
                self.loaded(**changes)
            assert message in str(caught.exception), caught.exception

    def test_parts_of_heads(self):
        """transformers truncates head · factor, which must not lose a dimension."""
        for head in range(2, 300):
            for size in range(2, head + 1, 2):
                assert int(head * gguf_configs.fraction(size, head)) == size, (size, head)
