"""AdamW, Adam, SGD and Lion."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from hop.optim.optimizer import Keywords, Optimizer, ParamGroup
from hop.optim.states import BITS4, FP8
from hop.optim.updates import UpdateRule


class Adam(Optimizer):
    """torch.optim.Adam with quantized states. The update is computed in float32, one parameter at a time.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay: as in torch.optim.Adam. Each
            number may be a tensor of one element. foreach, fused and capturable are accepted and have no effect.
        state: the quantizers of the states "exp_avg", "exp_avg_sq" and "max_exp_avg_sq": a mapping from these names to
            quantizers, such as hop.optim.BITS8, BITS4, FP8 or BITS8_FP8; one quantizer for all; or None for floats.
            Each
            param group may have its own.
        min_numel: the states of parameters with fewer elements stay floats, in the parameter's dtype.
        stochastic_rounding: round bfloat16 parameters stochastically, so that updates smaller than half a unit in the
            last place are not lost. The rounding is unbiased and depends only on the seed, the step and the parameter's
            position.
        error_if_nonfinite: raise FloatingPointError, before anything has changed, if a gradient contains a NaN or an
            infinity. Otherwise its parameter becomes NaN, and an infinity turns the other states of its block to zeros.
        seed: the seed of stochastic rounding; by default drawn from PyTorch's generator.

    Raises:
        TypeError, ValueError: an argument has a wrong type or is out of range.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        _check(self._name, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults | {"amsgrad": amsgrad, "decoupled_weight_decay": decoupled_weight_decay},
            **options,
        )

    def _names(self, group: Mapping[str, object]) -> Sequence[str]:
        return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"]))

    def _rule(self, group: ParamGroup) -> UpdateRule:
        coupled = not group["decoupled_weight_decay"] and _is_used(group["weight_decay"])
        return UpdateRule("adam", coupled=coupled, maximize=group["maximize"])

    def _options(self, group: ParamGroup) -> Sequence[float | Tensor]:
        return *group["betas"], group["eps"], group["weight_decay"]


class AdamW(Adam):
    """torch.optim.AdamW with quantized states. The arguments are those of Adam; weight_decay is 0.01 by default."""

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=True, **options)


class AdamW8bit(AdamW):
    """AdamW with 8-bit states, dynamic maps in blocks of 256: AdamW(state=hop.optim.BITS8)."""


class AdamW4bit(AdamW):
    """AdamW with 4-bit states in blocks of 128: AdamW(state=hop.optim.BITS4)."""

    def __init__(self, params: object, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **{"state": BITS4, **options})


class AdamWFp8(AdamW):
    """AdamW with e4m3 states in blocks of 256: AdamW(state=hop.optim.FP8)."""

    def __init__(self, params: object, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **{"state": FP8, **options})


class SGD(Optimizer):
    """torch.optim.SGD with a quantized momentum. Options that Adam also has are described there."""

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        _check(self._name, lr=lr, momentum=momentum, weight_decay=weight_decay)
        if not isinstance(dampening, int | float | Tensor):
            raise TypeError(f"{self._name}: dampening must be a number, got {dampening!r}; use for example 0")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"{self._name}: nesterov needs a momentum above 0 and a dampening of 0, got {momentum} and {dampening}"
                "; use such values"
            )
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"nesterov": nesterov}, **options)

    def _names(self, group: ParamGroup) -> Sequence[str]:
        return ("momentum_buffer",) if _is_used(group["momentum"]) else ()

    def _rule(self, group: ParamGroup) -> UpdateRule:
        coupled, nesterov = _is_used(group["weight_decay"]), bool(group["nesterov"])
        return UpdateRule("sgd", coupled=coupled, nesterov=nesterov, maximize=group["maximize"])

    def _options(self, group: ParamGroup) -> Sequence[float | Tensor]:
        return group["momentum"], group["dampening"], group["weight_decay"]


class Lion(Optimizer):
    """Lion: a step along the sign of an average of gradients, with decoupled weight decay.

    Its learning rate is about a tenth of AdamW's, and its weight_decay ten times as large. Options that Adam also has
    are described there.
    """

    def __init__(
        self,
        params: object,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **options: Unpack[Keywords],
    ) -> None:
        _check(self._name, lr=lr, betas=betas, weight_decay=weight_decay)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **options)

    def _names(self, group: Mapping[str, object]) -> Sequence[str]:
        return ("exp_avg",)

    def _rule(self, group: ParamGroup) -> UpdateRule:
        return UpdateRule("lion", maximize=group["maximize"])

    def _options(self, group: ParamGroup) -> Sequence[float | Tensor]:
        return *group["betas"], group["weight_decay"]


def _is_used(x: float | Tensor) -> bool:
    """Whether a weight decay or momentum may be nonzero; always True for a tensor, whose value can change."""
    return isinstance(x, Tensor) or x != 0


def _check(name: str, *, betas: object = None, **numbers: object) -> None:
    """Raise for values that torch.optim rejects."""
    for key, x in numbers.items():
        if isinstance(x, Tensor):
            if x.numel() != 1:
                raise ValueError(
                    f"{name}: {key} must be a number or a tensor of one element, got shape {tuple(x.shape)}; use such "
                    "a number"
                )
        elif not isinstance(x, int | float):
            raise TypeError(f"{name}: {key} must be at least 0 and finite, got {x!r}; use such a number")
        if not x >= 0 or x == math.inf:
            raise ValueError(f"{name}: {key} must be at least 0 and finite, got {x}; use such a number")
    if betas is None:
        return
    pair = betas if isinstance(betas, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(beta, int | float | Tensor) for beta in pair):
        raise TypeError(f"{name}: betas must be two numbers, got {betas!r}; use such numbers")
    for i, beta in enumerate(pair):
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(
                f"{name}: betas[{i}] must be a number or a tensor of one element, got shape {tuple(beta.shape)}; use "
                "such a number"
            )
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{i}] must be at least 0 and below 1, got {beta}; use such a number")
