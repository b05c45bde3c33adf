"""Quantization of activations written as compressed-tensors' input_activations: the package computes the same values
with static scales, and reads the arguments of dynamic ones.
"""

import json
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
from hop import formats, presets, scale_rules
from hop.interchange import open_checkpoint, save_compressed_tensors
from tests.interchange.checkpoint_files import InCheckpoint, random, safetensors

pytest.importorskip("safetensors", reason="safetensors is missing")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is missing")
from compressed_tensors.quantization import QuantizationConfig, fake_quantize

Q = hop.Quantizer
UINT8_STATIC = Q(formats.UINT8, scale=scale_rules.Static(affine=True))
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "static": (presets.INT8_TENSOR_STATIC, {"strategy": "tensor", "dynamic": False}),
    "static affine": (presets.INT8_TENSOR_STATIC_AFFINE, {"strategy": "tensor", "symmetric": False}),
    "static unsigned": (UINT8_STATIC, {"strategy": "tensor", "symmetric": False, "dynamic": False}),
    "static fp8": (presets.FP8_TENSOR_STATIC, {"type": "float", "strategy": "tensor", "dynamic": False}),
    "int8": (presets.INT8_ROW, {"strategy": "token", "dynamic": True, "symmetric": True}),
    "int8 affine": (presets.INT8_ROW_AFFINE, {"strategy": "token", "dynamic": True, "symmetric": False}),
    "int8 tensor": (presets.INT8_TENSOR, {"strategy": "tensor", "dynamic": True}),
    "int8 groups": (presets.INT8_32, {"strategy": "group", "group_size": 32, "dynamic": True}),
    "int4": (Q(formats.INT4, (1, -1)), {"num_bits": 4, "strategy": "token"}),
    "fp8": (presets.FP8_ROW, {"type": "float", "strategy": "token", "dynamic": True}),
    "fp8 tensor": (presets.FP8_TENSOR, {"type": "float", "strategy": "tensor", "dynamic": True}),
    "fp8 groups": (presets.FP8_1X128, {"type": "float", "strategy": "group", "group_size": 128}),
    "mxfp8": (presets.MXFP8, {"type": "float", "group_size": 32, "scale_dtype": torch.uint8}),
    "mxfp4": (presets.MXFP4, {"type": "float", "num_bits": 4, "group_size": 32, "scale_dtype": torch.uint8}),
}


def model_of(lhs: Any) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    weight = presets.INT8_ROW if lhs.format.is_integer else presets.FP8_ROW
    model, x = nn.Sequential(nn.Linear(128, 32), nn.Linear(32, 8)), random(16, 128)
    hop.quantize_(model, {"0": hop.Scheme(lhs, weight), "*": None}, calibrate=[x])
    return model, x


class TestActivations(InCheckpoint):
    def config(self) -> Any:
        return json.loads((self.folder / "config.json").read_text())["quantization_config"]

    @parameterized.expand(CASES)
    @pytest.mark.quick(2)
    def test_written_and_read(self, name: str):
        lhs, wanted = CASES[name]
        model, x = model_of(lhs)
        save_compressed_tensors(self.folder, model, activations=True)
        args: Any = QuantizationConfig.model_validate(self.config()).config_groups["group_0"].input_activations
        assert {key: getattr(args, key) for key in wanted} == wanted
        found = open_checkpoint(self.folder)
        activation: Any = found.activation("0.weight")
        assert found.activation("1.weight") is None and found.activation("0.bias") is None
        if "static" not in name:
            assert activation == (lhs, None, None) and "0.input_scale" not in found
            return
        state: Any = model.get_submodule("0.scales.input")
        assert torch.equal(activation.scale, state.scale)
        assert not any("scales." in key for key in found)
        zero = found.get("0.input_zero_point")
        theirs = fake_quantize(x, found["0.input_scale"], zero, args)
        assert torch.equal(theirs, hop.fake_quantize(lhs, x, scale=state.scale, zero_point=state.zero_point))
        own = {"scale": activation.scale, "zero_point": activation.zero_point}
        assert torch.equal(theirs, hop.fake_quantize(activation.quantizer, x, **own))

    def test_groups(self):
        """Layers with equal weights and different inputs are in different groups; by default inputs are floats."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
        schemes: dict[str, Any] = {"0": hop.Scheme(presets.INT8_ROW, presets.INT8_ROW), "*": "int8_weight"}
        hop.quantize_(model, schemes)
        save_compressed_tensors(self.folder / "with", model, activations=True)
        save_compressed_tensors(self.folder / "without", model)
        files = {name: open_checkpoint(self.folder / name) for name in ("with", "without")}
        found = {name: [file.activation(f"{i}.weight") is not None for i in range(3)] for name, file in files.items()}
        assert found == {"with": [True, False, False], "without": [False, False, False]}
        assert len(files["with"].config["config_groups"]) == 2 and len(files["without"].config["config_groups"]) == 1

    def test_not_written(self):
        stochastic = Q(formats.INT8, (1, -1), stochastic=True)
        for lhs in (stochastic, presets.NVFP4, presets.FP8_E5M2_ROW, Q(formats.INT8, (4, -1))):
            model, _ = model_of(lhs)
            with pytest.raises(ValueError, match="the layer '0' cannot be stored in compressed-tensors: its input is"):
                save_compressed_tensors(self.folder / "new", model, activations=True)
        with pytest.raises(TypeError, match="activations must be True or False, and True for a module alone"):
            save_compressed_tensors(self.folder / "new", {"a": torch.ones(1)}, activations=True)
        assert not (self.folder / "new").exists()

    def test_refused(self):
        model, _ = model_of(presets.INT8_TENSOR_STATIC_AFFINE)
        save_compressed_tensors(self.folder, model, activations=True)
        config, tensors = self.config(), dict(open_checkpoint(self.folder))
        plain = {"0.weight": tensors["0.weight"].codes, "0.weight_scale": tensors["0.weight"].scale}
        plain |= {name: tensors[name] for name in ("0.input_scale", "0.input_zero_point")}
        args = config["config_groups"]["group_0"]["input_activations"]
        cases = [
            ({"num_bits": 99}, {}, "those that are read are"),
            ({"strategy": "group", "dynamic": True, "group_size": 2**40}, {}, "those that are read are"),
            ({"dynamic": "local"}, {}, "those that are read are"),
            ({"strategy": "token"}, {}, "those that are read are"),
            ({}, {"0.input_scale": None}, "lacks its 'input_scale'"),
            ({}, {"0.input_scale": torch.tensor([float("nan")])}, "'input_scale' is nan, and must be finite"),
            ({}, {"0.input_scale": torch.ones(32)}, "'input_scale' has shape (32,), and must have (1,) or ()"),
            ({"num_bits": 4}, {"0.input_zero_point": torch.tensor([9], dtype=torch.int8)}, "'input_zero_point' is 9"),
        ]
        for changes, replaced, message in cases:
            config["config_groups"]["group_0"]["input_activations"] = {**args, **changes}
            held = {name: t for name, t in {**plain, **replaced}.items() if t is not None}
            read = self.written(config, held)
            with self.assertRaises(ValueError) as caught:
                read.activation("0.weight")
            assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception

    def test_model(self):
        """load_model(activations="file") gives the logits of the saved model, bit for bit."""
        pytest.importorskip("transformers", reason="transformers is missing")
        from tests.integrations.models import IDS, llama

        model = llama()
        hop.quantize_(model, {"*.mlp.*": "int8", "*.self_attn.*": "8da4w", "*": None})
        save_compressed_tensors(self.folder, model, activations=True)
        loaded = hop.load_model(self.folder, activations="file")
        with torch.no_grad():
            assert torch.equal(loaded(IDS).logits, model(IDS).logits)
            assert not torch.equal(hop.load_model(self.folder)(IDS).logits, model(IDS).logits)

    @parameterized.expand([("int8", "int8_static"), ("fp8", hop.Scheme(presets.FP8_TENSOR_STATIC, presets.FP8_ROW))])
    def test_static_model(self, _name, scheme):
        """Static scales of the file, which save_pretrained keeps."""
        pytest.importorskip("transformers", reason="transformers is missing")
        from tests.integrations.models import IDS, llama, saved

        model = hop.quantize_(llama(), {"*.mlp.*": scheme, "*": None}, calibrate=[IDS])
        save_compressed_tensors(self.folder, model, activations=True)
        found = hop.load_model(self.folder, activations="file")
        with torch.no_grad():
            assert torch.equal(found(IDS).logits, model(IDS).logits)
            assert not torch.equal(hop.load_model(self.folder)(IDS).logits, model(IDS).logits)
        first, second = self.folder / "first", self.folder / "second"
        with saved(found) as folder:
            again = type(found).from_pretrained(folder)
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, model(IDS).logits)
        save_compressed_tensors(first, model, activations=True)
        save_compressed_tensors(second, again, activations=True)  # the same file after two ways back
        assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
        configs = [json.loads((each / "config.json").read_text()) for each in (first, second)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]

    def test_static_fp8_of_modelopt(self):
        """Inputs are divided by the file's scale, rounded to e4m3 and clamped; products by ATen in float64."""
        pytest.importorskip("transformers", reason="transformers is missing")
        from tests.integrations.models import IDS, llama, saved

        model = llama()
        state, folder = dict(model.state_dict()), self.folder
        scales: dict[str, Any] = {}
        for i, (name, layer) in enumerate((n, m) for n, m in model.named_modules() if n.endswith("_proj")):
            scale, weight = layer.weight.abs().amax() / 448, state.pop(f"{name}.weight")
            codes = (weight / scale).to(torch.float8_e4m3fn)
            scales[name] = torch.tensor(0.003 * (i + 1))  # many inputs are clamped
            state |= {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.input_scale": scales[name]}
        model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        quantization = {"quant_method": "modelopt", "quant_algo": "FP8"}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        safetensors.save_file(state, folder / "model.safetensors")
        found = hop.load_model(folder, activations="file")
        with saved(found) as kept:
            again = type(found).from_pretrained(kept)
        for one in (found, again):
            clamped = 0
            for name, scale in scales.items():
                layer, x = one.get_submodule(name), random(5, one.get_submodule(name).in_features)
                rounded = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale.double()
                clamped += int((x.abs() > 448 * scale).sum())
                weight = state[f"{name}.weight"].double() * state[f"{name}.weight_scale"].double()
                want = torch.ops.aten.linear(rounded, weight)
                assert (layer(x) - want).abs().max() < 1e-6 * want.abs().max()
            assert clamped > 10
        assert torch.equal(found(IDS).logits, again(IDS).logits)
        assert open_checkpoint(folder).activation("model.layers.0.input_layernorm.weight") is None
        held = {"a.weight": torch.zeros(8, 16, dtype=torch.uint8), "a.weight_scale_2": torch.ones(())}
        held |= {"a.weight_scale": torch.ones(8, 2).to(torch.float8_e4m3fn), "a.input_scale": torch.ones(())}
        with pytest.raises(ValueError, match="'input_scale' is the outer scale of inputs in NVFP4, which are not read"):
            self.written({"quant_method": "modelopt"}, held).activation("a.weight")
        ones = torch.ones(8, 16).to(torch.float8_e4m3fn)
        held = {"a.weight": ones, "a.weight_scale": torch.ones(()), "a.input_scale": torch.zeros(())}
        with pytest.raises(ValueError, match=r"'a\.weight': 'input_scale' is 0\.0, and must be finite and"):
            self.written({"quant_method": "modelopt"}, held).activation("a.weight")
