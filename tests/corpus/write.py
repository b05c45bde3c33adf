"""Write what this version of the library writes, into a folder of its own: python -m tests.corpus.write 0.1

Run once for each version, by that version, and never over a folder that is there: it is what people have on their
disks. What is public and new goes into the folder of the version that brings it.

    spellings.json         values as text, with the numbers of each format; public names; inputs of programs
    numbers.safetensors    plain tensors: inputs, and what must come of them
    tensors.pt, tensors.safetensors            quantized tensors, by torch.save and hop.storage
    layers.pt, layers.safetensors              state dicts of layers, trained and frozen
    optimizers.pt                              state dicts of optimizers
    checkpoint/            hop.checkpoint: step_1 by one process, step_2 by two, of the rows of tensors
    programs/              torch.export.save
"""

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor, Shard

import hop
import hop.checkpoint
from examples.common import json_rows
from hop import formats
from hop.kernels.cpu import native
from tests.corpus import contents
from tests.corpus.contents import FOLDER
from tests.support import processes

SHARDED = ("INT8_ROW", "INT4_32", "FP8_1X128", "MXFP8", "NVFP4")
CHECKPOINTED = (
    *("INT8_TENSOR.both", "INT8_ROW_AFFINE.rowwise", "UINT4_32_AFFINE.both", "INT4_128.rowwise", "TERNARY_ROW.rowwise"),
    *("FP8_COLUMN.rowwise", "FP8_128X128.rowwise", "MXFP8.columnwise", "MXFP4.rowwise", "NVFP4_ROW.both", "NVFP4.both"),
    *("STATE8.rowwise", "STATE4.rowwise", "tiled_int4.rowwise", "decoded_nvfp4.rowwise", "book.rowwise"),
)


def main(version: str) -> None:
    folder = FOLDER / version
    if not hop.__version__.startswith(f"{version}."):
        raise SystemExit(f"this is version {hop.__version__}, which writes no corpus of {version}")
    if folder.exists():
        raise SystemExit(f"{folder} is there: what a version wrote stays as it is")
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        made = Path(temporary) / version
        made.mkdir()
        write(made)
        made.rename(folder)


def write(folder: Path) -> None:
    inputs = contents.all_inputs()
    numbers: dict[str, Tensor] = dict(inputs)
    tensors: dict[str, Any] = {}
    for name, q, usages in contents.tensor_cases():
        tensors[name] = contents.tensor(q, usages, inputs)
        numbers[f"tensor.{name}"] = agreed(lambda name=name: hop.dequantize(tensors[name]))
    torch.save(tensors, folder / "tensors.pt")
    hop.storage.save_file(tensors, folder / "tensors.safetensors")

    layers: dict[str, Any] = {}
    for name, kind, scheme in contents.layer_cases():
        for is_frozen in (False, True):
            x, key = inputs[f"layer.{kind}"], f"{name}.{'frozen' if is_frozen else 'trained'}"
            layer = contents.ready(kind, scheme, x, is_frozen=is_frozen)
            layers[key] = layer.state_dict()
            numbers[f"output.{name}"] = agreed(lambda layer=layer, x=x: contents.plain(layer(x)))
    torch.save(layers, folder / "layers.pt")
    frozen = {f"{key}/{k}": v for key, state in layers.items() if key.endswith("frozen") for k, v in state.items()}
    hop.storage.save_file(frozen, folder / "layers.safetensors")

    optimizers: dict[str, Any] = {}
    for name, make in contents.OPTIMIZERS.items():
        optimizer = make(contents.parameters(inputs))
        for number in range(2):
            contents.step(optimizer, inputs, number)
        optimizers[name] = copy.deepcopy(optimizer.state_dict())
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            numbers[f"optimizer.{name}.{i}.before"] = p.detach().clone()
        contents.step(optimizer, inputs, 2)
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            numbers[f"optimizer.{name}.{i}.after"] = p.detach().clone()

    torch.save(optimizers, folder / "optimizers.pt")

    model = contents.Trained(inputs)
    optimizer = contents.OPTIMIZERS[contents.CHECKPOINTED](model.parameters())
    for number in range(2):
        contents.step(optimizer, inputs, number)
    trained, states = get_state_dict(model, optimizer)
    state = {
        "tensors": {name: tensors[name] for name in CHECKPOINTED},
        "note": [1, "x"],
        "model": trained,
        "optimizer": states,
    }
    hop.checkpoint.save(state, folder / "checkpoint", step=1)
    processes.run(_Sharded(str(folder)))

    (folder / "programs").mkdir()
    taken: dict[str, Any] = {}
    for name, module, keys in contents.programs(inputs):
        args, taken[name] = tuple(inputs[key] for key in keys), keys
        with torch.no_grad():
            program = torch.export.export(module.eval(), args)
        for lowered, ending in ((program, ""), (program.run_decompositions({}), "_lowered")):
            if ending and name not in contents.LOWERED:
                continue
            torch.export.save(contents.without_paths(lowered), folder / "programs" / f"{name}{ending}.pt2")
        for i, y in enumerate(agreed_all(lambda program=program, args=args: program.module()(*args))):
            numbers[f"program.{name}.{i}"] = y
    (folder / "spellings.json").write_text(json_rows({**spellings(), "inputs": taken}) + "\n")
    safetensors.torch.save_file({k: v.contiguous() for k, v in numbers.items()}, folder / "numbers.safetensors")


class _Sharded:
    """The rows of some tensors, and of an optimizer's states, spread over processes."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, mesh: Any, rank: int) -> None:
        hop.checkpoint.save({"tensors": sharded(mesh, rank)}, Path(self.folder) / "checkpoint", step=2)


def sharded(mesh: Any, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    inputs = contents.all_inputs()
    for name in SHARDED:
        t = contents.tensor(contents.quantizers()[name], ("rowwise",), {**inputs, "x": inputs["x.grouped"]})
        local = t[8 * rank : 8 * rank + 8].clone()
        found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=t.shape, stride=t.stride())
    return found


def spellings() -> dict[str, Any]:
    known = {f.name: f for f in formats.FORMATS} | contents.custom()
    return {
        "formats": {name: {"text": str(f), "numbers": list(f.numbers)} for name, f in known.items()},
        "quantizers": {name: str(q) for name, q in (contents.quantizers() | contents.SPELLED).items()},
        "schemes": {name: str(s) for name, s in contents.all_schemes().items()},
        "conventions": {name: str(c) for name, c in contents.CONVENTIONS.items()},
        "names": contents.public_names(),
    }


def agreed(compute: Any) -> Tensor:
    (found,) = agreed_all(lambda: [compute()])
    return found


def agreed_all(compute: Any) -> list[Tensor]:
    """The results, if native kernels of every kind and PyTorch's operators alone agree on them."""
    with torch.no_grad():
        first, *others = [_with(level, compute) for level in ("off", *native.library().levels())]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), "results that depend on the machine"
    return first


def _with(level: str, compute: Any) -> list[Tensor]:
    with native.use(level):
        return list(compute())


if __name__ == "__main__":
    main(*sys.argv[1:])
