"""torch.nn's classes whose names are private, and what they keep."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.modules import conv

ConvNd: Any = conv._ConvNd
ConvTransposeNd: Any = conv._ConvTransposeNd


def padding_at_ends(convolution: Any) -> list[int]:
    """The padding of a convolution at both ends of each dimension, the last dimension first, as torch.nn.functional.pad
    takes it."""
    return convolution._reversed_padding_repeated_twice


def output_padding(convolution: Any, x: Tensor, size: Sequence[int]) -> list[int]:
    """What a transposed convolution adds at the ends, for a result of this size. Raises ValueError as PyTorch does."""
    c, spatial = convolution, convolution.weight.dim() - 2
    return c._output_padding(x, list(size), c.stride, c.padding, c.kernel_size, spatial, c.dilation)


def forward_pre_hooks(module: Any) -> list[Any]:
    """What is called before its forward."""
    return list(module._forward_pre_hooks.values())


def pruned_name(hook: Any) -> str:
    """The tensor that a torch.nn.utils.prune.BasePruningMethod computes."""
    return hook._tensor_name


def remove_load_hooks(module: Any, matches: Callable[[Any], bool]) -> None:
    """Remove the hooks that are called before its state is loaded and that match."""
    hooks = module._load_state_dict_pre_hooks
    for key in [key for key, wrapped in hooks.items() if matches(getattr(wrapped, "hook", wrapped))]:
        del hooks[key]


def has_hooks(module: Any) -> bool:
    """Whether something is called before or after its forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)
