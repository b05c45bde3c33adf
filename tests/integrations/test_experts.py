"""Experts of transformers in 3-D parameters: quantized, computed, trained through, compiled, saved, spread over
processes."""

import copy
import functools
import io
import itertools
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import hop
from hop.numerics.layouts import Stacked
from tests.integrations.mixtures import MODELS, cosine, experts, mixture, quantized
from tests.integrations.models import IDS, NEEDED, QUIET, loaded, saved, tokens
from tests.support.processes import run

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
pytest.importorskip("transformers.integrations.moe", reason="transformers has no experts in 3-D parameters")

from hop.integrations import HopConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)
KINDS = ("mixtral", "gpt_oss", "nemotron_h")
# How near the result is to the float one: random weights, and the error of each format.
SCHEMES = {
    "int8": 0.999,
    "int8_weight": 0.9995,
    "int4": 0.975,
    "8da4w": 0.975,
    "fp8": 0.997,
    "mxfp8": 0.997,
    "nvfp4": 0.95,
}
native = hop.kernels.cpu.native.library().missing is None


def by_loop(module: Any, scheme: hop.Scheme, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> Any:
    """What float experts compute in a scheme: each token by itself, product by product."""
    op = torch.ops.aten
    up_name = "gate_up_proj" if module.has_gate else "up_proj"

    def product(name: str, row: torch.Tensor, i: int) -> torch.Tensor:
        weight = getattr(module, name)[i]
        bias = getattr(module, f"{name}_bias")[i] if module.has_bias else None
        if not module.is_transposed:
            return hop.quantized(op.linear.default, scheme, row, weight, bias)
        given = (row, weight) if bias is None else (bias, row, weight)
        return hop.quantized(op.mm.default if bias is None else op.addmm.default, scheme, *given)

    rows = []
    for t in range(x.shape[0]):
        parts = []
        for i, weight in zip(index[t].tolist(), weights[t], strict=True):
            h = product(up_name, x[t : t + 1], i)
            h = module._apply_gate(h) if module.has_gate else module.act_fn(h)
            parts.append(product("down_proj", h, i) * weight)
        rows.append(torch.stack(parts).sum(0))
    return torch.cat(rows)


class TestProducts(unittest.TestCase):
    @parameterized.expand([(kind, scheme) for kind in KINDS for scheme in SCHEMES])
    def test_near_the_floats(self, kind, scheme):
        module, given = experts(kind)
        want = module(*given)
        packed, plain = (quantized(module, scheme, pack=pack) for pack in (True, False))
        got = packed(*given)
        assert cosine(got, want) >= SCHEMES[scheme], cosine(got, want)
        assert (got - plain(*given)).abs().max() <= 2e-6 * want.abs().max()
        assert plain.down_proj.quantizer.layout is None and packed.config._experts_implementation == "hop"
        if native:
            assert packed.down_proj.quantizer.layout == Stacked(columns=kind == "gpt_oss")

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_every_bit_is_that_of_single_products(self, kind):
        module, given = experts(kind)
        with torch.no_grad():
            want = by_loop(module, hop.schemes.INT8_DYNAMIC, *given)
            assert torch.equal(quantized(module, "int8")(*given), want)
            converted = hop.nn.convert(copy.deepcopy(module), "int8")
            assert torch.equal(converted(*given), want)  # float weights, quantized in each call

    def test_a_token_does_not_depend_on_its_neighbours(self):
        module, (x, index, weights) = experts("mixtral")
        module = quantized(module, "int8")
        whole = module(x, index, weights)
        single = [module(x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in range(len(x))]
        assert torch.equal(torch.cat(single), whole)

    def test_no_tokens_experts_without_any_and_indices_of_none(self):
        module, (x, index, weights) = experts("mixtral")
        module = quantized(module, "int8")
        assert module(x[:0], index[:0], weights[:0]).shape == (0, 64)
        one = torch.full_like(index, 2)  # the weights of a token add up to 1
        alone = module(x, one[:, :1], torch.ones(len(x), 1))
        assert (module(x, one, weights) - alone).abs().max() <= 1e-6 * alone.abs().max()
        none = index.clone()
        none[:, 1] = 4  # what transformers gives for experts of other processes
        assert torch.equal(module(x, none, weights), module(x, index[:, :1], weights[:, :1]))

    def test_scales_are_those_of_each_expert_and_channel(self):
        module, _ = experts("mixtral")
        module.gate_up_proj.data[1] *= 100
        held = quantized(module, "int8", pack=False).gate_up_proj
        assert held.scale.shape == (4, 192, 1) and held.quantizer == hop.presets.INT8_ROW.of_batch(2)
        for i in range(4):
            assert torch.equal(held.codes[i], hop.quantize(hop.presets.INT8_ROW, module.gate_up_proj[i].detach()).codes)
        one = quantized(module, hop.schemes.FP8_DYNAMIC_TENSOR, pack=False).gate_up_proj
        assert one.scale.shape == (4, 1, 1)

    def test_dtypes(self):
        module, (x, index, weights) = experts("mixtral")
        wide = quantized(module, "int8")(x, index, weights)
        module = quantized(module.bfloat16(), "int8")
        got = module(x.bfloat16(), index, weights)
        assert got.dtype == torch.bfloat16 and cosine(got, wide) > 0.9995


class TestPrograms(unittest.TestCase):
    @parameterized.expand([(kind, scheme) for kind in ("mixtral", "gpt_oss") for scheme in ("int8", "int4")])
    @pytest.mark.quick(4)
    def test_compiled_and_exported_in_one_graph(self, kind, scheme):
        """In eager mode, experts take turns: the sigmoid of fewer rows may differ in the last bit."""
        module, given = experts(kind)
        module = quantized(module, scheme)
        near = functools.partial(torch.testing.assert_close, rtol=0, atol=1e-6 if kind == "gpt_oss" else 0)
        with torch.no_grad():
            want = module(*given)
            near(torch.compile(module, fullgraph=True, backend="aot_eager")(*given), want)
        tokens = torch.export.Dim("tokens", min=2, max=64)
        dynamic = tuple({0: tokens} for _ in given)
        program = torch.export.export(module, given, dynamic_shapes=dynamic)
        near(program.module()(*given), want)
        fewer = tuple(t[:5] for t in given)
        near(program.module()(*fewer), module(*fewer))

    @parameterized.expand([(frozen, scheme) for frozen in (True, False) for scheme in ("int8", "int8_weight")])
    @pytest.mark.quick(4)
    def test_gradients(self, frozen, scheme):
        module, (x, index, weights) = experts("gpt_oss")

        def gradients(module: Any, call: Any) -> list[torch.Tensor]:
            module.zero_grad()
            own, routed = x.clone().requires_grad_(), weights.clone().requires_grad_()
            call(own, index, routed).square().sum().backward()
            assert own.grad is not None and routed.grad is not None
            found: list[Any] = [p.grad for p in module.parameters() if p.requires_grad]
            return [own.grad, routed.grad, *found]

        low = hop.nn.convert(copy.deepcopy(module), scheme)
        if frozen:
            hop.nn.freeze(low, pack=True)
        got = gradients(low, low)
        assert len(got) == (4 if frozen else 6)
        wanted = dict(
            zip(("x", "w", *(n for n, _ in module.named_parameters())), gradients(module, module), strict=True)
        )
        names = ("x", "w", *(n for n, p in low.named_parameters() if p.requires_grad))
        for name, grad in zip(names, got, strict=True):
            assert cosine(grad, wanted[name]) > 0.999, name
        compiled = torch.compile(low, fullgraph=True, backend="aot_eager")
        for one, other in zip(gradients(low, compiled), got, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


class TestModels(unittest.TestCase):
    @parameterized.expand([(name,) for name in MODELS])
    @pytest.mark.quick(4)
    def test_every_bit_comes_back_from_files(self, name):
        model = loaded(mixture(name), HopConfig("int8"))
        want = mixture(name)
        hop.quantize_(want, "int8", filter=lambda name, _: name != "lm_head")
        logits = want(IDS).logits
        assert torch.equal(model(IDS).logits, logits) and model.hop_report.summary == want.hop_report.summary
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
            held = hop.storage.load_file(Path(folder, "model.safetensors"))
        assert torch.equal(again(IDS).logits, logits) and tokens(again) == tokens(model)
        codes = {key for key, value in held.items() if "experts" in key and isinstance(value, hop.QuantizedTensor)}
        assert codes == {f"model.layers.{i}.mlp.experts.{w}" for i in (0, 1) for w in ("gate_up_proj", "down_proj")}
        floats = again.dequantize()
        assert not any(isinstance(p, hop.QuantizedTensor) for p in floats.parameters())
        assert cosine(floats(IDS).logits, logits) > 0.98  # a router may choose otherwise

    def test_the_report_has_a_row_for_the_experts_of_each_layer(self):
        model = quantized(mixture("Mixtral"), "int8")
        rows = {row.name: row for row in model.hop_report.rows}
        for i in (0, 1):
            row = rows[f"model.layers.{i}.mlp.experts"]
            assert (row.type, row.scheme) == ("MixtralExperts", hop.schemes.INT8_DYNAMIC)
            assert row.parameters == row.quantized == 4 * 96 * 64 * 3
            assert rows[f"model.layers.{i}.mlp.gate.weight"].scheme is None
        assert "model.layers.1.mlp.experts" in str(model.hop_report)

    def test_rules_choose_them_by_name_and_by_type(self):
        def of(model: Any) -> Any:
            return [layer.mlp.experts for layer in model.model.layers]

        model = quantized(mixture("Mixtral"), {"*.0.mlp.experts": "int4", "*.experts": None, "*": "int8"})
        first, second = of(model)
        assert first.gate_up_proj.quantizer.format.bits == 4 and type(second.gate_up_proj) is torch.nn.Parameter
        floats = mixture("Mixtral")
        x, index, weights = experts("mixtral")[1]
        want = of(floats)[1](x, index, weights)
        assert cosine(second(x, index, weights), want) > 0.999999  # in floats, beside experts of codes
        only = quantized(floats, "int8", filter=type(of(floats)[0]))
        assert only.hop_report.converted == 2

    def test_schemes_that_experts_cannot_have(self):
        for scheme in (hop.schemes.INT8_STATIC, hop.recipes.NVFP4_TRAINING):
            model = hop.nn.convert(mixture("Mixtral"), scheme)
            row = next(r for r in model.hop_report.rows if r.name.endswith("0.mlp.experts"))
            assert row.scheme is None and "scales that are found in each call" in row.reason
        model = quantized(mixture("Mixtral"), "int8")
        with self.assertWarnsRegex(UserWarning, "experts are frozen with .*int8"):
            hop.nn.convert(model, "int4", filter="*.experts")

    def test_state_dicts_are_plain_and_are_packed_where_they_are_loaded(self):
        model, other = quantized(mixture("GptOss"), "int8"), quantized(mixture("GptOss", seed=1), "int8")
        state = model.state_dict()
        held = [v for v in state.values() if isinstance(v, hop.QuantizedTensor)]
        assert all(v.quantizer.layout is None for v in held)
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file)
        want = model(IDS).logits
        for assign in (False, True):
            one = copy.deepcopy(other)
            assert not torch.equal(one(IDS).logits, want)
            one.load_state_dict(state, assign=assign)
            assert torch.equal(one(IDS).logits, want)
            assert (
                one.model.layers[0].mlp.experts.down_proj.quantizer
                == model.model.layers[0].mlp.experts.down_proj.quantizer
            )
        with torch.device("meta"):
            empty = mixture("GptOss")
        hop.nn.convert(empty, "int8")
        with pytest.warns(UserWarning, match=r"rotary_emb\.inv_freq.* are on the meta device"):
            empty.load_state_dict(state, assign=True)
        assert all(layer.mlp.experts.hop_weights.frozen for layer in empty.model.layers)

    def test_copies_are_copies(self):
        module, given = experts("mixtral")
        module = quantized(module, "int8")
        want, other = module(*given), copy.deepcopy(module)
        assert other.hop_weights.module is other and other.hop_weights is not module.hop_weights
        hop.nn.freeze(other, pack=False)
        assert other.down_proj.quantizer.layout is None and torch.equal(other(*given), want)
        if native:
            assert module.down_proj.quantizer.layout is not None


class TestLlama4(unittest.TestCase):
    """Experts without a choice of implementation, each of which multiplies every token."""

    def model(self) -> Any:
        transformers = pytest.importorskip("transformers", minversion="4.51")
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 96,
            "intermediate_size_mlp": 96,
            "head_dim": 16,
            "vocab_size": 256,
        }
        counts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        layers = {"interleave_moe_layer_step": 2, "no_rope_layers": [1, 0]}
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.Llama4TextConfig(**sizes, **counts, **layers, **ids)
        torch.manual_seed(0)
        model = transformers.Llama4ForCausalLM(config).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.1 if parameter.dim() > 1 else 1.0)
        return model.requires_grad_(False)

    def test_every_bit_is_that_of_single_products(self):
        x, op = torch.randn(4 * 5, 64), torch.ops.aten.mm.default
        for name, scheme in (("int8", hop.schemes.INT8_DYNAMIC), ("int4", hop.schemes.INT4_WEIGHT_32)):
            module = self.model().model.layers[1].feed_forward.experts
            rows = []
            for i, part in enumerate(x.view(4, 5, 64)):
                gate, up = hop.quantized(op, scheme, part, module.gate_up_proj[i]).chunk(2, dim=-1)
                rows.append(hop.quantized(op, scheme, up * module.act_fn(gate), module.down_proj[i]))
            floats = module(x)
            module = hop.quantize_(module, name, weights="rule")
            assert torch.equal(module(x), torch.cat(rows)) and cosine(module(x), floats) > SCHEMES[name]
            other = copy.deepcopy(module)
            assert type(other) is type(module) and torch.equal(other(x), module(x))
            compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x), module(x))

    def test_every_bit_comes_back_from_files(self):
        want = self.model()
        model = loaded(self.model(), HopConfig("int8"))
        hop.quantize_(want, "int8", filter=lambda name, _: name != "lm_head")
        assert torch.equal(model(IDS).logits, want(IDS).logits) and "Llama4TextExperts" in str(model.hop_report)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert torch.equal(again(IDS).logits, want(IDS).logits)
        assert isinstance(again.model.layers[1].feed_forward.experts.down_proj, hop.QuantizedTensor)
        assert cosine(again.dequantize()(IDS).logits, want(IDS).logits) > 0.98


# ---- what runs in each process


def spread(mesh: Any, rank: int) -> None:
    """Experts in parts, by the placements of their weights, quantized before and after they are placed."""
    for kind in ("mixtral", "gpt_oss"):
        floats, (x, index, weights) = experts(kind, count=8, k=3)
        for scheme, first in itertools.product(("int8", "int4"), (True, False)):
            one = quantized(floats, scheme, pack=not first)
            many = quantized(floats, scheme, pack=False) if first else copy.deepcopy(floats)
            place(many, mesh)
            if not first:
                hop.quantize_(many, scheme)
                assert (many.down_proj.to_local().quantizer.layout is not None) == native
            (want, *want_grads), (got, *grads) = (called(m, x, index, weights) for m in (one, many))
            assert torch.equal(got, want), (kind, scheme, first)
            for grad, other in zip(grads, want_grads, strict=True):  # sums over experts, in another order
                assert (grad - other).abs().max() <= 1e-6 * other.abs().max()
            parts = many.state_dict()["down_proj"].to_local()
            assert parts.quantizer.layout is None and parts.shape[0] == 8 // mesh.size()


def called(module: Any, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> tuple[Any, Any, Any]:
    """The result, and the gradients of the tokens and of the router's weights."""
    own, routed = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(own, index, routed)
    y.square().sum().backward()
    return y.detach(), own.grad, routed.grad


def place(module: Any, mesh: Any) -> None:
    for name, parameter in list(module.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(module, name, torch.nn.Parameter(placed, requires_grad=parameter.requires_grad))


def refused(mesh: Any, rank: int) -> None:
    module, given = experts("mixtral")
    hop.nn.convert(module, "int8")
    everywhere = copy.deepcopy(module)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(1)])))
        setattr(everywhere, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    with unittest.TestCase().assertRaisesRegex(ValueError, r"place it as Shard\(0\)"):
        module(*given)
    want = quantized(experts("mixtral")[0], "int8")(*given)
    assert torch.equal(everywhere(*given), want)


class TestProcesses(unittest.TestCase):
    @parameterized.expand([(2,), (4,)])
    @pytest.mark.full
    def test_the_same_bits(self, world):
        run(spread, world)

    @pytest.mark.full
    def test_other_placements(self):
        run(refused, 2)
