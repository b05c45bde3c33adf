"""Calls of quantize, dequantize and fake_quantize, as cases for the routes.

What they must return is what the quantizer's own methods give (numerics/test_quantizer.py holds those against numpy),
and their gradients are those of `straight_through`, which says them in a second way: through PyTorch's own derivatives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import hop
from hop import presets
from hop.impls.quantize import fake_quantize_operator, quantize_operator
from hop.numerics import copies
from hop.numerics.formats import E4M3, E8M0, UINT5, UINT6, Integer
from hop.numerics.layouts import Planes
from hop.numerics.quantizer import Quantizer
from hop.numerics.scale_rules import AbsMean, Microscaling, Static, StoredScales, TwoLevel
from hop.tensor.buffers.operators import dequantize_buffers, dequantize_operator
from hop.tensor.proto import TensorProto
from tests.support.case import Case

SHAPE = (2, 3, 40)  # 40 is no multiple of the blocks


@dataclass(frozen=True)
class Setting:
    """How a leaf is called."""

    name: str
    quantizer: Quantizer
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = SHAPE
    usages: tuple[str, ...] = (copies.ROWWISE,)
    given: bool = False  # whether the caller gives scale and zero point
    gradient: str = "clipped"

    def x(self) -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(1)) * 2
        return x.to(self.dtype)

    def options(self) -> dict[str, Tensor]:
        """The tensors that go along with x."""
        found: dict[str, Tensor] = {}
        if self.given:
            described = self.quantizer.buffers(self.shape)
            outer = "global_amax" if "global_amax" in described else "scale"
            size = described[outer][0]
            spread = torch.linspace(0.6, 1.4, max(1, torch.Size(size).numel())).reshape(size)
            found["scale"] = spread * (4.0 if outer != "scale" else 3.0 / max(self.quantizer.format.max, 1.0))
            if self.quantizer.scale.has_zero_point():
                found["zero_point"] = torch.full(size, 3.0)
        if self.quantizer.stochastic:
            noise = torch.Generator().manual_seed(2)
            found["noise"] = torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=noise)
        return found

    def expected(self, x: Tensor, **options: Any) -> Tensor:
        """The numbers that the codes of x stand for."""
        if self.usages == (copies.ROWWISE,):
            return self.quantizer.fake_quantize(x, **options).to(x.dtype)
        made = copies.quantize(self.quantizer, x, self.usages, **options)
        return copies.dequantize(self.quantizer, made, x.shape).to(x.dtype)


def straight_through(setting: Setting, x: Tensor, options: dict[str, Tensor]) -> Tensor:
    """What `setting` gives, with the derivatives of the formula in which rounding has the derivative 1, and, where a
    code is clipped, x has none."""
    q, noise = setting.quantizer, options.get("noise")
    value = setting.expected(x.detach(), **{name: t.detach() for name, t in options.items()})
    wide, plain = x.to(torch.float32), setting.gradient == "plain"
    if "scale" in options:
        s = q.spread(_step(q, wide.detach(), options["scale"]), x.shape)
    else:
        s = q.spread(q.quantize(x.detach(), noise=noise)["scale"], x.shape) if isinstance(q.scale, AbsMean) else None
    if s is None:
        path = wide  # nothing lies beyond the largest number
    else:
        zero: Any = q.spread(options["zero_point"], x.shape) if "zero_point" in options else q.format.zero
        zeros = (zero,) if isinstance(q.format, Integer) else ()
        y = wide / s
        # The number that was chosen, read off the value: y itself may lie on the other side of a tie.
        rounded = q.fake_quantize(x.detach(), **{name: t.detach() for name, t in options.items()})
        number = q.format.decode(q.format.encode(rounded / s.detach(), None, *zeros), *zeros).detach()
        inside = q.format.inside(y.detach(), *zeros)
        clipped = ((number + zero).detach() - zero) * s
        path = torch.where(
            inside, (y + (number - y).detach()) * s, clipped + wide - wide.detach() if plain else clipped
        )
        if "scale" not in options:  # a scale that was found is a constant
            path = torch.where(inside | plain, wide, 0.0)
    return (path + (value - path).detach()).to(x.dtype)


def _step(q: Quantizer, x: Tensor, given: Tensor) -> Tensor:
    """s for each block: the given scale, with the roundings of its format taken for the identity."""
    if isinstance(q.scale, Microscaling):
        return given + (E8M0.decode(E8M0.encode(given)) - given).detach()
    if getattr(q.scale, "power_of_two", False):
        return given + (torch.exp2(-torch.floor(torch.log2(1 / given.double()))).float() - given).detach()
    if not isinstance(q.scale, TwoLevel):
        return given
    exact = q.per_block(x, lambda cut, dims: cut.abs().amax(dims)) * (448 / given)
    inner = E4M3.decode(E4M3.encode(exact.detach()))
    inner = torch.where(E4M3.inside(exact.detach()), exact + (inner - exact).detach(), inner)
    return inner * given / (448 * q.format.max)


@dataclass(frozen=True)
class Leaf:
    name: str
    call: Callable[..., Tensor]  # (setting, x, **options)
    reference: Callable[..., Tensor]
    nodes: int

    def gradient_case(self, setting: Setting) -> Case:
        return self.case(setting)

    def case(self, setting: Setting) -> Case:
        """The call as a function of x and of what is given with it."""
        options = setting.options()

        def named(rest: tuple[Tensor, ...]) -> dict[str, Tensor]:
            return dict(zip(options, rest, strict=True))

        def check(got: Tensor) -> None:
            want = setting.expected(setting.x(), **options)
            assert got.dtype == want.dtype and torch.equal(got, want), (self.name, setting.name)

        made = Case(
            function=lambda x, *rest: self.call(setting, x, **named(rest)),
            tensors=[setting.x(), *options.values()],
            check=check,
            reference=lambda x, *rest: self.reference(setting, x, **named(rest)),
            inner=lambda x, *rest: straight_through(setting, x, named(rest)),
            nodes=self.nodes,
            smooth=False,
        )
        return made.on_device()


def _quantize(s: Setting, x: Tensor, **options: Tensor) -> Tensor:
    return hop.dequantize(hop.quantize(s.quantizer, x, **options, usages=s.usages, gradient=s.gradient))


def _quantize_reference(s: Setting, x: Tensor, scale: Any = None, zero_point: Any = None, noise: Any = None) -> Tensor:
    made = quantize_operator.reference(str(s.quantizer), x, scale, zero_point, noise, list(s.usages), s.gradient)
    return dequantize_operator.reference(made)


def _fake_quantize(s: Setting, x: Tensor, **options: Tensor) -> Tensor:
    return hop.fake_quantize(s.quantizer, x, **options, gradient=s.gradient)


def _fake_quantize_reference(
    s: Setting, x: Tensor, scale: Any = None, zero_point: Any = None, noise: Any = None
) -> Tensor:
    return fake_quantize_operator.reference(str(s.quantizer), x, scale, zero_point, noise, s.gradient)


@dataclass(frozen=True)
class OfBuffers:
    """dequantize, as a function of the buffers; of its gradient, as a function of the tensor that was quantized."""

    name: str = "dequantize"

    def gradient_case(self, setting: Setting) -> Case:
        return QUANTIZE.case(setting)

    def case(self, setting: Setting) -> Case:
        made = copies.quantize(setting.quantizer, setting.x(), setting.usages, **setting.options())

        def function(*buffers: Tensor) -> Tensor:
            proto = TensorProto(setting.shape, setting.dtype, quantizer=setting.quantizer, usages=setting.usages)
            return hop.dequantize(proto.create_tensor(buffers))

        def inner(*buffers: Tensor) -> Tensor:
            named = dict(zip(made, buffers, strict=True))
            return copies.dequantize(setting.quantizer, named, setting.shape).to(setting.dtype)

        def check(got: Tensor) -> None:
            want = setting.expected(setting.x(), **setting.options())
            assert got.dtype == want.dtype and torch.equal(got, want), setting.name

        of_buffers = Case(
            function=function,
            tensors=list(made.values()),
            check=check,
            reference=lambda *buffers: dequantize_buffers.reference(
                str(setting.quantizer), buffers, list(setting.usages), list(setting.shape), setting.dtype
            ),
            inner=inner,
            differentiable=False,
            keeps_nodes_under_vmap=False,
        )
        return of_buffers.on_device()


QUANTIZE = Leaf("quantize", _quantize, _quantize_reference, nodes=2)
FAKE_QUANTIZE = Leaf("fake_quantize", _fake_quantize, _fake_quantize_reference, nodes=1)
DEQUANTIZE = OfBuffers()
LEAVES = [QUANTIZE, FAKE_QUANTIZE, DEQUANTIZE]

BOTH = copies.USAGES
SUPERBLOCK = Quantizer(UINT5, (1, 8), StoredScales(UINT6, (1, 32), offset=True), layout=Planes())
# What every route meets in `make test`.
SETTINGS = [
    Setting("int8_row", presets.INT8_ROW, torch.bfloat16),
    Setting("uint4_32_affine", presets.UINT4_32_AFFINE, torch.float16),
    Setting("int8_static_affine", presets.INT8_TENSOR_STATIC_AFFINE, given=True),
    Setting("mxfp8", presets.MXFP8, torch.bfloat16),
    Setting("nvfp4_stochastic", presets.NVFP4_STOCHASTIC, given=True),
    Setting("state8", presets.STATE8, shape=(2, 256)),
    Setting("superblock", SUPERBLOCK),
    Setting("ternary_plain", presets.TERNARY_TENSOR, gradient="plain"),
]
# What every route meets in `make test-all`: each preset, as a rule finds the scale and as the caller gives it.
ALL_SETTINGS = [
    Setting(
        f"{name.lower()}_{dtype}{'_given' * given}".replace("torch.", ""),
        q,
        dtype,
        shape=(2, 256) if q.flat else (16, 3, 40),
        given=given or isinstance(q.scale, Static),
    )
    for name, q in presets.PRESETS.items()
    for dtype, given in ((torch.float32, False), (torch.bfloat16, True))
]
