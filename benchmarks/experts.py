"""A block of experts from transformers in int8, against its float versions: a loop over experts, and grouped_mm."""

import copy
import functools
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

import hop
from benchmarks.peers import FLOAT, NAME
from benchmarks.timing import Row, interleaved

HIDDEN, INTERMEDIATE, EXPERTS, TOP = 1024, 3584, 8, 2
TOKENS = (1, 16, 128, 512)
# Targets: at most 0.8 of the loop's time, and at most grouped_mm's time.
_PEERS = {"eager": (f"{NAME}, loop", "<= 0.8"), "grouped_mm": (f"{NAME}, grouped_mm", "<= 1.0")}


def experts() -> Iterator[Row]:
    """A Mixtral-like block (hidden 1024, intermediate 3584, 8 experts of which a token uses 2), router included."""
    if find_spec("transformers") is None:
        print("no experts without transformers: pip install --editable '.[demo]'")
        return
    peers = {name: _block(FLOAT, name) for name in _PEERS}
    ours = {dtype: hop.quantize_(_block(dtype, "eager"), "int8") for dtype in dict.fromkeys((FLOAT, torch.float32))}
    for tokens in TOKENS:
        x = torch.randn(1, tokens, HIDDEN)
        calls = [functools.partial(block, x.to(dtype)) for dtype, block in ours.items()]
        calls += [functools.partial(block, x.to(FLOAT)) for block in peers.values()]
        with torch.inference_mode():
            times = interleaved(calls, budget_s=15.0)
        for dtype, ours_ms in zip(ours, times, strict=False):
            case = f"int8 in {str(dtype).removeprefix('torch.')}, {tokens} tokens"
            for (peer, target), peer_ms in zip(_PEERS.values(), times[len(ours) :], strict=True):
                yield Row("experts", case, ours_ms, peer, peer_ms, target)


def _block(dtype: torch.dtype, implementation: str) -> Any:
    """A block with random weights, the same for each dtype up to rounding, and a separate config."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    sizes: Any = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    config = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=TOP)
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(copy.deepcopy(config)).eval()
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return block.to(dtype)


GROUPS = [experts]
