"""A row of the page: their code, ours, what differs; and how both are run on one model."""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import hop

OURS = "import torch, hop, hop.nn, hop.optim\nfrom hop import presets, recipes, schemes"
NONE = "none"


@dataclass(frozen=True)
class Row:
    """Two pieces of code that begin with a float `model`, its input `x`, and a weight `w`.

    Args:
        theirs: their call.
        ours: ours, or NONE.
        differs: what differs in meaning.
        result: an expression, what is compared.
        bound: how far the two results may lie apart, as |a - b| / |a|.
        size: bytes of the state_dict, ours over theirs, within 10 %.
        facts: expressions of `their` and `our`, what the code left, which say what `differs` says.
        needs: what their call needs besides its package.
        after: whether our code goes on where theirs ended.
        least: the version of torch from which on their call works.
    """

    theirs: str
    ours: str
    differs: str
    result: str = "model(x)"
    bound: float = 0.0
    size: float | None = None
    facts: tuple[str, ...] = ()
    needs: str = ""
    after: bool = False
    least: tuple[int, int] = (2, 11)


@dataclass(frozen=True)
class Library:
    """A table of the page.

    Args:
        name: of the table.
        package: that must be installed, as it is imported.
        imports: the code before each row of theirs.
        least: the version of torch from which on their calls do what the page says.
    """

    name: str
    package: str
    imports: str
    rows: tuple[Row, ...]
    least: tuple[int, int] = (2, 11)


class Mixed(nn.Module):
    """Layers of three types."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear, self.conv = nn.Embedding(16, 64), nn.Linear(64, 64), nn.Conv2d(4, 8, 3)


def start(file: Path, needs: str) -> dict[str, Any]:
    """The model, input and weight of both sides, on a GPU if their call needs one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256, bias=False)).eval()
    x, mixed = torch.randn(16, 256), Mixed()
    if needs:
        model, x, mixed = model.cuda(), x.cuda(), mixed.cuda()
    w = next(model.parameters()).detach().clone()
    named = {"model": model, "x": x, "w": w, "mixed": mixed, "Mixed": Mixed, "file": file}
    return named | {f.__name__: f for f in (trained, gradients, weights, numbers, converted, evaluated)}


def run(code: str, imports: str, names: dict[str, Any]) -> SimpleNamespace:
    """Run the code and return its variables."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # of the other library
        exec(imports, names)
        exec(code, names)
    return SimpleNamespace(**{k: v for k, v in names.items() if not k.startswith("__")})


def sides(library: Library, row: Row, folder: Path) -> tuple[SimpleNamespace, SimpleNamespace | None]:
    """The variables after their code, and after ours."""
    names = start(folder / "theirs", row.needs)
    their = run(row.theirs, library.imports, names)
    if row.ours == NONE:
        return their, None
    return their, run(row.ours, OURS, dict(names) if row.after else start(folder / "ours", row.needs))


def result(row: Row, side: SimpleNamespace) -> Tensor:
    """The compared result in float64."""
    names = vars(side)
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        value: Tensor = eval(row.result, dict(names))
    return value.detach().double().cpu()


def holds(fact: str, their: SimpleNamespace, our: SimpleNamespace | None) -> bool:
    names = {"their": their, "our": our, "hop": hop, "torch": torch, "numbers": numbers, "codes": codes}
    return bool(eval(fact, names))


def size(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a state_dict, whatever they hold them in."""
    return sum(_bytes(value) for value in state.values())


def _bytes(value: Any) -> int:
    if isinstance(value, nn.Parameter):
        value = value.data
    if hasattr(value, "__tensor_flatten__"):
        return sum(_bytes(getattr(value, name)) for name in value.__tensor_flatten__()[0])
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


# ---- what rows compare


def numbers(value: Any) -> Tensor:
    """The float values of any library's tensor."""
    if isinstance(value, hop.QuantizedTensor):
        return hop.dequantize(value).float()
    return value.dequantize().float() if hasattr(value, "__tensor_flatten__") else value.float()


def codes(weight: Any) -> Tensor:
    """The codes of our tensor, one for each element, in the plain layout."""
    return hop.unpack(weight).codes


def weights(model: nn.Module) -> Tensor:
    """All weights, as what they stand for."""
    return torch.cat([numbers(m.weight).flatten() for m in model.modules() if hasattr(m, "weight")])


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def gradients(model: nn.Module, x: Tensor) -> Tensor:
    """The result, and the gradients of all parameters."""
    model.train()
    y = model(x)
    y.square().mean().backward()
    return torch.cat([y.detach().flatten(), *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def trained(model: nn.Module, optimizer: Any, steps: int = 5) -> Tensor:
    """How far the parameters went in a few steps, with gradients drawn alike."""
    generator = torch.Generator().manual_seed(1)
    before = [copy.deepcopy(p.detach()) for p in model.parameters()]
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return torch.cat([(p - b).flatten() for p, b in zip(model.parameters(), before, strict=True)])


def converted(module: nn.Module) -> list[str]:
    """The names of the layers that compute with another weight than a plain Parameter."""
    return [n for n, m in module.named_children() if is_quantized(m)]


def is_quantized(module: Any) -> bool:
    theirs = type(module).__module__.startswith(("optimum", "bitsandbytes"))
    return theirs or hasattr(getattr(module, "weight", None), "__tensor_flatten__")
