"""load_model: small models written as GGUF and as checkpoints of others, against transformers' float models of the same
numbers; saved and loaded again; files that are no such models."""

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from parameterized import parameterized
from torch import nn

import hop
from tests.integrations.gguf_files import MODELS, rounded, write
from tests.integrations.models import IDS, NEEDED, QUIET, saved, values
from tests.interchange.checkpoint_files import pack_words
from tests.support.files import InFolder

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
safetensors: Any = pytest.importorskip("safetensors.torch")
transformers: Any = pytest.importorskip("transformers")

from hop import load_model  # noqa: E402
from hop.integrations.folder_tensors import folder_tensors  # noqa: E402
from hop.interchange import open_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)


def result(model: Any) -> torch.Tensor:
    with torch.no_grad():
        y = model(IDS)
    return y.logits if hasattr(y, "logits") else y.last_hidden_state


def assert_same_parameters(model: Any, want: Any) -> None:
    own = hop.nn.float_state_dict(model)
    for name, tensor in want.state_dict().items():
        assert torch.equal(own[name], tensor), name
    assert own.keys() == want.state_dict().keys()


def assert_same(model: Any, want: Any) -> None:
    """Equal parameters, bit for bit, and results but for the order of sums."""
    assert_same_parameters(model, want)
    a, b = result(model), result(want)
    assert (a - b).abs().max() < 2e-5 * b.abs().max(), (a - b).abs().max()


class TestGGUF(InFolder):
    def loaded(self, named: str, kind: str = "Q8_0", **changes: Any) -> Any:
        write(MODELS[named](), self.folder / "model.gguf", kind, **changes)
        return load_model(self.folder / "model.gguf")

    @parameterized.expand([(name, name) for name in MODELS])
    @pytest.mark.quick(8)
    def test_equals_the_float_model_and_comes_back(self, _name, named):
        model = self.loaded(named)
        assert_same(model, rounded(MODELS[named](), "Q8_0"))
        kept = "kv_b_proj"  # of DeepSeek: blocks of its keys and values run along different dimensions
        layers = [m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not n.endswith(kept)]
        assert layers and all(isinstance(m, hop.nn.Linear) and m.frozen for m in layers)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder, **({} if named != "bert" else {"add_pooling_layer": False}))
        assert_same(again, rounded(MODELS[named](), "Q8_0"))
        assert torch.equal(result(again), result(model))

    @parameterized.expand([(name, name) for name in ("llama", "llama tied", "qwen3 128", "gemma3 256")])
    @pytest.mark.quick(4)
    def test_equals_what_transformers_reads(self, _name, named):
        model = self.loaded(named)
        want = type(model).from_pretrained(self.folder, gguf_file="model.gguf", dtype=torch.float32)
        assert_same(model, want)

    @parameterized.expand([(kind, kind) for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1")])
    @pytest.mark.quick(4)
    def test_types(self, _name, kind):
        model = self.loaded("llama tied", kind)
        want = rounded(MODELS["llama tied"](), kind)
        assert_same(model, want)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert_same(again, want)
        for layer in (model.lm_head, again.lm_head):
            assert layer.weight.quantizer.is_dense() == (kind[:2] == "Q5")

    @parameterized.expand(
        [
            (
                "architecture",
                {"architecture": "falcon"},
                "are llama, qwen2, qwen3, qwen3moe, phi3, gemma,",
            ),
            ("blocks", {"block_count": 10**9}, "has 2 blocks"),
            (
                "text",
                {"embedding_length": "64"},
                "llama.embedding_length must be an integer from 1 to 2147483647, got '64'",
            ),
            (
                "half a block",
                {"block_count": 2.5},
                "llama.block_count must be an integer from 1 to 2147483647, got 2.5",
            ),
            ("heads", {"attention.head_count": 3}, "model.gguf"),
            ("width", {"feed_forward_length": 96}, "model.layers.0.mlp"),
            ("lacks", {"leave": "blk.1.ffn_up.weight"}, "model.layers.1.mlp.up_proj.weight"),
            ("lacks a norm", {"leave": "output_norm.weight"}, "model.norm.weight"),
            ("lacks the table", {"leave": "token_embd.weight"}, "has no matrix 'token_embd.weight'"),
            ("more", {"add": "blk.0.attn_q_norm.weight"}, "'blk.0.attn_q_norm.weight' has no place"),
            ("experts", {"expert_count": 8}, "the metadata lacks llama.expert_used_count"),
            ("scaling", {"rope.scaling.type": "longrope"}, "'longrope'; those that are read are none, linear and yarn"),
        ]
    )
    def test_raises(self, _name, changes, message):
        with self.assertRaises(ValueError) as caught:
            self.loaded("llama", **changes)
        assert message in str(caught.exception) and "model.gguf" in str(caught.exception), caught.exception

    @parameterized.expand(
        [
            ("up", "mixtral", {"leave": "blk.1.ffn_up_exps.weight"}, "'blk.1.ffn_gate_exps.weight' and no 'blk.1"),
            ("gate", "gpt-oss", {"leave": "blk.0.ffn_gate_exps.bias"}, "has tensor 'blk.0.ffn_up_exps.bias' and no"),
            ("down", "qwen3moe", {"leave": "blk.0.ffn_down_exps.weight"}, "missing tensors of the model"),
            ("count", "mixtral", {"expert_count": 3}, "and the model by its configuration (3,"),
            ("used", "qwen3moe", {"expert_used_count": 5}, "expert_used_count must be an integer from 1 to 4, got 5"),
            ("size", "qwen3moe", {"expert_feed_forward_length": 2**31}, "expert_feed_forward_length must be an"),
            ("keys", "deepseek2", {"attention.key_length": 41}, "key_length must be 40 next to a value_length of 32"),
            ("heads", "deepseek2", {"attention.head_count_kv": 2}, "head_count_kv must be 1 or 4, the attention.head_"),
            ("rotated", "deepseek2", {"rope.dimension_count": 40, "attention.key_length": 72}, "an even number below"),
            ("gating", "deepseek2", {"expert_gating_func": 3}, "1, a softmax as in DeepSeek V2, or 2, a sigmoid"),
            ("sigmoid", "deepseek2", {"expert_gating_func": 2}, "['model.layers.1.mlp.gate.e_score_corr"),
            ("softmax", "deepseek_v3", {"expert_gating_func": 1}, "expert_weights_norm must be false"),
            ("bias", "deepseek_v3", {"leave": "blk.1.exp_probs_b.bias"}, "mlp.gate.e_score_correction_bias"),
            ("norm", "deepseek_v3", {"expert_weights_norm": 2}, "expert_weights_norm must be true or false, got 2"),
            ("small groups", "deepseek_v3", {"expert_group_count": 8}, "a divisor of 8 experts, with 2 or more in a"),
            ("few", "deepseek_v3", {"expert_used_count": 5}, "expert_used_count must be at most 4, those of the used"),
            ("sum", "deepseek2", {"expert_weights_norm": True}, "expert_weights_norm must be false"),
            ("groups", "deepseek2 groups", {"expert_group_count": 3}, "a divisor of 4 experts"),
            ("yarn", "deepseek2 groups", {"rope.scaling.yarn_log_multiplier": None}, "lacks deepseek2.rope.scal"),
            ("latent", "deepseek2", {"leave": "blk.0.attn_v_b.weight"}, "has tensor 'blk.0.attn_k_b.weight' and no"),
            ("factors", "phi3 long", {"add_rows": {"rope_factors_long.weight": torch.ones(3)}}, "must have 2 numbers"),
            ("zero", "phi3 long", {"add_rows": {"rope_factors_short.weight": torch.zeros(2)}}, "2 numbers above 0"),
            ("softcapping", "gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be one number"),
            ("padding", "llama", {"tokenizer.padding": 10**6}, "cannot create a model from its configuration"),
        ]
    )  # fmt: skip
    def test_raises_for_other_architectures(self, _name, named, changes, message):
        with self.assertRaises(ValueError) as caught:
            self.loaded(named, **changes)
        assert message in str(caught.exception) and "model.gguf" in str(caught.exception), caught.exception

    @parameterized.expand(
        [
            ("down", "mixtral", {"ffn_down_exps.weight": "Q4_0"}, ("hop1:int8", "hop1:int4")),
            ("gate", "qwen3moe", {"ffn_gate_exps.weight": "Q4_0"}, None),
            ("transposed", "gpt-oss", {"ffn_down_exps.weight": "Q4_0"}, ("hop1:int8", "hop1:int4")),
        ]
    )
    def test_experts_of_two_types(self, _name, named, kinds, want):
        """Each weight keeps its codes; gate and up, which are one parameter, become floats if they differ."""
        model = self.loaded(named, kinds=kinds)
        experts = model.model.layers[1].mlp.experts
        if want is None:
            assert not isinstance(experts.down_proj, hop.QuantizedTensor)
        else:
            assert tuple(str(w.quantizer.format) for w in (experts.gate_up_proj, experts.down_proj)) == want
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert torch.equal(result(again), result(model))
        floats = hop.nn.float_state_dict(model)
        dense = type(model)(model.config).eval()
        dense.load_state_dict({name: floats[name] for name in dense.state_dict()})
        a, b = result(model), result(dense)
        assert (a - b).abs().max() < 2e-5 * b.abs().max()
        gguf = pytest.importorskip("gguf")
        for name in ("gate_up_proj", "down_proj"):  # by the package alone
            arrays = {t.name: t for t in gguf.GGUFReader(self.folder / "model.gguf").tensors}
            parts = ("gate", "up") if name == "gate_up_proj" else ("down",)
            tensors = [arrays[f"blk.1.ffn_{part}_exps.weight"] for part in parts]
            x = [torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type)) for t in tensors]
            if named == "gpt-oss":
                x = [torch.stack(x, 2).flatten(1, 2).transpose(1, 2) if len(x) == 2 else x[0].transpose(1, 2)]
            assert torch.equal(floats[f"model.layers.1.mlp.experts.{name}"], torch.cat(x, 1))

    def test_activations_of_experts(self):
        model = self.loaded("mixtral", "Q4_0", kinds={"ffn_down_exps.weight": "Q8_0"})
        write(MODELS["mixtral"](), self.folder / "model.gguf", "Q4_0", kinds={"ffn_down_exps.weight": "Q8_0"})
        codes = load_model(self.folder / "model.gguf", activations=hop.presets.INT8_32)
        a, b = result(codes), result(model)
        assert not torch.equal(a, b) and (a - b).square().mean() < 0.02 * b.square().mean()

    @parameterized.expand([("mixtral",), ("qwen3moe",), ("deepseek2",), ("deepseek_v3",)])
    def test_merged_experts(self, named):
        """Gate and up in one tensor, which llama.cpp's converter can write."""
        want = MODELS[named]()
        stack = want.model.layers[1].mlp.experts.gate_up_proj.detach()
        parts = {"leave": ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight"]}
        assert_same(self.loaded(named, "F32", **parts, add_rows={"blk.1.ffn_gate_up_exps.weight": stack}), want)
        with self.assertRaisesRegex(
            ValueError, "'model.layers.1.mlp.experts.gate_up_proj' of the model is there twice"
        ):
            self.loaded(named, "F32", add_rows={"blk.1.ffn_gate_up_exps.weight": stack})

    def test_mxfp4_experts(self):
        assert_same(self.loaded("gpt-oss", "MXFP4"), rounded(MODELS["gpt-oss"](), "MXFP4"))

    def test_latent_keys_in_one_tensor(self):
        model = self.loaded("deepseek2", whole_latent=True)
        layer = model.model.layers[1].self_attn.kv_b_proj
        assert isinstance(layer.weight, hop.QuantizedTensor)
        write(MODELS["deepseek2"](), self.folder / "new.gguf", "F32")
        exact = load_model(self.folder / "new.gguf")
        assert_same(exact, MODELS["deepseek2"]())
        assert (result(model) - result(exact)).square().mean() < 1e-2 * result(exact).square().mean()

    def test_query_key_and_value_of_phi3_in_three_tensors(self):
        want = MODELS["phi3"]()
        parts = want.model.layers[0].self_attn.qkv_proj.weight.detach().split([64, 32, 32])
        rows = {f"blk.0.attn_{x}.weight": part for x, part in zip("qkv", parts, strict=True)}
        assert_same(self.loaded("phi3", "F32", leave="blk.0.attn_qkv.weight", add_rows=rows), want)

    def test_long_contexts_of_phi3(self):
        """Divisors for short contexts up to the original length, and for long ones above."""
        model, want = self.loaded("phi3 long", "F32"), MODELS["phi3 long"]()
        for length in (8, 9, 30):
            ids = torch.randint(0, 96, (1, length), generator=torch.Generator().manual_seed(length))
            with torch.no_grad():
                a, b = model(ids).logits, want(ids).logits
            assert (a - b).abs().max() < 2e-5 * b.abs().max()

    def test_positions_are_scaled(self):
        linear = self.loaded("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
        assert linear.config.rope_parameters["factor"] == 4 and linear.config.rope_parameters["rope_type"] == "linear"
        want = MODELS["llama"]().config
        want.rope_parameters = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        scaled = type(linear)(want).model.rotary_emb.inv_freq
        plain = type(linear)(MODELS["llama"]().config).model.rotary_emb.inv_freq
        own = self.loaded("llama", add_rows={"rope_freqs.weight": plain / scaled})
        assert torch.allclose(own.model.rotary_emb.inv_freq, scaled, rtol=1e-5)
        with self.assertRaisesRegex(ValueError, "not that of Llama 3.1"):
            self.loaded("llama", add_rows={"rope_freqs.weight": torch.full((8,), 3.0)})

    def test_arguments(self):
        for path, options, error, message in (
            (3, {}, TypeError, "path must be text or a Path"),
            ("nowhere.gguf", {}, FileNotFoundError, "path must be an existing file or folder"),
            (self.folder, {}, FileNotFoundError, "has no config.json"),
            (self.folder, {"dtype": torch.int8}, TypeError, "dtype must be a float dtype"),
            (self.folder, {"pack": 1}, TypeError, "pack must be True or False"),
            (self.folder, {"activations": "int8"}, TypeError, "activations must be a Quantizer, 'file' or None"),
            (self.folder, {"activations": hop.presets.FP8_ROW}, ValueError, "activations must be integers in rows"),
            (self.folder, {"activations": hop.presets.INT8_TENSOR_STATIC}, ValueError, "with dynamic scales"),
            (self.folder, {"exact": 1}, TypeError, "exact must be True or False"),
            (self.folder, {"exact": True}, ValueError, "exact=True, and activations=None leaves the inputs"),
        ):
            with self.assertRaisesRegex(error, message):
                load_model(path, **options)

    @parameterized.expand(
        [("Q5_0", hop.presets.INT8_32), ("Q4_1", hop.presets.INT8_256), ("MXFP4", hop.presets.INT8_32)]
    )
    @pytest.mark.quick(3)
    def test_activations(self, kind, q):
        """Inputs of linear layers become codes in each call; those of other weights, and rows of a table, stay."""
        write(MODELS["llama tied"](), self.folder / "model.gguf", kind)
        floats = load_model(self.folder / "model.gguf")
        model = load_model(self.folder / "model.gguf", activations=q)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, hop.nn.Linear)}
        assert len(layers) == 15 and "lm_head" in layers
        x = torch.randn(3, 64)
        for layer in (layers["lm_head"], layers["model.layers.1.self_attn.q_proj"]):
            want = hop.scaled(torch.ops.aten.linear.default, torch.float32, hop.quantize(q, x), layer.weight)
            assert torch.equal(layer(x), want)
        assert torch.equal(model.model.embed_tokens(IDS), floats.model.embed_tokens(IDS))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        got, exact = result(model), result(floats)
        assert not torch.equal(got, exact)
        assert (got - exact).abs().max() < 0.1 * exact.abs().max()
        with saved(model) as folder:
            assert torch.equal(result(type(model).from_pretrained(folder)), got)

    @parameterized.expand(
        [("Q4_0", "llama tied", {"use_cache": False}, {}), ("Q8_0", "bert", {}, {"add_pooling_layer": False})]
    )
    @pytest.mark.full
    def test_exact(self, kind, named, kwargs, whole):
        """The same bits exported, lowered, in every batch and after saving."""
        ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(0))
        write(MODELS[named](), self.folder / "model.gguf", kind)
        model = load_model(self.folder / "model.gguf", activations=hop.presets.INT8_32, exact=True)
        with torch.no_grad(), saved(model) as folder:
            want = model(ids)[0]
            assert torch.equal(type(model).from_pretrained(folder, **whole)(ids)[0], want)
            assert torch.equal(torch.cat([model(one[None])[0] for one in ids]), want)
            program = torch.export.export(model, (ids,), kwargs)
            report = hop.export.check_exact(program)
            assert report.exact, report
            for run in (program.module(), program.run_decompositions({}).module()):
                assert torch.equal(run(ids, **kwargs)[0], want)

    def test_not_exact(self):
        file, options = self.folder / "model.gguf", {"activations": hop.presets.INT8_32, "exact": True}
        write(MODELS["bert"](), file, "Q8_0")
        with self.assertRaisesRegex(ValueError, r"load_model: exact=True, and in the scheme .* rows share a scale"):
            load_model(file, activations=hop.presets.INT8_TENSOR, exact=True)
        write(MODELS["llama"](), file, "F32")
        with self.assertRaisesRegex(
            ValueError, r"load_model: exact=True.*stay in floats.*q_proj \(Linear\).*in the file"
        ):
            load_model(file, **options)
        write(MODELS["llama"](), file, "MXFP4")
        with self.assertRaisesRegex(ValueError, r"load_model: exact=True, and in the scheme .* sum floats"):
            load_model(file, **options)

    def test_bfloat16(self):
        write(MODELS["llama"](), self.folder / "model.gguf")
        model = load_model(self.folder / "model.gguf", dtype=torch.bfloat16, pack=False)
        exact = result(rounded(MODELS["llama"](), "Q8_0"))
        want = rounded(MODELS["llama"](), "Q8_0").to(torch.bfloat16)
        assert_same_parameters(model, want)
        got, other = result(model), result(want)
        assert got.dtype == torch.bfloat16
        assert (got - exact).square().mean() < 1.5 * (other - exact).square().mean()

    def test_tied_is_one_table(self):
        model = self.loaded("gemma3")
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert isinstance(model.model.embed_tokens, hop.nn.layers.linear.ScaledEmbedding)
        assert values(model.lm_head.weight).shape == (96, 64)
        assert type(model.dequantize().model.embed_tokens).__name__ == "Gemma3TextScaledWordEmbedding"


def gptq(weight: torch.Tensor, ordered: bool = False, bits: int = 4) -> Any:
    """Parts of a weight as GPTQ writes them, in groups of 32, and its numbers."""
    rows, size = weight.shape
    rng = np.random.default_rng(rows)
    group = np.arange(size) // 32
    group = rng.permutation(group) if ordered else group
    scales = (weight.abs().amax() / 8 * (1 + rng.random((size // 32, rows)))).to(torch.float16).numpy()
    zeros = rng.integers(6, 10, (size // 32, rows))
    codes = np.clip(np.rint(weight.numpy().T / scales[group]) + zeros[group], 0, 2**bits - 1).astype(np.int64)
    want = scales[group].astype(np.float32) * (codes - zeros[group]).astype(np.float32)
    parts = {
        "qweight": pack_words(codes.T, bits).T,
        "qzeros": pack_words(zeros, bits),
        "scales": scales,
        "g_idx": group.astype(np.int32),
    }
    return parts, torch.from_numpy(want.T.copy())


def compressed(weight: torch.Tensor) -> Any:
    """Parts as compressed-tensors packs them."""
    rows, size = weight.shape
    scale = (weight.reshape(rows, -1, 32).abs().amax(2) / 7).to(torch.float16)
    codes = (weight.reshape(rows, -1, 32) / scale[..., None]).round().clamp(-8, 7)
    want = (codes * scale[..., None].float()).reshape(rows, size)
    packed = pack_words((codes.reshape(rows, size) + 8).long().numpy(), 4)
    return {"weight_packed": packed, "weight_scale": scale.numpy(), "weight_shape": np.array([rows, size])}, want


def fp8(weight: torch.Tensor) -> Any:
    """Parts in blocks of 32 by 32, whose scales are no powers of two."""
    blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    want = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
    return {"weight": codes.reshape(weight.shape), "weight_scale_inv": scale}, want


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2", "desc_act": True}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
FOLDERS: dict[str, Any] = {
    "gptq": (GPTQ, gptq),
    "gptq ordered": (GPTQ, lambda weight: gptq(weight, ordered=True)),
    "compressed": (COMPRESSED, compressed),
    "fp8": (FP8, fp8),
}


def fp8_of_tensor(weight: torch.Tensor) -> Any:
    """Parts with one scale, which for gate and up may differ."""
    scale = weight.abs().amax() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.ones(())}
    return parts, codes.float() * scale


def fp8_of_stack(stack: torch.Tensor) -> Any:
    """A stack with a scale for each expert, as ModelOpt writes them."""
    scale = stack.abs().amax((1, 2)) / 448
    codes = (stack / scale[:, None, None]).to(torch.float8_e4m3fn)
    parts = {"": codes, "_weight_scale": scale, "_input_scale": torch.ones(())}
    return parts, codes.float() * scale[:, None, None]


def mxfp4_of_stack(stack: torch.Tensor) -> Any:
    """A stack as GPT-OSS has it in its files, with the numbers that transformers computes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weight = hop.quantize(hop.presets.MXFP4, stack.transpose(1, 2).contiguous())
    parts = {"_blocks": weight.codes.unflatten(2, (-1, 16)), "_scales": weight.scale.view(torch.uint8)}
    return parts, convert_moe_packed_tensors(parts["_blocks"], parts["_scales"]).float()


def nvfp4_of_stack(stack: torch.Tensor) -> Any:
    """A transposed stack, with one outer scale."""
    scale = stack.unflatten(1, (-1, 16)).abs().amax(2) / 6
    outer = scale.amax() / 448
    scale = (scale / outer).to(torch.float8_e4m3fn)
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = stack.unflatten(1, (-1, 16)) / (scale.float() * outer)[:, :, None]
    nearest = (x.abs().unsqueeze(-1) - numbers).abs().argmin(-1)
    want = (numbers[nearest] * x.sign() * (scale.float() * outer)[:, :, None]).flatten(1, 2)
    codes = (nearest + 8 * (x < 0)).flatten(1, 2).to(torch.uint8)
    parts = {"": codes[:, ::2] | (codes[:, 1::2] << 4), "_weight_scale": scale, "_weight_scale_2": outer}
    return parts, want


TENSOR_SCALES = {"quant_method": "modelopt", "quant_algo": "FP8"}
STACKS: dict[str, Any] = {
    "modelopt per expert": (TENSOR_SCALES, fp8_of_tensor),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_of_stack),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4_of_stack),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4_of_stack),
}


class TestFolder(InFolder):
    def written(self, model: Any, kind: str) -> Any:
        """The folder of a model whose layers but for the head are quantized; and the model of the same numbers."""
        config, make = FOLDERS[kind]
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for name, layer in model.named_modules():
            if type(layer) is nn.Linear and name != "lm_head":
                parts, want = make(layer.weight.detach())
                del state[f"{name}.weight"]
                state |= {f"{name}.{end}": torch.as_tensor(part).contiguous() for end, part in parts.items()}
                layer.weight.data = want
        if model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        model.save_pretrained(self.folder)
        held = json.loads((self.folder / "config.json").read_text())
        (self.folder / "config.json").write_text(json.dumps({**held, "quantization_config": config}))
        safetensors.save_file(state, self.folder / "model.safetensors")
        return model

    @parameterized.expand(
        [(f"{name} {kind}", name, kind) for name in ("llama tied", "qwen3", "gptneox", "bert") for kind in FOLDERS]
    )
    @pytest.mark.quick(8)
    def test_equals_the_float_model_and_comes_back(self, _name, named, kind):
        want = self.written(MODELS[named](), kind)
        model = load_model(self.folder)
        assert_same(model, want)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder, **({} if named != "bert" else {"add_pooling_layer": False}))
        assert_same(again, want)
        assert torch.equal(result(again), result(model))
        ordered = [name for name, m in again.named_modules() if getattr(m, "input_order", None) is not None]
        assert bool(ordered) == (kind == "gptq ordered")
        assert again.config.quantization_config.to_dict().get("input_orders", []) == sorted(ordered)

    def test_ordered_columns(self):
        """state_dicts, layers of their own and compiled programs have the order too."""
        want = self.written(MODELS["llama"](), "gptq ordered")
        model = load_model(self.folder)
        layer, of = model.model.layers[0].mlp.down_proj, want.model.layers[0].mlp.down_proj
        assert torch.equal(layer.to_float().weight, of.weight) and not hasattr(layer.to_float(), "input_order")
        assert "input_order" in layer.state_dict() and layer.input_order.dtype == torch.int64
        fresh = hop.nn.Linear(128, 64, bias=False, scheme=layer.scheme)
        fresh.load_state_dict(layer.state_dict(), assign=True)
        x = torch.randn(3, 128)
        assert torch.equal(fresh(x), layer(x))
        assert (layer(x) - of(x)).abs().max() < 1e-5 * of(x).abs().max()
        assert_same(model.dequantize(), want)

    @parameterized.expand(
        [
            (f"{name} {kind}", name, kind)
            for name, kind in (
                *itertools.product(("mixtral", "qwen3moe", "deepseek_v3"), ("gptq", "fp8")),
                ("mixtral", "gptq ordered"),
                ("qwen3moe", "modelopt per expert"),
                ("mixtral", "compressed"),
                ("gpt-oss", "mxfp4"),
                ("gpt-oss", "modelopt"),
                ("gpt-oss", "nvfp4"),
            )
        ]
    )
    @pytest.mark.quick(4)
    def test_experts(self, _name, named, kind):
        """Experts in matrices of their own, or in stacks, become the model's stacks, with the file's codes."""
        want = self.written_experts(MODELS[named](), kind)
        model = load_model(self.folder, dtype=torch.float32)
        assert_same_parameters(model, want)
        a, b = result(model), result(want)
        assert (a - b).abs().max() < 1e-4 * b.abs().max(), (a - b).abs().max()
        stacks = [m for m in model.modules() if hasattr(m, "gate_up_proj") and m.gate_up_proj.dim() == 3]
        codes = [
            isinstance(getattr(m, name), hop.QuantizedTensor) for m in stacks for name in ("gate_up_proj", "down_proj")
        ]
        assert codes and all(codes) == (kind != "gptq ordered") and any(codes) == all(codes)
        with saved(model) as folder:
            again = type(model).from_pretrained(folder)
        assert_same_parameters(again, want)
        assert torch.equal(result(again), result(model))

    def written_experts(self, model: Any, kind: str) -> Any:
        """The folder of a mixture whose experts alone are quantized; and the model of the same numbers."""
        config, make = {**FOLDERS, **STACKS}[kind]
        state = {name: t.clone() for name, t in model.state_dict().items()}
        for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            stack, parameter = state.pop(name), model.get_parameter(name)
            if kind in STACKS and config is not TENSOR_SCALES:
                parts, want = make(stack)
                state |= {f"{name}{end}": part for end, part in parts.items()}
                parameter.data.copy_(want)
                continue
            block, _, which = name.rpartition(".")
            halves = stack.chunk(2, 1) if which == "gate_up_proj" else (stack,)
            matrices = ("gate_proj", "up_proj") if which == "gate_up_proj" else ("down_proj",)
            if model.config.model_type == "mixtral":
                block = block.replace(".mlp.", ".block_sparse_moe.")
                matrices = tuple({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[each] for each in matrices)
            wanted = []
            for half, matrix in zip(halves, matrices, strict=True):
                each = [make(expert.contiguous()) for expert in half]
                wanted.append(torch.stack([want for _, want in each]))
                for i, (parts, _) in enumerate(each):
                    ends = {f"{block}.{i}.{matrix}.{end}": torch.as_tensor(part) for end, part in parts.items()}
                    state |= {end: part.contiguous() for end, part in ends.items()}
            parameter.data.copy_(torch.cat(wanted, 1))
        if model.config.model_type == "mixtral":
            state = {name.replace(".mlp.gate.", ".block_sparse_moe.gate."): t for name, t in state.items()}
        model.config.save_pretrained(self.folder)
        held = json.loads((self.folder / "config.json").read_text()) | {"architectures": [type(model).__name__]}
        (self.folder / "config.json").write_text(json.dumps({**held, "quantization_config": config}))
        safetensors.save_file(state, self.folder / "model.safetensors")
        return model

    def test_scales_of_activations_are_left_out(self):
        """Scales are whole words of a name: others that end alike are tensors of the model."""
        scales = ("k_scale", "a.k_scale", "a.k_proj.v_scale", "a.input_scale", "a.kv_input_scale", "x_output_scale")
        own = ("block_scale", "a.block_scale", "a.mask_scale", "a.k_scale.weight", "a.k_scales")
        state = {name: torch.tensor(float(i)) for i, name in enumerate(scales + own)}
        (self.folder / "config.json").write_text("{}")
        safetensors.save_file(state, self.folder / "model.safetensors")
        found = {name: t for name, t, _ in folder_tensors(self.folder, open_checkpoint(self.folder), "llama")}
        assert found.keys() == set(own) and all(torch.equal(t, state[name]) for name, t in found.items())

    def test_experts_missing(self):
        self.written_experts(MODELS["mixtral"](), "fp8")
        file = self.folder / "model.safetensors"
        state = safetensors.load_file(file)
        whole = "model.layers.1.block_sparse_moe.experts"
        for change, message in (
            ({f"{whole}.2.w3.weight": None, f"{whole}.2.w3.weight_scale_inv": None}, "lacks the up_proj of expert 2"),
            ({f"{whole}.3.w1.weight": torch.ones(128, 32)}, "do not have the same shape"),
            ({f"{whole}.99999.w2.weight": torch.ones(64, 128)}, "down_proj' lacks the down_proj of expert 4, and has"),
            ({f"{whole}.2.gate_proj.weight": torch.ones(128, 64)}, "are the same matrix of an expert; remove one"),
        ):
            changed = {name: t for name, t in (state | change).items() if t is not None}
            safetensors.save_file(
                {n: t for n, t in changed.items() if not n.startswith(f"{whole}.3.w1.weight_s")}, file
            )
            with self.assertRaises(ValueError) as caught:
                load_model(self.folder)
            assert message in str(caught.exception) and str(self.folder) in str(caught.exception), caught.exception

    @parameterized.expand(
        [
            ("layers", "llama", {"num_hidden_layers": 10**9}, "num_hidden_layers of config.json must be an integer"),
            ("no layers", "qwen3", {"num_hidden_layers": "2"}, "num_hidden_layers of config.json must be an integer"),
            ("labels", "llama", {"num_labels": 10**9}, "num_labels of config.json must be an integer up to 65536"),
            ("rotated", "gptneox", {"rope_parameters": {"partial_rotary_factor": 1e9}}, "above 0 and at most 1"),
            ("rotated, old", "gptneox", {"rotary_pct": 1e9}, "rotary_pct of config.json must be a number above 0"),
            ("kind", "llama", {"model_type": "bloom", "n_layer": 10**9}, "model_type is 'bloom'"),
            ("class", "llama", {"architectures": ["pipeline"]}, "architectures of config.json names no model"),
            ("other class", "llama", {"architectures": ["GPT2LMHeadModel"]}, "architectures of config.json names no"),
            ("name", "llama", {"architectures": ["x" * 10**5]}, "architectures of config.json names no model"),
            ("width", "llama", {"intermediate_size": 2**40}, "and the model by its configuration (64, 1099511627776)"),
            ("overflow", "llama", {"hidden_size": 2**62, "intermediate_size": 2**62}, "cannot create a model"),
            ("nested", "llama", {"x": json.loads("[" * 200 + "]" * 200)}, "has lists and objects nested"),
        ]
    )  # fmt: skip
    def test_hostile(self, _name, named, changes, message):
        """Numbers by which transformers would allocate or repeat, and names by which it would import."""
        self.written(MODELS[named](), "fp8")
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        with self.assertRaises(ValueError) as caught:
            load_model(self.folder)
        text = str(caught.exception)
        assert message in text and str(self.folder) in text and len(text) < len(str(self.folder)) + 600, text

    def test_code_of_the_folder(self):
        """What auto_map names is not run, and nobody is asked whether to."""
        self.written(MODELS["llama"](), "fp8")
        file, made = self.folder / "config.json", self.folder / "ran"
        (self.folder / "own.py").write_text(f"open({str(made)!r}, 'w')\n")
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.C"}}))
        load_model(self.folder)
        file.write_text(json.dumps(config | {"auto_map": {"AutoConfig": "own.C"}, "model_type": "own"}))
        with self.assertRaisesRegex(ValueError, "model_type is 'own'"):
            load_model(self.folder)
        assert not made.exists()

    def test_missing_and_large(self):
        """A tensor that the file lacks is not made, whatever size it would have."""
        model = self.written(MODELS["bert"](), "fp8")
        state = {
            name: t
            for name, t in safetensors.load_file(self.folder / "model.safetensors").items()
            if "position" not in name
        }
        safetensors.save_file(state, self.folder / "model.safetensors")
        file = self.folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 2**40}))
        with self.assertRaisesRegex(
            ValueError, "missing tensors of the model: .'embeddings.position_embeddings.weight'"
        ):
            load_model(self.folder)
        assert model.config.max_position_embeddings == 64
