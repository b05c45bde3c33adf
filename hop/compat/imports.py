"""Callbacks for when Dynamo, Inductor, DTensor or the FLOP counter are imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """An import hook that calls back once, right after a module has been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)  # the name is no longer waited for, so this does not recurse
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for callback in callbacks:
                callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _ImportWatcher()
sys.meta_path.insert(0, _watcher)


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Run `callback` now if `module` is already imported, otherwise right after its import."""
    if module in sys.modules:
        callback()
    else:
        _watcher.waiting.setdefault(module, []).append(callback)
