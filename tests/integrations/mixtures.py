"""Small mixtures of experts of transformers."""

import copy
from typing import Any

import torch

import hop

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
}
# Of each model the config and what else it is given: GPT-OSS has transposed weights, biases and gates side by side,
# Nemotron-H no gate.
MODELS = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 80, "head_dim": 16},
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 4, "head_dim": 16},
}


def mixture(name: str, seed: int = 0) -> Any:
    """A model with two layers of four experts, of which a token takes two."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def experts(name: str, count: int = 4, k: int = 2, tokens: int = 16) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The experts of one layer, with weights of its own, and what the router gives them."""
    from transformers import AutoConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    own = {
        "mixtral": (MixtralExperts, {"num_local_experts": count, "hidden_size": 64, "intermediate_size": 96}),
        "gpt_oss": (GptOssExperts, {"num_local_experts": count, "hidden_size": 64, "intermediate_size": 80}),
        "nemotron_h": (
            NemotronHExperts,
            {"n_routed_experts": count, "hidden_size": 64, "moe_intermediate_size": 80, "moe_latent_size": None},
        ),
    }
    cls, sizes = own[name]
    config = AutoConfig.for_model(name, **sizes)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    module = cls(config).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    weights, index = torch.rand(tokens, count).topk(k)
    return module, (torch.randn(tokens, 64), index, weights / weights.sum(1, keepdim=True))


def quantized(module: Any, scheme: Any, **options: Any) -> Any:
    """A copy with codes."""
    module = copy.deepcopy(module)
    return hop.quantize_(module, scheme, **options)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """The cosine of two tensors of one shape."""
    a, b = (t.detach().flatten().double() for t in (one, other))
    return float(torch.nn.functional.cosine_similarity(a, b, 0))
