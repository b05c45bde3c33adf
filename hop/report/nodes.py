"""The module that a node comes from, and the operator that it runs."""

import re
from typing import Any

from torch.fx import Node

from hop.compat.eager import OpOverload


def path_of(node: Node) -> str:
    """The path of the submodule that a node belongs to, such as "encoder.layer.0"; empty if the program does not record
    it.
    """
    paths = paths_of(node)
    return paths[-1] if paths else ""


def paths_of(node: Node) -> list[str]:
    """The paths of that submodule and of its parents, outermost first."""
    return [path for name, _ in _stack(node) if (path := _module_path(str(name)))]


def module_of(node: Node) -> str:
    """The class name of the submodule that a node belongs to; empty if the program does not record it."""
    stack = _stack(node)
    if not path_of(node) or not stack:
        return ""
    kind = stack[-1][1]
    return (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _stack(node: Node) -> list[tuple[str, Any]]:
    """The names and classes of the modules that enclose a node, outermost first."""
    modules: dict[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return list(modules.values())


def _module_path(name: str) -> str:
    """A module's path as `named_modules` spells it; repeated calls of a module share one path."""
    if name.startswith("_empty_nn_module_stack"):
        return ""
    name = re.sub(r"^L\['self'\]\.?|^L__self___?|@\d+", "", name)
    return re.sub(r"\['?(\w+)'?\]", r".\1", name).strip(".")


def inner_operator(node: Node) -> Any:
    """The operator that a node calls; for one of our operators on operators, the inner one."""
    inner = node.args[0] if node.args else None
    return inner if isinstance(inner, OpOverload) else node.target
