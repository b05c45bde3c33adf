"""Private classes and attributes of torch.nn."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import conv

if TYPE_CHECKING:
    from torch.nn.utils.prune import BasePruningMethod


ConvNd = conv._ConvNd
ConvTransposeNd: Any = conv._ConvTransposeNd


def padding_at_ends(convolution: ConvNd) -> list[int]:
    """The padding of a convolution at both ends of each dimension, in the order of functional.pad."""
    return convolution._reversed_padding_repeated_twice


def output_padding(convolution: Any, x: Tensor, size: Sequence[int]) -> list[int]:
    """The output padding of a transposed convolution for a result of this size. Raises ValueError as PyTorch does."""
    c, spatial = convolution, convolution.weight.dim() - 2
    return c._output_padding(x, list(size), c.stride, c.padding, c.kernel_size, spatial, c.dilation)


def forward_pre_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """The hooks that run before the module's forward."""
    return list(module._forward_pre_hooks.values())


def pruned_name(hook: "BasePruningMethod") -> str:
    """The name of the tensor that a torch.nn.utils.prune.BasePruningMethod computes."""
    return hook._tensor_name


def remove_load_hooks(module: nn.Module, matches: Callable[[object], bool]) -> None:
    """Remove the matching hooks that run before the module's state is loaded."""
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, wrapped in hooks.items() if matches(getattr(wrapped, "hook", wrapped))]:
        del hooks[key]


def after_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Register a hook that runs after the module's state is loaded, once."""
    if hook not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(hook)


def has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks that run before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
