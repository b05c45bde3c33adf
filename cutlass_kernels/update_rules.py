"""The optimizer step of one element and its states in the CuTe DSL, each operation rounded separately."""

from typing import Any

from cutlass import Float32

from cutlass_kernels.epilogue import add, div, mul, ptx, select
from cutlass_kernels.updates import Update


def updated(u: Update, numbers: Any, p: Any, g: Any, states: Any) -> list[Any]:
    """The element and its states after the step, from its gradient; numbers as updates.NUMBERS has them."""
    if u.maximize:
        g = ptx("neg.f32 {$w0}, {$r0};", Float32, g)
    if u.coupled:
        g = add(g, mul(p, numbers[1 if u.rule == "adam" else 0]))
    return {"adam": _adam, "sgd": _sgd, "lion": _lion}[u.rule](u, numbers, p, g, states)


def sub(a: Any, b: Any) -> Any:
    return ptx("sub.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def _sqrt(x: Any) -> Any:
    return ptx("sqrt.rn.f32 {$w0}, {$r0};", Float32, x)


def _adam(u: Update, numbers: Any, p: Any, g: Any, states: Any) -> list[Any]:
    decay, _, beta1, rest1, beta2, rest2, rate, scale, eps = numbers
    mean = add(mul(states[0], beta1), mul(g, rest1))
    square = add(mul(states[1], beta2), mul(mul(g, g), rest2))
    tops = [_maximum(x, square) for x in states[2:]]
    below = add(mul(_sqrt(tops[0] if tops else square), scale), eps)
    return [sub(mul(p, decay), mul(div(mean, below), rate)), mean, square, *tops]


def _maximum(a: Any, b: Any) -> Any:
    """The larger one, NaN if one is."""
    return ptx(
        "{.reg .pred l, n; setp.gt.f32 l, {$r0}, {$r1}; setp.nan.f32 n, {$r0}, {$r0}; or.pred l, l, n; "
        "selp.f32 {$w0}, {$r0}, {$r1}, l;}",
        Float32,
        a,
        b,
    )


def _sgd(u: Update, numbers: Any, p: Any, g: Any, states: Any) -> list[Any]:
    _, momentum, rest, rate, first = numbers
    if not states:
        return [sub(p, mul(g, rate))]
    buffer = select(first != Float32(0), g, add(mul(states[0], momentum), mul(g, rest)))
    change = add(g, mul(buffer, momentum)) if u.nesterov else buffer
    return [sub(p, mul(change, rate)), buffer]


def _lion(u: Update, numbers: Any, p: Any, g: Any, states: Any) -> list[Any]:
    decay, beta1, rest1, beta2, rest2, rate = numbers
    x = add(mul(states[0], beta1), mul(g, rest1))
    sign = select(x > Float32(0), Float32(1), select(x < Float32(0), Float32(-1), Float32(0)))
    return [sub(mul(p, decay), mul(sign, rate)), add(mul(states[0], beta2), mul(g, rest2))]
