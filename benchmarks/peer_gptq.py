"""Compare GPTQ's objective, |(W - Ŵ) X|² / |W X|², with gptqmodel's: same layers, inputs, scales and settings.

    python -m benchmarks.peer_gptq                prints, and writes benchmarks/results/peer_gptq.json

The layers are those of all-MiniLM-L6-v2, with the float model's inputs for the 64 sentences of draw 0 of
benchmarks.algorithms; int4 in groups of 128, symmetric, damping 0.01, columns in their own order and by input magnitude
with static groups. gptqmodel computes the scales and ours uses the same ones, so that only the choice of codes differs.
"Ours, own scales" is hop.algorithms.gptq with presets.INT4_128.

gptqmodel is not among the extras, because it needs newer packages than the pinned ones. Install it in a separate
environment with --no-deps, and the packages that its GPTQ imports: logbar, device-smi, tokenicer, defuser,
threadpoolctl, pypcre.
"""

import copy
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.algorithms import Data
from examples.common import json_rows
from hop import formats, presets
from hop.algorithms import GPTQ
from hop.algorithms.grid import Grid
from hop.algorithms.solving import error

RESULTS = Path(__file__).parent / "results" / "peer_gptq.json"
GROUP, DAMPING = 128, 0.01
LAYERS = [
    f"bert.encoder.layer.{i}.{name}"
    for i in (0, 3, 5)
    for name in ("attention.self.query", "attention.output.dense", "intermediate.dense", "output.dense")
]


def peer() -> Any:
    """gptqmodel's GPTQ and QuantizeConfig."""
    try:
        core = importlib.import_module("gptqmodel.quantization.gptq")
        return core.GPTQ, importlib.import_module("gptqmodel.quantization").QuantizeConfig
    except ImportError as problem:
        raise SystemExit(f"no gptqmodel: {problem}; see the first lines of benchmarks/peer_gptq.py") from problem


def inputs(data: Data) -> dict[str, Tensor]:
    """The inputs of each layer for the calibration sentences, as rows."""
    seen: dict[str, list[Tensor]] = {name: [] for name in LAYERS}
    modules: Any = dict(data.model.named_modules())
    handles = [
        modules[name].register_forward_pre_hook(lambda m, args, name=name: seen[name].append(args[0].flatten(0, -2)))
        for name in LAYERS
    ]
    with torch.no_grad():
        for batch in data.looked_at:
            data.model(*batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


def theirs(layer: nn.Linear, x: Tensor, order: bool) -> tuple[Tensor, Tensor]:
    """gptqmodel's weight, and its scales, one per element."""
    algorithm, config = peer()
    module = copy.deepcopy(layer)
    quantizer = algorithm(module, config(bits=4, group_size=GROUP, desc_act=order, sym=True, act_group_aware=False))
    quantizer.quantizer.configure(perchannel=True)
    quantizer.add_batch(x.unsqueeze(0), module(x).unsqueeze(0))
    # Static groups in both orders, so that scales are those of the float weight.
    scale, *_ = quantizer.hf_quantize(
        percdamp=DAMPING, group_size=GROUP, actorder=order, static_groups=True, act_group_aware=False
    )
    return module.weight.detach().float(), scale.float().repeat_interleave(GROUP, 1)


@torch.no_grad()
def compared(name: str, layer: nn.Linear, x: Tensor) -> dict[str, Any]:
    weight = layer.weight.detach().float()
    hessian = x.double().t() @ x.double()
    whole = error(weight, hessian)
    row: dict[str, Any] = {"layer": name, "rows": len(x)}
    for order in (False, True):
        settings = GPTQ(damping=DAMPING, order=order)
        got, scale = theirs(layer, x, order)
        found: dict[str, float] = {"theirs": error(weight - got, hessian) / whole}
        q = presets.INT4_128
        grids = {
            "ours": Grid(formats.INT4, scale, None),
            "ours, own scales": Grid.of(q, q.quantize(weight), weight.shape),
        }
        for which, grid in grids.items():
            codes = settings.solve(weight, grid, hessian).codes
            assert codes is not None
            found[which] = error(weight - grid.decode(codes), hessian) / whole
            nearest = error(weight - grid.decode(grid.encode(weight)), hessian) / whole
            found[which.replace("ours", "nearest")] = nearest
        row["act order" if order else "as they lie"] = found
    return row


def main() -> None:
    torch.set_num_threads(1)
    peer()
    data = Data(0)
    modules: Any = dict(data.model.named_modules())
    rows = []
    for name, x in inputs(data).items():
        rows.append(compared(name.removeprefix("bert.encoder."), modules[name], x))
        for order in ("as they lie", "act order"):
            f = rows[-1][order]
            print(
                f"{rows[-1]['layer']:32} {order:12} theirs {f['theirs']:.6f}  ours {f['ours']:.6f}  "
                f"{f['ours'] / f['theirs']:.4f}  own scales {f['ours, own scales']:.6f}",
                flush=True,
            )
    version = importlib.import_module("importlib.metadata").version("gptqmodel")
    found = {"gptqmodel": version, "group": GROUP, "damping": DAMPING, "rows": rows}
    RESULTS.write_text(json_rows(found) + "\n")


if __name__ == "__main__":
    main()
