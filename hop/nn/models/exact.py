"""Exact functions: a model whose functions and sums outside its layers run as hop.scaled defines them.

Layers of hop.nn cover modules. Models also call functions, such as torch.softmax, x.mean(1) or
torch.nn.functional.normalize, whose last bits depend on the kernel that PyTorch chooses. `ExactFunctions` replaces such
calls while the model's forward runs, in eager mode and where Dynamo or torch.export trace it.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode

from hop.compat import eager
from hop.compat.eager import OpOverload
from hop.compat.pytree import Args, Kwargs
from hop.impls.scaled import scaled
from hop.nn.attention.attending import attend
from hop.nn.layers.base import modules_of
from hop.nn.models.subclassing import subclass
from hop.numerics import blocks, pooling
from hop.numerics.attention_schemes import AttentionScheme
from hop.numerics.schemes import Scheme
from hop.tensor import QuantizedTensor

aten = torch.ops.aten

Handler = Callable[..., Tensor]
_H = TypeVar("_H", bound=Handler)
_Dtype = torch.dtype | None
_Dims: TypeAlias = int | Sequence[int] | None
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_HANDLERS: dict[str, Handler] = {}
"""Handlers by the names of the functions, which Dynamo knows where it does not know their identity."""


def handles(*names: str) -> Callable[[_H], _H]:
    """Register a handler, which takes the arguments of the functions and methods of these names. It returns
    NotImplemented to leave a call to PyTorch."""

    def register(handler: _H) -> _H:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _unary(op: OpOverload, *names: str) -> None:
    def handler(input: Tensor, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return NotImplemented
        result = scaled(op, input.dtype, input)
        return input.copy_(result) if inplace else result

    handles(*names)(handler)


for _op, *_names in (
    (aten.exp.default, "exp"),
    (aten.exp2.default, "exp2", "special_exp2"),
    (aten.log.default, "log"),
    (aten.erf.default, "erf", "special_erf"),
    (aten.sqrt.default, "sqrt"),
    (aten.rsqrt.default, "rsqrt"),
    (aten.sin.default, "sin"),
    (aten.cos.default, "cos"),
    (aten.tanh.default, "tanh"),
    (aten.sigmoid.default, "sigmoid", "special_expit"),
    (aten.silu.default, "silu"),
    (aten.hardswish.default, "hardswish"),
    (aten.hardsigmoid.default, "hardsigmoid"),
):
    _unary(_op, *_names)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, without a node in traced programs if it has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


_POWERS: dict[float, Callable[[Tensor], Tensor]] = {
    0.5: lambda x: scaled(aten.sqrt.default, torch.float32, x),
    -0.5: lambda x: scaled(aten.rsqrt.default, torch.float32, x),
    3: lambda x: x * x * x,
    4: lambda x: (x * x) * (x * x),
}


@handles("pow", "__pow__")
def _pow(input: Tensor, exponent: object, **options: object) -> Tensor:
    power = _POWERS.get(exponent) if isinstance(exponent, int | float) and not options else None
    return NotImplemented if power is None else _cast(power(_cast(input, torch.float32)), input.dtype)


@handles("gelu")
def _gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
    options: Kwargs = {} if approximate == "none" else {"approximate": approximate}
    return scaled(aten.gelu.default, input.dtype, input, **options)


def _softmax(op: OpOverload, *names: str) -> None:
    def handler(
        input: Tensor, dim: int | None = None, *rest: object, dtype: _Dtype = None, **options: object
    ) -> Tensor:
        dtype = next((x for x in rest if isinstance(x, torch.dtype)), dtype)
        if dim is None or options.keys() - {"_stacklevel"} or not (dtype is None or dtype in FLOATS):
            return NotImplemented
        return scaled(op, input.dtype if dtype is None else dtype, input, dim)

    handles(*names)(handler)


_softmax(aten.softmax.int, "softmax", "special_softmax")
_softmax(aten.log_softmax.int, "log_softmax", "special_log_softmax")


@handles("layer_norm")
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Tensor:
    return scaled(aten.layer_norm.default, input.dtype, input, list(normalized_shape), weight, bias, eps)


@handles("rms_norm")
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return scaled(aten.rms_norm.default, input.dtype, input, list(normalized_shape), weight, eps)


@handles("batch_norm")
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *rest: object,
) -> Tensor:
    if rest or training or running_mean is None or running_var is None:  # rest: torch.batch_norm, of another order
        return NotImplemented
    args = (weight, bias, running_mean, running_var, False, momentum, eps, True)
    return scaled(aten.batch_norm.default, input.dtype, input, *args)


def _dims(dim: _Dims, ndim: int) -> list[int]:
    if dim is None:
        return list(range(ndim))
    return [dim] if isinstance(dim, int) else list(dim)


def _reduction(op: OpOverload, *names: str) -> None:
    def handler(
        input: Tensor,
        dim: _Dims = None,
        keepdim: bool = False,
        *,
        axis: _Dims = None,
        keepdims: bool = False,
        dtype: _Dtype = None,
        **options: object,
    ) -> Tensor:
        dim, keepdim = dim if axis is None else axis, keepdim or keepdims
        if options or not (dtype is None or dtype in FLOATS):
            return NotImplemented
        return scaled(op, input.dtype if dtype is None else dtype, input, _dims(dim, input.dim()), keepdim)

    handles(*names)(handler)


_reduction(aten.mean.dim, "mean")
_reduction(aten.sum.dim_IntList, "sum")


@handles("cumsum")
def _cumsum(input: Tensor, dim: int, *, dtype: _Dtype = None, **options: object) -> Tensor:
    if options or not (dtype is None or dtype in FLOATS):
        return NotImplemented
    return scaled(aten.cumsum.default, input.dtype if dtype is None else dtype, input, dim)


@handles("norm", "linalg_vector_norm")
def _norm(
    input: Tensor, p: object = 2, dim: _Dims = None, keepdim: bool = False, dtype: _Dtype = None, **options: object
) -> Tensor:
    p = options.pop("ord", p)
    if options or p not in (None, 2, "fro") or not (dtype is None or dtype in FLOATS):
        return NotImplemented
    output = input.dtype if dtype is None else dtype
    return scaled(aten.linalg_vector_norm.default, output, input, 2, _dims(dim, input.dim()), keepdim)


@handles("linalg_norm")
def _linalg_norm(
    A: Tensor, ord: object = None, dim: _Dims = None, keepdim: bool = False, dtype: _Dtype = None, **options: object
) -> Tensor:
    is_matrix = ord is not None and len(_dims(dim, A.dim())) == 2  # whose order 2 is a singular value
    return NotImplemented if is_matrix and ord != "fro" else _norm(A, ord, dim, keepdim, dtype, **options)


@handles("normalize")
def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    if p != 2 or out is not None:
        return NotImplemented
    return input / _norm(input, 2, dim, True).clamp_min(eps)


def _pools(spatial: int, fixed: OpOverload, adaptive: OpOverload) -> None:
    def average(
        input: Tensor,
        kernel_size: object,
        stride: object = None,
        padding: object = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        stride = kernel_size if stride is None or stride == () else stride
        sizes = [pooling.sizes(x, spatial) for x in (kernel_size, stride, padding)]
        last = [] if divisor_override is None else [divisor_override]
        return scaled(fixed, input.dtype, input, *sizes, ceil_mode, count_include_pad, *last)

    def adapt(input: Tensor, output_size: object) -> Tensor:
        given, before = pooling.sizes(output_size, spatial), input.shape[-spatial:]
        return scaled(
            adaptive, input.dtype, input, [n if size is None else size for size, n in zip(given, before, strict=True)]
        )

    handles(f"avg_pool{spatial}d")(average)
    handles(f"adaptive_avg_pool{spatial}d")(adapt)


_pools(1, aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default)
_pools(2, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default)
_pools(3, aten.avg_pool3d.default, aten.adaptive_avg_pool3d.default)

_LINEAR = {
    "linear": (1, aten.upsample_linear1d.vec),
    "bilinear": (2, aten.upsample_bilinear2d.vec),
    "trilinear": (3, aten.upsample_trilinear3d.vec),
}


@handles("interpolate")
def _interpolate(
    input: Tensor,
    size: object = None,
    scale_factor: object = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    if mode not in _LINEAR or antialias or recompute_scale_factor or (size is None) == (scale_factor is None):
        return NotImplemented
    spatial, op = _LINEAR[mode]
    if input.dim() != spatial + 2:
        return NotImplemented  # PyTorch's error
    sizes = None if size is None else pooling.sizes(size, spatial)
    factors = None if scale_factor is None else [float(x) for x in pooling.sizes(scale_factor, spatial)]
    return scaled(op, input.dtype, input, sizes, bool(align_corners), factors)


@handles("group_norm")
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """A layer_norm of the groups, then weight and bias of each channel."""
    if input.dim() < 2 or input.shape[1] % num_groups:
        return NotImplemented
    rows = input.reshape(input.shape[0], num_groups, -1)
    y = scaled(aten.layer_norm.default, torch.float32, rows, [rows.shape[2]], None, None, eps).reshape(input.shape)
    sizes = [-1, *[1] * (input.dim() - 2)]
    y = y if weight is None else y * _cast(weight, torch.float32).reshape(sizes)
    y = y if bias is None else y + _cast(bias, torch.float32).reshape(sizes)
    return _cast(y, input.dtype)


@handles("instance_norm")
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if use_input_stats:
        return NotImplemented if running_mean is not None else _group_norm(input, input.shape[1], weight, bias, eps)
    return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


def _variance(*names: str) -> None:
    def handler(
        input: Tensor,
        dim: _Dims = None,
        *rest: object,
        keepdim: bool = False,
        unbiased: bool = True,
        correction: float | None = None,
        **options: object,
    ) -> Tensor:
        """Σ (x - mean)² / (n - correction), or its root."""
        if isinstance(dim, bool) or (rest and not isinstance(rest[0], bool)) or len(rest) > 2:
            return NotImplemented  # other orders of arguments
        correction = int(bool(rest[0]) if rest else unbiased) if correction is None else correction
        keepdim = bool(rest[1]) if len(rest) > 1 else keepdim
        if options:
            return NotImplemented
        dims = _dims(dim, input.dim())
        x = _cast(input, torch.float32)
        x = x - scaled(aten.mean.dim, torch.float32, x, dims, True)
        total = scaled(aten.sum.dim_IntList, torch.float32, x * x, dims, keepdim)
        count = 1
        for d in dims:
            count = count * input.shape[d]
        y = total / torch.full_like(total, count - correction)
        return _cast(scaled(aten.sqrt.default, torch.float32, y) if "std" in names else y, input.dtype)

    handles(*names)(handler)


_variance("var")
_variance("std")


@handles("logsumexp", "special_logsumexp")
def _logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = _dims(dim, input.dim())
    most = input.amax(dims, keepdim=True)
    most = torch.where(most.isfinite(), most, 0.0)
    terms = scaled(aten.exp.default, torch.float32, input - most)
    total = scaled(aten.sum.dim_IntList, torch.float32, terms, dims, True)
    y = _cast(scaled(aten.log.default, torch.float32, total) + most, input.dtype)
    return y if keepdim else y.squeeze(dims)


@handles("unflatten")
def _unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return torch.unflatten(input, dim, sizes)  # Dynamo cannot trace the method of the same name below a mode


class ExactFunctions(TorchFunctionMode):
    """A context in which calls of PyTorch's functions on floats are those of hop.scaled, and attention is that of a
    scheme.

    Functions that are not known here, and calls of known ones that hop.scaled does not cover, such as those in float64
    or with an order other than 2, run as PyTorch computes them; hop.export.check_exact lists them.

    Args:
        attention: the scheme in which torch.nn.functional.scaled_dot_product_attention runs; None for floats.
    """

    def __init__(self, attention: AttentionScheme | None) -> None:
        super().__init__()
        self.attention = attention

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        handler = _HANDLERS.get(name)
        if name == "scaled_dot_product_attention" and self.attention is not None:
            handler = self._attend
        if handler is not None and _takes(args[0] if args else kwargs.get("input")):
            result = handler(*args, **{key: x for key, x in kwargs.items() if key != "out" or x is not None})
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p or query.dim() != 4:
            return NotImplemented
        return attend(self.attention, query, key, value, attn_mask, is_causal, scale=scale)


def _takes(x: object) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, QuantizedTensor) and x.dtype in FLOATS


def check_schemes(caller: str, schemes: Iterable[Scheme | None], attention: Iterable[AttentionScheme | None]) -> None:
    """Raise ValueError, in the name of `caller`, for a scheme whose results depend on more than their inputs."""
    for scheme in schemes:
        if scheme is not None and (reason := _declines(scheme)) is not None:
            raise ValueError(
                f"{caller}: exact=True, and in the scheme {scheme} {reason}; use one whose products are sums of "
                "integers with a scale for each row, such as 'int8' or '8da4w'"
            )
    for one in attention:
        if one is None:
            raise ValueError(f"{caller}: exact=True, and a rule leaves attention in floats; use attention='int8'")
        if not all(q is not None and q.format.is_integer for q in (one.query, one.key, one.value)):
            raise ValueError(f"{caller}: exact=True, and attention in {one} sums floats; use attention='int8'")


def _declines(scheme: Scheme) -> str | None:
    lhs, rhs = scheme.lhs, scheme.rhs
    if lhs is None or rhs is None or not (lhs.format.is_integer and rhs.format.is_integer):
        return "products sum floats, in an order that depends on the kernel"
    if not lhs.scale.is_static and blocks.per_dimension(lhs.block, 2)[0] != 1:
        return "rows share a scale, so that results depend on the batch"
    return None


def check_layers(
    caller: str,
    model: nn.Module,
    is_quantized: Callable[[str, nn.Module], bool],
    remedy: str = "give them an integer scheme",
) -> None:
    """Raise ValueError, in the name of `caller`, if a layer of the model would multiply floats."""
    of_transformers = sys.modules.get("transformers.pytorch_utils")
    products = _PRODUCTS if of_transformers is None else (*_PRODUCTS, of_transformers.Conv1D)
    names = [
        f"{name or '(model)'} ({type(m).__name__})"
        for name, m in modules_of(model)
        if isinstance(m, products) and not isinstance(m, NonDynamicallyQuantizableLinear) and not is_quantized(name, m)
    ]
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ValueError(
            f"{caller}: exact=True, and these layers stay in floats, whose sums depend on the kernel: "
            f"{', '.join(names[:4])}{more}; {remedy}"
        )


_PRODUCTS = (nn.Linear, nn.Bilinear, nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)


def make_exact(model: nn.Module, attention: AttentionScheme | None) -> None:
    """Let the functions that a model calls be exact while its forward runs: its class becomes a subclass of the same
    name, whose forward enters ExactFunctions. A second call replaces the attention."""
    model.__dict__["exact_functions"] = ExactFunctions(attention)
    if not isinstance(model, _Exact):
        model.__class__ = _exact_class(type(model))


def is_exact(model: nn.Module) -> bool:
    """Whether `make_exact` was called on a model."""
    return isinstance(model, _Exact)


class _Exact:
    """The mark of classes that `make_exact` makes."""


@functools.cache
def _exact_class(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            with self.__dict__["exact_functions"]:
                return cls.forward(self, *args, **kwargs)
        with self.__dict__["exact_functions"], eager.ignored_function_mode():
            return cls.forward(self, *args, **kwargs)

    return subclass(_exact_class, cls, forward, _Exact)
