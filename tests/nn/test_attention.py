"""MultiheadAttention, whose projections are quantized; and recurrent layers, which are left with a reason."""

import copy
import io
import unittest
import warnings
from typing import Any

import pytest
import torch
from parameterized import parameterized
from torch import Tensor, nn

import hop
from hop import attention_schemes, presets, schemes
from hop.numerics.schemes import Scheme
from tests.support.layers import randn
from tests.support.schemes import CROSSED

FORMS: dict[str, dict[str, Any]] = {
    "batch_first": {"batch_first": True},
    "sequence_first": {},
    "no_bias": {"bias": False, "batch_first": True},
    "extended": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "other_sizes": {"kdim": 32, "vdim": 96, "batch_first": True},
}
WITH: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no_weights": {"need_weights": False},
    "each_head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    "mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True, "need_weights": False},
    "floats_of_heads": {"attn_mask": randn(8, 5, 5, seed=4), "need_weights": False},
    "both": {
        "attn_mask": randn(5, 5, seed=4),
        "key_padding_mask": torch.tensor([[0.0] * 5, [0.0, 0.5, 0.0, -1.0, -9.0]]),
    },
}


def floats(form: str = "batch_first") -> Any:
    torch.manual_seed(2)
    layer = nn.MultiheadAttention(64, 4, **FORMS[form])
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(torch.randn(p.shape) / 16)  # PyTorch's biases begin at 0
    return layer.eval()


def inputs(form: str = "batch_first") -> list[Tensor]:
    """Query, key and value: one tensor where they may be."""
    options = FORMS[form]
    if "kdim" in options:
        return [randn(2, 5, n, seed=i) for i, n in enumerate((64, 32, 96))]
    return [randn(2, 5, 64) if form != "sequence_first" else randn(5, 2, 64)] * 3


def converted(scheme: Scheme, form: str = "batch_first") -> Any:
    layer = hop.nn.convert(floats(form), scheme)
    hop.nn.calibrate(layer, [tuple(inputs(form))], progress=False)
    return layer


def applicable() -> list[tuple[str, Scheme]]:
    found = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "convert: no layer was converted")
        for name, scheme in CROSSED.items():
            if hop.nn.convert(floats(), scheme).hop_report.converted:
                found.append((name, scheme))
    return found


class TestAttention(unittest.TestCase):
    def test_every_scheme_applies(self):
        assert dict(applicable()).keys() == CROSSED.keys()

    @parameterized.expand([(f"{form}_{name}", form, name) for form in FORMS for name in WITH])
    @pytest.mark.quick(3)
    def test_in_floats_it_is_pytorchs(self, _name, form, name):
        layer, given, plain = converted(schemes.INT8_DYNAMIC, form), inputs(form), floats(form)
        assert isinstance(layer, hop.nn.MultiheadAttention)
        assert layer.state_dict().keys() == plain.state_dict().keys()
        assert dict(layer.named_parameters()).keys() == dict(plain.named_parameters()).keys()
        options: Any = WITH[name]
        if form == "extended" and name == "causal":  # PyTorch's hint leaves out what is added, its mask does not
            options = options | {"is_causal": False}
        with hop.nn.scheme(lambda role: None):
            y, weights = layer(*given, **WITH[name])
        want, of_weights = plain(*given, **options)
        torch.testing.assert_close(y, want, rtol=0.0, atol=1e-6)
        assert (weights is None) == (of_weights is None)
        if weights is not None:
            torch.testing.assert_close(weights, of_weights, rtol=0.0, atol=1e-6)

    def test_without_a_batch(self):
        layer, plain, x = converted(schemes.INT8_DYNAMIC), floats(), randn(5, 64)
        padding = torch.tensor([False, False, False, False, True])
        with hop.nn.scheme(lambda role: None):
            got = layer(x, x, x, key_padding_mask=padding)
        for mine, one in zip(got, plain(x, x, x, key_padding_mask=padding), strict=True):
            torch.testing.assert_close(mine, one, rtol=0.0, atol=1e-6)

    @parameterized.expand(applicable())
    @pytest.mark.quick(4)
    def test_a_scheme(self, name, scheme):
        """Near PyTorch's; frozen, packed, saved and loaded, copied: the same bits, in self-attention and across."""
        layer, plain = converted(scheme), floats()
        x, other, third = randn(2, 5, 64), randn(2, 7, 64, seed=1), randn(2, 7, 64, seed=2)
        calls = [(x, x, x), (x, other, other), (x, other, third), (other, other, third)]
        with torch.no_grad():
            wanted = [layer(*call)[0] for call in calls]
            for y, call in zip(wanted, calls, strict=True):
                one = plain(*call)[0]
                assert (y - one).norm() < (0.9 if "TERNARY" in name else 0.3) * one.norm()
            for pack in (False, True):
                hop.nn.freeze(layer, pack=pack)
                assert isinstance(layer.in_proj_weight, hop.QuantizedTensor)
                for y, call in zip(wanted, calls, strict=True):
                    assert torch.equal(layer(*call)[0], y)
            state = layer.state_dict()
            assert all(t.quantizer.layout is None for t in state.values() if isinstance(t, hop.QuantizedTensor))
            loaded = hop.nn.convert(floats(), scheme)
            loaded.load_state_dict(state, assign=True)
            file = io.BytesIO()
            torch.save(layer, file)
            file.seek(0)
            for again in (loaded, copy.deepcopy(layer), torch.load(file, weights_only=False)):
                assert again.in_proj.owner is again and torch.equal(again(*calls[1])[0], wanted[1])
        back = layer.to_float()
        assert type(back) is nn.MultiheadAttention and type(back.out_proj) is type(plain.out_proj)
        assert back.state_dict().keys() == plain.state_dict().keys()
        assert torch.equal(back.in_proj_weight, hop.dequantize(layer.in_proj_weight))

    @parameterized.expand([(name, CROSSED[name]) for name in ("INT8_TRAINING", "MXFP8_TRAINING", "INT8_STATIC")])
    def test_it_trains(self, _name, scheme):
        layer, plain, x = converted(scheme).train(), floats().train(), randn(2, 5, 64)
        for call in ((x, x, x), (x, x.clone(), x.clone())):
            for model in (layer, plain):
                model.zero_grad()
                model(*call)[0].square().sum().backward()
            for (name, p), one in zip(layer.named_parameters(), plain.parameters(), strict=True):
                assert (p.grad - one.grad).norm() < 0.3 * one.grad.norm(), name

    def test_an_input_is_quantized_once(self):
        layer, x = converted(schemes.INT8_DYNAMIC), randn(2, 5, 64)
        hop.nn.freeze(layer)
        calls: list[Any] = []
        layer.in_proj.register_forward_hook(lambda module, args, y: calls.append((args, y.shape)))
        layer(x, x, x)
        assert [shape for _, shape in calls] == [(2, 5, 192)]
        calls.clear()
        layer(x, y := x.clone(), y)
        assert [shape for _, shape in calls] == [(2, 5, 64), (2, 5, 128)]

    @pytest.mark.full
    def test_programs(self):
        layer, x = converted(schemes.INT8_STATIC), randn(2, 5, 64)
        hop.nn.freeze(layer)

        class Self(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.attention = layer

            def forward(self, x: Tensor) -> Tensor:
                return self.attention(x, x, x, need_weights=False)[0]

        with torch.no_grad():
            y = Self()(x)
            torch.testing.assert_close(torch.compile(Self(), fullgraph=True)(x), y, rtol=0.0, atol=0.05)
            program = torch.export.export(Self(), (x,))
            assert torch.equal(program.module()(x), y)

    def test_rules(self):
        model = nn.Sequential(floats(), floats())
        rows = hop.nn.convert(
            model, {"0.out_proj": None, "1.out_proj": "int4", nn.MultiheadAttention: "int8"}
        ).hop_report.rows
        assert [(r.name, r.scheme) for r in rows if r.scheme is not None] == [
            ("0", schemes.INT8_DYNAMIC),
            ("1", schemes.INT8_DYNAMIC),
            ("1.out_proj", schemes.INT4_WEIGHT_32),
        ]
        assert [(r.name, r.parameters, r.quantized) for r in rows][:2] == [("0", 12480, 12288), ("0.out_proj", 4160, 0)]
        again = hop.nn.convert(model, "int4").hop_report
        assert model[0].scheme == model[0].out_proj.scheme == schemes.INT4_WEIGHT_32 and len(again.rows) == 4
        left = hop.nn.convert(nn.Sequential(floats()), {nn.MultiheadAttention: None}).hop_report.rows
        assert "its attention reads" in left[1].reason

    def test_transformers(self):
        """In eval mode too, where PyTorch's encoders have a fused form."""
        torch.manual_seed(0)
        model = nn.Transformer(64, 4, 2, 2, 96, dropout=0.0, batch_first=True).eval()
        source, target = randn(2, 6, 64), randn(2, 5, 64, seed=1)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
        given = {"tgt_mask": mask, "tgt_is_causal": True, "src_key_padding_mask": padding}
        want = model(source, target, **given).detach()  # with gradients: the fused form warns
        with torch.no_grad():
            report = hop.nn.convert(model, "int8").hop_report
            y = model(source, target, **given)
            assert 0 < (y - want).norm() < 0.05 * want.norm()
            hop.nn.freeze(model, pack=True)
            assert torch.equal(model(source, target, **given), y)
        assert report.quantized == sum(
            p.numel()
            for name, p in nn.Transformer(64, 4, 2, 2, 96, batch_first=True).named_parameters()
            if p.dim() == 2
        )

    def test_an_encoder_with_attention_alone(self):
        layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True).eval()
        x = randn(2, 5, 64)
        with torch.no_grad():
            want = layer(x)
            hop.nn.convert(layer, {"self_attn*": "int4"})
            y = layer(x)
        assert type(layer.linear1) is nn.Linear and 1e-4 < (y - want).norm() / want.norm() < 0.2

    def test_errors(self):
        layer, x = converted(schemes.INT8_DYNAMIC), randn(2, 5, 64)
        for error, match, options in (
            (ValueError, "attn_mask is None; pass it too", {"is_causal": True}),
            (ValueError, r"attn_mask must have the shape \(5, 5\) or \(8, 5, 5\), got", {"attn_mask": randn(4, 5)}),
            (ValueError, r"key_padding_mask must have the shape \(2, 5\), got", {"key_padding_mask": randn(5)}),
            (TypeError, "attn_mask must be bool or floating point", {"attn_mask": torch.ones(5, 5).int()}),
        ):
            with pytest.raises(error, match=match):
                layer(x, x, x, **options)
        hop.nn.freeze(layer)
        with pytest.raises(RuntimeError, match="weight is frozen"):
            layer.in_proj_weight = nn.Parameter(torch.zeros(192, 64))
        with pytest.raises(TypeError, match=r"plain torch\.nn\.MultiheadAttention, whose forward"):
            hop.nn.MultiheadAttention.from_float(nn.Linear(2, 2), schemes.INT8_DYNAMIC)

    def test_made_by_itself(self):
        layer, x = hop.nn.MultiheadAttention(64, 4, scheme=schemes.INT8_DYNAMIC, batch_first=True), randn(2, 5, 64)
        assert layer(x, x, x)[0].shape == x.shape and layer.out_proj.scheme == schemes.INT8_DYNAMIC
        layer.load_state_dict(floats().state_dict())
        layer.to(torch.float64)
        assert layer(x.double(), x.double(), x.double())[0].dtype == torch.float64


class TestRecurrent(unittest.TestCase):
    @parameterized.expand([(kind,) for kind in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell")])
    def test_a_row_with_the_reason(self, kind):
        model = nn.Sequential(getattr(nn, kind)(8, 16), nn.Linear(16, 8))
        row, _ = hop.nn.convert(model, "int8").hop_report.rows
        assert (row.name, row.type, row.scheme) == ("0", kind, None)
        assert "inside one operator of PyTorch" in row.reason and "hop has none for it" in row.reason
        assert row.parameters == sum(p.numel() for p in model[0].parameters())


AttentionScheme = attention_schemes.AttentionScheme
SDPA = torch.ops.aten.scaled_dot_product_attention.default
ATTENDS = attention_schemes.ATTENTION_SCHEMES
MASKS: dict[str, dict[str, Any]] = {name: WITH[name] for name in ("no_weights", "padding", "causal", "floats_of_heads")}


def attending(attention: Any, form: str = "batch_first") -> Any:
    return hop.quantize_(floats(form), "int8", attention=attention)


class TestAttentionInAScheme(unittest.TestCase):
    @parameterized.expand([(f"{scheme}_{mask}", scheme, mask) for scheme in ATTENDS for mask in MASKS])
    @pytest.mark.quick(3)
    def test_between_the_projections_it_is_the_operator(self, _name, scheme, mask):
        layer, (x, *_) = attending(scheme.lower()), inputs()
        got, weights = layer(x, x, x, **MASKS[mask] | {"need_weights": False})
        parts = [t.unflatten(-1, (4, 16)).transpose(1, 2) for t in layer.in_proj(x).chunk(3, -1)]
        quantizers = (ATTENDS[scheme].query, ATTENDS[scheme].key, ATTENDS[scheme].value)
        if ATTENDS[scheme].rotated:
            turned = [hop.scaled(torch.ops.hop.hadamard.default, torch.float32, t, 16) for t in parts[:2]]
            parts = [*turned, parts[2]]
        codes = [t if q is None else hop.quantize(q, t) for q, t in zip(quantizers, parts, strict=True)]
        added = None
        if mask == "padding":
            added = torch.zeros(2, 1, 1, 5).masked_fill(WITH["padding"]["key_padding_mask"][:, None, None], -torch.inf)
        if mask == "floats_of_heads":
            added = WITH["floats_of_heads"]["attn_mask"].unflatten(0, (2, 4))
        y = hop.scaled(SDPA, torch.float32, *codes, added, 0.0, mask == "causal")
        assert weights is None
        assert torch.equal(got, layer.out_proj(y.transpose(1, 2).flatten(-2)))
        near = floats()(x, x, x, **MASKS[mask] | {"need_weights": False})[0]
        assert 0 < (got - near).norm() < 0.1 * near.norm()

    @parameterized.expand([(form,) for form in FORMS])
    def test_forms(self, form):
        layer, given = attending("int8", form), inputs(form)
        got, near = (m(*given, need_weights=False)[0] for m in (layer, floats(form)))
        assert (got - near).norm() < 0.1 * near.norm()

    def test_floats_again(self):
        """By a context, by a rule, and by to_float."""
        x = randn(2, 5, 64)
        layer, plain = attending("int8"), attending(None)
        y = layer(x, x, x, need_weights=False)[0]
        assert not torch.equal(y, plain(x, x, x, need_weights=False)[0])
        for other in (copy.deepcopy(layer), torch.load(_saved(layer), weights_only=False)):
            assert torch.equal(other(x, x, x, need_weights=False)[0], y)
        unfrozen = hop.nn.convert(floats(), "int8", attention="int8")
        with hop.nn.scheme(lambda role: None):
            torch.testing.assert_close(unfrozen(x, x, x)[0], floats()(x, x, x)[0], rtol=0.0, atol=1e-6)
        hop.nn.convert(layer, {"*": "int8"}, attention={"*": None})
        assert torch.equal(layer(x, x, x, need_weights=False)[0], plain(x, x, x, need_weights=False)[0])
        assert layer(x, x, x)[1] is not None
        back = unfrozen.to_float()
        assert torch.equal(back(x, x, x)[0], floats()(x, x, x)[0])

    @parameterized.expand([("int8",), ("int8_rotated",)])
    def test_gradients_are_those_of_the_numbers(self, attention):
        layer, x = hop.nn.convert(floats(), "int8", attention=attention), randn(2, 5, 64).requires_grad_()
        layer(x, x, x, need_weights=False)[0].square().sum().backward()
        assert x.grad is not None and layer.in_proj_weight.grad.norm() > 0
        other = x.detach().clone().requires_grad_()
        floats()(other, other, other, need_weights=False)[0].square().sum().backward()
        assert other.grad is not None
        assert (x.grad - other.grad).norm() < 0.2 * other.grad.norm()

    @parameterized.expand([("int8",), ("int8_rotated",)])
    @pytest.mark.full
    def test_compiled_and_exported(self, attention):
        layer, x = attending(attention), randn(2, 5, 64)
        with torch.no_grad():
            want = layer(x, x, x, need_weights=False)[0]
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(x, x, x, need_weights=False)[0], want)
            program = torch.export.export(layer, (x, x, x), {"need_weights": False})
            assert torch.equal(program.module()(x, x, x, need_weights=False)[0], want)

    def test_what_it_does_not_give(self):
        layer, x = attending("int8"), randn(2, 5, 64)
        with self.assertRaisesRegex(
            ValueError, "need_weights=True asks for all attention weights.*give need_weights=False"
        ):
            layer(x, x, x)
        layer.train().dropout = 0.5
        with self.assertRaisesRegex(ValueError, r"dropout=0\.5 drops scores in training"):
            layer(x, x, x, need_weights=False)

    def test_rules(self):
        model: Any = nn.ModuleDict({"one": floats(), "two": floats(), "three": floats()})
        hop.nn.convert(model, {"three*": None, "*": "int8"}, attention={"one": "int8", "two": None, "*": "fp8"})
        rows = [row for row in model.hop_report.rows if row.name in model][3:]
        assert [row.scheme for row in rows] == [ATTENDS["INT8_ATTENTION"], None, None]
        assert "the rule for 'two' leaves it alone" in rows[1].reason and "projections stay in" in rows[2].reason
        assert "INT8_ATTENTION" in str(model.hop_report)

    def test_a_scheme_that_is_none(self):
        wrong: list[tuple[Any, type[Exception], str]] = [
            ("int9", ValueError, "no scheme is called 'int9'; use int8"),
            (schemes.INT8_DYNAMIC, TypeError, "must be a hop.attention_schemes.AttentionScheme"),
            ({"*.attn": "int8"}, ValueError, "no module that attends matches '.*attn'.*MultiheadAttention"),
            ({3: "int8"}, TypeError, "attention: a selector must be"),
            (
                AttentionScheme(presets.FP8_ROW, presets.INT8_ROW, presets.INT8_ROW),
                ValueError,
                "quantize them by formats of one",
            ),
            (AttentionScheme(presets.INT8_ROW, presets.INT8_COLUMN, presets.INT8_ROW), ValueError, "scales of 'key'"),
        ]
        for attention, error, message in wrong:
            model = floats()
            with self.assertRaisesRegex(error, message):
                hop.quantize_(model, "int8", attention=attention)
        odd = hop.quantize_(nn.MultiheadAttention(10, 2), {"*": "int8"}, attention="int8_rotated")
        with self.assertRaisesRegex(ValueError, "none of these divides its width, 5; use a scheme with rotated=False"):
            odd(*[randn(3, 2, 10)] * 3, need_weights=False)
        for fields, error, message in (
            (
                (presets.INT8_ROW, presets.INT8_ROW, presets.INT8_ROW, 1),
                TypeError,
                "rotated must be True or False, got 1",
            ),
            ((presets.INT8_ROW, None, presets.INT8_ROW), TypeError, "key must be a Quantizer, got None"),
            ((None, presets.INT8_TENSOR_STATIC, presets.INT8_ROW), ValueError, "static or delayed scales"),
        ):
            with self.assertRaisesRegex(error, message):
                AttentionScheme(*fields)
        for scheme in ATTENDS.values():
            assert AttentionScheme.parse(str(scheme)) == scheme
        plain, rotated = (ATTENDS[name] for name in ("INT8_ATTENTION", "INT8_ROTATED_ATTENTION"))
        assert plain != rotated and "rotated" not in str(plain) and "rotated=True" in str(rotated)


def _saved(layer: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file
