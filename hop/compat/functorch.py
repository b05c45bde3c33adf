"""torch.func: levels of grad, jvp and vmap."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C._functorch import TransformType as TransformType
from torch._C._functorch import (
    _add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch._C._functorch import _unwrap_for_grad as unwrap_for_grad
from torch._C._functorch import _wrap_for_grad as wrap_for_grad
from torch._C._functorch import unwrap_if_dead as unwrap_if_dead
from torch._functorch.pyfunctorch import FuncTorchInterpreter as FuncTorchInterpreter
from torch._functorch.pyfunctorch import VmapInterpreter as VmapInterpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._functorch.vmap import unwrap_batched as unwrap_batched
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.autograd.function import _SingleLevelFunction

add_batch_dim = _add_batch_dim
is_batched = is_batchedtensor


def innermost(tensor: Tensor) -> Tensor:
    """The tensor inside all wrappers of torch.func levels."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def apply_at_level(
    rule: type,
    interpreter: FuncTorchInterpreter,
    call: Callable[..., Tensor],
    context: object,
    tensors: Sequence[Tensor],
) -> Tensor:
    """Run `call(*tensors)` one level below `interpreter`, a level of torch.func.grad, and differentiate it with `rule`.

    `rule` has the static methods `setup_context(ctx, inputs, output)` and `backward(ctx, grad)` of
    torch.autograd.Function; the inputs are `(context, *tensors)`.
    """
    level = interpreter.level()

    def forward(context: object, *tensors: Tensor) -> Tensor:
        inner = [unwrap_for_grad(x, level) for x in tensors]
        with torch.enable_grad(), _set_fwd_grad_enabled(True), interpreter.lower():
            out = call(*inner)
        return wrap_for_grad(out, level)

    function = type(rule.__name__, (rule, _SingleLevelFunction), {"forward": staticmethod(forward)})
    with enable_single_level_autograd_function():
        return function.apply(context, *tensors)
