"""Layer: the base class of quantized layers, with a scheme and one call of their operator."""

from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import Self

from hop.compat import dtensor, profiling
from hop.compat.eager import OpOverload, past_ignored_modes
from hop.compat.pytree import Args, StateDict
from hop.impls.quantize import dequantize
from hop.impls.quantized import Scales, quantized
from hop.nn.contexts import FIELDS, GRADIENT, WEIGHT, SchemeNeeds, active
from hop.nn.layers import reminder
from hop.nn.layers.folded import FoldedBatchNorm
from hop.nn.layers.scale_state import NO_SCALES, ScaleState
from hop.nn.layers.sharing import SharedInput
from hop.nn.scales.delayed import AmaxHistory
from hop.nn.weights import master
from hop.nn.weights.recomputed import recomputed, remedied
from hop.numerics.attention_schemes import ATTENTION_SCHEMES, AttentionScheme
from hop.numerics.quantizer import Quantizer
from hop.numerics.recipes import RECIPES
from hop.numerics.schemes import SCHEMES, Scheme
from hop.tensor import QuantizedTensor

_M = TypeVar("_M", bound=nn.Module)
_runs: set[object] = set()  # operators, schemes and operand forms that passed Layer._check


def modules_of(model: nn.Module, every_name: bool = False) -> Sequence[tuple[str, nn.Module]]:
    """The modules of `model` with their names: each once, or once per name."""
    return tuple(cast(Iterable[tuple[str, nn.Module]], model.named_modules(remove_duplicate=not every_name)))


def not_a_model(function: str, given: object) -> TypeError:
    """TypeError for a `model` that is not an nn.Module."""
    return TypeError(f"{function}: model must be a torch.nn.Module, got {given!r}; give the model first")


def check_unsharded(function: str, model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Raise ValueError for a layer whose parameters FSDP2 manages: it would go on with those it has sharded."""
    managed = dtensor.fully_sharded(model)
    changed = managed.intersection(layers) if managed else set[nn.Module]()
    for name, module in modules_of(model):
        if module in changed:
            raise ValueError(
                f"{function}: layer {name!r} is managed by fully_shard, which keeps the parameters that it has "
                f"sharded; call {function} before fully_shard, on the float model"
            )


def of_class(cls: type[_M], module: nn.Module, without: Sequence[str] = ()) -> _M:
    """Create an instance of `cls` that shares the Parameters, hooks and settings of `module`, except `without`."""
    result = cls.__new__(cls)
    for name, value in module.__dict__.items():
        if name not in without:
            result.__dict__[name] = value.copy() if isinstance(value, dict | set) else value
    return result


class Layer(ScaleState):
    """A float layer that computes in low precision. Subclasses define their operator and call `_compute`."""

    float_type: type[nn.Module]  # the float layer it replaces
    is_packable: ClassVar[bool] = True  # whether products read the weight, so that packing helps
    reads_packed: ClassVar[bool] = False  # whether it can read the packed weight of a layer it shares it with
    channels_dim: ClassVar[int] = 0  # the weight's dimension of output channels
    # Attributes that the float layer does not have.
    added: ClassVar[tuple[str, ...]] = tuple(
        "learn_scales frozen in_floats packs shared_input scales _own _norms".split()
    )

    def __init__(self, *args: object, scheme: Scheme, learn_scales: bool = False, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._begin(scheme, learn_scales)

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._compute(input)
        return past_ignored_modes(self._compute, input)

    @classmethod
    def from_float(cls, module: nn.Module, scheme: Scheme, learn_scales: bool = False) -> Self:
        """Create a quantized layer with the Parameters, hooks and settings of `module`.

        Raises:
            TypeError: module is a subclass of the float type, which may compute something else.
            ValueError: the operator cannot run in this scheme.
        """
        if not cls.takes(module):
            raise TypeError(
                f"{cls.__name__}.from_float: module must be a plain torch.nn.{cls.float_type.__name__}, whose forward "
                f"is known; got {type(module).__name__}"
            )
        result = of_class(cls, module)
        result._begin(scheme, learn_scales)
        return result

    @classmethod
    def takes(cls, module: nn.Module) -> bool:
        """Whether `from_float` accepts a module."""
        return type(module) is cls.float_type

    def to_float(self) -> nn.Module:
        """The float layer, with the same Parameters, hooks and settings.

        A frozen weight is replaced by a new Parameter of its dequantized values. The state of scales is dropped.

        Raises:
            RuntimeError: a batch norm is folded into the layer, or it is parametrized.
        """
        if self.norm is not None:
            raise RuntimeError(
                f"hop.nn.{type(self).__name__}: it has a folded batch norm, which the float layer would lack; call "
                "hop.nn.freeze(model) before, or load hop.nn.float_state_dict(model) into the float model"
            )
        for each in recomputed(self) if is_parametrized(self) else ():
            raise RuntimeError(f"hop.nn.{type(self).__name__}: {remedied(each)}")
        result = of_class(self.float_type, self, self.added)
        for name in ("scales", "input_transform"):
            result.__dict__["_modules"].pop(name, None)
        if isinstance(self.weight, QuantizedTensor):
            result.weight = nn.Parameter(self.float_weight(dequantize(self.weight)))
        elif (floats := self.float_weight(self.weight)) is not self.weight:
            result.weight = nn.Parameter(floats.detach(), requires_grad=self.weight.requires_grad)
        return result

    def _begin(self, scheme: Scheme, learn_scales: bool) -> None:
        """Initialize the attributes that `added` lists, after the float layer's constructor."""
        self.learn_scales, self.frozen, self.in_floats, self.packs = learn_scales, False, False, False
        self.shared_input: SharedInput | None = None
        # a tuple, because the module is registered elsewhere in the model
        self._norms: tuple[FoldedBatchNorm, ...] = ()
        self.scales = {}
        self.scheme = scheme

    @property
    def norm(self) -> FoldedBatchNorm | None:
        """The batch norm folded into this layer, or None."""
        return self._norms[0] if self._norms else None

    def fold(self, norm: FoldedBatchNorm) -> None:
        """Apply `norm` to the result from now on, too."""
        self._norms = (norm,)
        self.forget_scales((WEIGHT,))  # the scale of the weight without the norm is no longer valid

    def folded_weight(self) -> Tensor:
        """The weight that is quantized: multiplied by the folded batch norm, from the running statistics."""
        norm = self.norm
        return self.weight if norm is None else norm.weight_of(self.weight, self.channels_dim)

    @property
    def scheme(self) -> Scheme:
        """The scheme used outside of `with hop.nn.scheme(...)`. Setting it builds the scale state that it needs."""
        result = self._own.scheme
        assert result is not None
        return result

    @scheme.setter
    def scheme(self, scheme: Scheme) -> None:
        if not isinstance(scheme, Scheme):
            raise TypeError(
                f"{type(self).__name__}: scheme must be a hop.Scheme, got {scheme!r}; give one such as "
                "hop.schemes.INT8_DYNAMIC"
            )
        self._check(scheme)
        self._own = SchemeNeeds.of(scheme)
        self._build(self._own)

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        if name == WEIGHT:
            self.check_assigned(value)
        super().__setattr__(name, value)

    def check_assigned(self, weight: object) -> None:
        """Raise RuntimeError if the layer is frozen and `weight` is a float tensor."""
        if not isinstance(weight, Tensor) or isinstance(dtensor.own_part(weight), QuantizedTensor):
            return
        if self.__dict__.get("frozen"):
            raise RuntimeError(
                f"hop.nn.{type(self).__name__}: weight is frozen, and a tensor of {weight.dtype} would replace it by "
                "floats; fold batch norms, prune or merge before hop.nn.freeze, or give a QuantizedTensor"
            )

    def weight_owner(self) -> tuple[nn.Module, str]:
        """The module that owns the weight's Parameter, and its name there."""
        return self, WEIGHT

    def plan(self) -> SchemeNeeds:
        """The scheme that is active now."""
        return active(self._own)

    def prepare(self) -> None:
        """Build the scale state that the active scheme needs."""
        self._build(self.plan())

    def take_frozen(self, weight: nn.Parameter, packs: bool) -> None:
        """Compute with the quantized `weight` from now on, in the scheme that is active now.

        `packs` says whether the weight is kept in the layout that products read fastest, on any device it moves to.
        """
        if self.norm is not None:
            self._take_bias(self.norm.bias_of(self.bias, self.weight.dtype).detach())
        if not self.frozen:
            self._own, self.frozen = self.plan(), True
        self.weight, self.packs = weight, packs
        if WEIGHT in self.scales:
            del self.scales[WEIGHT]

    def _take_bias(self, bias: Tensor) -> None:
        """Replace the folded batch norm by `bias`; the weight already includes the norm."""
        norm = self.norm
        assert norm is not None
        norm.end()
        self._norms = ()
        self.bias = nn.Parameter(bias, requires_grad=False)

    def prepare_loading(self, state_dict: StateDict, key: str, assigns: bool) -> None:
        bias = state_dict.get(f"{key.removesuffix(WEIGHT)}bias")
        if self.norm is not None and assigns and isinstance(state_dict.get(key), QuantizedTensor) and bias is not None:
            self._take_bias(bias)  # the checkpoint is of a layer frozen with its batch norm
        super().prepare_loading(state_dict, key, assigns)

    def frozen_quantizer(self) -> Quantizer | None:
        """The quantizer that freezing uses for the weight; None if the scheme leaves it in floats."""
        scheme = self.plan().settled
        return None if scheme is None or scheme.rhs is None else self.weight_quantizer(scheme.rhs)

    def signed_scales(self) -> bool:
        """Whether the searched scales of the weight may be negative."""
        scheme = self.plan().scheme
        return scheme is not None and scheme.signed_scales()

    def reads_sums(self) -> bool:
        scheme = self.plan().scheme
        return scheme is not None and scheme.lhs is not None and scheme.lhs.scale.has_zero_point()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={spelled(self.scheme)}"

    # ---- computing

    def _call(self, x: Tensor) -> tuple[OpOverload, Args]:
        """The operator and its arguments, for the arguments of `_compute`."""
        raise NotImplementedError

    def _sample(self) -> Tensor:
        """A small example input."""
        raise NotImplementedError

    def _empty(self, *shape: int) -> Tensor:
        """An empty plain tensor of the weight's dtype and device, also if the weight is quantized."""
        return torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device)

    def _compute(self, x: Tensor, *options: object) -> Tensor:
        """The result for x in the active scheme."""
        op, args = self._call(x, *options)
        plan, norm = self.plan(), self.norm
        if norm is not None:
            if self._batch_norm() is None:
                bias = norm.bias_of(self.bias, self.weight.dtype)
                args = (args[0], self.folded_weight(), bias, *args[3:])
            self._check_normed(args[0])
        if self._computes_floats(plan):
            self._check_has_floats()
            y = op(*args)
            batch = self._batch_norm()
            return y if batch is None else batch.of_batch(y, self.example_dims)
        if plan.needs and self._unbuilt(plan):
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    "hop.nn: this scheme needs scales that the layer does not have, and a compiled program cannot make "
                    "them; call hop.nn.prepare(model) before, where the same scheme is active"
                )
            self._build(plan)
        given = self._given(plan, x)
        scheme = plan.scheme if self.training and not self.frozen else plan.settled
        if plan.quantizes_weight and not (self.frozen or self.training):
            reminder.of_freeze()
        assert scheme is not None
        if not self.frozen:
            args = tuple(master.opened(a) if a is self.weight else a for a in args)
        batch = self._batch_norm()
        if batch is None:
            y = self._run(op, scheme, args, given)
        else:
            scales = None if given is NO_SCALES else given
            dims = self.channels_dim, self.example_dims
            return batch.product_of_batch(op, scheme, args, scales, *dims, lambda z: self._watched(z, given))
        return self._watched(y, given)

    def _watched(self, y: Tensor, given: Scales) -> Tensor:
        """The result of a product. If the scheme has delayed scaling of gradients, record the amax of its gradient."""
        gradient = None if given.grad is None else self.scales[GRADIENT]
        return gradient.watch(y) if isinstance(gradient, AmaxHistory) else y

    def _run(self, op: OpOverload, scheme: Scheme, args: tuple[object, ...], scales: Scales) -> Tensor:
        """Run the operator in a scheme."""
        return quantized(op, scheme, *args, scales=None if scales is NO_SCALES else scales)

    def _batch_norm(self) -> FoldedBatchNorm | None:
        """The folded batch norm if it uses the statistics of the batch in this call, else None."""
        norm = self.norm
        return norm if norm is not None and self.training and norm.takes_batch() else None

    def _check_normed(self, x: Tensor) -> None:
        """Raise ValueError if a batch norm would not find the output channels in the expected dimension."""
        if x.dim() != self.example_dims + 1:
            raise ValueError(
                f"hop.nn.{type(self).__name__}: with a batch norm folded into it the input must have "
                f"{self.example_dims + 1} dimensions, got {tuple(x.shape)}; give a batch of examples"
            )

    def _computes_floats(self, plan: SchemeNeeds) -> bool:
        return plan.scheme is None or self.in_floats

    def _check_has_floats(self) -> None:
        """Raise RuntimeError if the weight was gathered as codes, which have lost the float values."""
        if isinstance(self.weight, QuantizedTensor) and not self.frozen:
            raise RuntimeError(
                "hop.nn: this scheme computes with the float weight, but FSDP2 gathered it as codes "
                "(hop.nn.gather_as_codes); calibrate, or evaluate in floats, before fully_shard"
            )

    def _check(self, scheme: Scheme) -> None:
        """Raise unless the operator runs in `scheme`. Runs it on meta tensors, once for all layers of the same form."""
        if scheme.lhs is None and scheme.rhs is None:
            raise ValueError(
                f"hop.nn.{type(self).__name__}: scheme={scheme} quantizes only results, but a product needs codes; "
                "give lhs or rhs too"
            )
        op, args = self._call(self._sample())
        form = (op, scheme, tuple(map(_form, args)))
        if form in _runs:
            return
        given: dict[str, Tensor] = {}
        for role, text in SchemeNeeds.of(scheme).needs:
            given[FIELDS[role]] = torch.ones(1, device="meta")
            if role != GRADIENT and Quantizer.parse(text).scale.has_zero_point():
                given[f"{FIELDS[role]}_zero_point"] = torch.ones(1, device="meta")
        seed = torch.zeros((), dtype=torch.int64, device="meta") if scheme.is_stochastic() else None
        bare = (torch.empty_like(a, device="meta") if isinstance(a, Tensor) else a for a in args)
        with torch.no_grad():
            quantized(op, scheme, *bare, scales=Scales(**given), seed=seed)
        if len(_runs) < 4096:
            _runs.add(form)


def _form(argument: object) -> object:
    """The properties of an argument that `_check` depends on, as a hashable value."""
    if isinstance(argument, Tensor):
        return str(getattr(argument, "quantizer", "")), tuple(argument.shape), argument.dtype
    return tuple(argument) if isinstance(argument, list) else argument


profiling.LAYERS.append(Layer)


def spelled(scheme: Scheme | AttentionScheme) -> str:
    """The name of `scheme` in hop.schemes, hop.recipes or hop.attention_schemes, or else its text."""
    named = {**SCHEMES, **RECIPES, **ATTENTION_SCHEMES}
    return next((name for name, value in named.items() if value == scheme), str(scheme))
