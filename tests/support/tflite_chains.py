"""Programs of random operators: chains of quantized ones, of random kinds, shapes, scales and zero points."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.tflite_models import Point, Weights


class Chain(nn.Module):
    """Up to twelve operators of random kinds, shapes, scales and zero points, one after the other; bilinear resizes
    among them if asked."""

    def __init__(self, seed: int, resizes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps = nn.ModuleList()
        channels, size = _draw(1, 6), _draw(6, 14)
        self.shape = (_draw(1, 3), channels, size, _draw(6, 14))
        self.first = _point()
        x = self.first(torch.randn(self.shape))
        kept = [x]
        for _ in range(_draw(2, 12)):
            made = _step(x, kept, resizes)
            x = made(x, kept)
            kept.append(x)
            self.steps.append(made)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        kept = [x]
        for step in self.steps:
            x = step(x, kept)
            kept.append(x)
        return x


class Step(nn.Module):
    """A function of the last value and of all before it."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.function, self.own = function, nn.ModuleList(modules)

    def forward(self, x: Tensor, kept: Sequence[Tensor]) -> Tensor:
        return self.function(x, kept, *self.own)


def _draw(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _point() -> Point:
    """Scales of all sizes, so that codes saturate too, and any zero point."""
    return Point(float(torch.exp(torch.rand(()) * 3 - 4.5)), _draw(-128, 127))


def _bounded(y: Tensor) -> Callable[[Tensor], Tensor]:
    return [lambda y: y, F.relu, F.relu6][_draw(0, 2)]


def _convolution(x: Tensor, kept: Sequence[Tensor]) -> Step:
    channels, groups = x.shape[1], [1, x.shape[1]][_draw(0, 1)]
    kernel = [_draw(1, min(3, n)) for n in x.shape[2:]]
    weight = Weights((groups * _draw(1, 5), channels // groups, *kernel), bool(_draw(0, 1)), bool(_draw(0, 1)))
    bound, given = _bounded(x), (_draw(1, 2), [_draw(0, k // 2) for k in kernel], 1, groups)
    return Step(lambda x, kept, w, p: p(bound(F.conv2d(x, w(), w.bias, *given))), weight, _point())


def _linear(x: Tensor, kept: Sequence[Tensor]) -> Step:
    weight, bound = Weights((_draw(1, 12), x.shape[-1]), bool(_draw(0, 1)), bool(_draw(0, 1))), _bounded(x)
    return Step(lambda x, kept, w, p: p(bound(F.linear(x, w(), w.bias))), weight, _point())


def _pair(x: Tensor, kept: Sequence[Tensor]) -> Step:
    alike = [i for i, y in enumerate(kept) if y.shape == x.shape]
    i, op = alike[_draw(0, len(alike) - 1)], [torch.add, torch.sub, torch.mul][_draw(0, 2)]
    bound = _bounded(x)
    return Step(lambda x, kept, p: p(bound(op(x, kept[i]))), _point())


def _joined(x: Tensor, kept: Sequence[Tensor]) -> Step:
    alike = [i for i, y in enumerate(kept) if y.shape == x.shape]
    chosen, dim = [alike[_draw(0, len(alike) - 1)] for _ in range(_draw(1, 2))], _draw(0, x.dim() - 1)
    return Step(lambda x, kept, p: p(torch.cat([x, *(kept[i] for i in chosen)], dim)), _point())


def _pool(x: Tensor, kept: Sequence[Tensor]) -> Step:
    kernel, op = [_draw(1, min(4, n)) for n in x.shape[2:]], [F.max_pool2d, F.avg_pool2d][_draw(0, 1)]
    stride, own = _draw(1, 3), (Point() if _draw(0, 1) else _point())
    return Step(lambda x, kept, p: p(op(x, kernel, stride)), own)


def _mean(x: Tensor, kept: Sequence[Tensor]) -> Step:
    dims, keeps = [(2, 3), (1,), (1, 2), (3,)][_draw(0, 3)], bool(_draw(0, 1))
    return Step(lambda x, kept, p: p(x.mean(dims, keeps)), _point())


def _resized(x: Tensor, kept: Sequence[Tensor]) -> Step:
    sizes, align = [_draw(max(1, n // 2), 2 * n + 3) for n in x.shape[2:]], bool(_draw(0, 1))
    own = Point() if _draw(0, 1) else _point()
    return Step(lambda x, kept, p: p(F.interpolate(x, sizes, mode="bilinear", align_corners=align)), own)


def _function(x: Tensor, kept: Sequence[Tensor]) -> Step:
    op, own = [
        (torch.sigmoid, Point(1 / 256, -128)),
        (torch.tanh, Point(1 / 128, 0)),
        (lambda x: x.softmax(-1), Point(1 / 256, -128)),
        (F.relu, _point()),
    ][_draw(0, 3)]
    return Step(lambda x, kept, p: p(op(x)), own)


def _view(x: Tensor, kept: Sequence[Tensor]) -> Step:
    dims, n = torch.randperm(x.dim()).tolist(), x.shape[-1]
    start = _draw(0, n - 1)
    view: Callable[[Tensor], Tensor] = [
        lambda x: x.permute(dims),
        lambda x: x[..., start:],
        lambda x: x.flatten(min(1, x.dim() - 1)),
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.transpose(0, -1),
    ][_draw(0, 4)]
    return Step(lambda x, kept, p: p(view(x)), _point())


def _step(x: Tensor, kept: Sequence[Tensor], resizes: bool) -> Step:
    kinds: list[Any] = [_linear, _pair, _joined, _function, _view]
    if x.dim() == 4:
        kinds += [_convolution, _convolution, _pool, _mean] + [_resized] * resizes
    made = kinds[_draw(0, len(kinds) - 1)](x, kept)
    return made if made(x, kept).numel() < 20000 else Step(lambda x, kept, p: p(x), _point())
