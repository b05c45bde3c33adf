"""What a node of a program says of itself: the submodule of the model in which it stands, and what it calls."""

import re
from typing import Any

from torch.fx import Node

from hop.compat.eager import OpOverload


def path_of(node: Node) -> str:
    """The submodule in which a node stands, as "encoder.layer.0"; empty where the program does not say."""
    paths = paths_of(node)
    return paths[-1] if paths else ""


def paths_of(node: Node) -> list[str]:
    """That submodule and those around it, outermost first."""
    return [path for name, _ in _stack(node) if (path := _plain(str(name)))]


def module_of(node: Node) -> str:
    """The class of that submodule."""
    stack = _stack(node)
    if not path_of(node) or not stack:
        return ""
    kind = stack[-1][1]
    return (kind if isinstance(kind, str) else kind.__name__).rpartition(".")[2]


def _stack(node: Node) -> list[tuple[str, Any]]:
    """The names and classes of the submodules in which a node stands, outermost first."""
    modules: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    return list(modules.values())


def _plain(name: str) -> str:
    """The path of a module as `named_modules` has it, of one call like of another."""
    if name.startswith("_empty_nn_module_stack"):
        return ""
    name = re.sub(r"^L\['self'\]\.?|^L__self___?|@\d+", "", name)
    return re.sub(r"\['?(\w+)'?\]", r".\1", name).strip(".")


def inner_operator(node: Node) -> Any:
    """What a node calls; of an operator on operators, the inner one."""
    inner = node.args[0] if node.args else None
    return inner if isinstance(inner, OpOverload) else node.target
