"""PyTorch's pytrees: nested containers of arguments."""

from typing import Any, TypeAlias

from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

Args: TypeAlias = tuple[Any, ...]
"""Positional arguments of an operator: tensors, operands, numbers, dtypes, lists of those, or None."""
Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments of an operator, a kernel or a constructor."""
ArgsKwargs: TypeAlias = tuple[Args, Kwargs]
"""The arguments of a call."""
StateDict: TypeAlias = dict[str, Any]
"""Entries of an nn.Module's state dict, or a nested state dict of a checkpoint."""
