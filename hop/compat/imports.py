"""Imports of others: Dynamo, Inductor, DTensor and the FLOP counter are told of us when somebody imports them."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from typing import Any


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls back once, right after the modules it waits for have been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        callbacks = self.waiting.pop(fullname, None)
        if callbacks is None:
            return None
        spec = importlib.util.find_spec(fullname)  # the name is no longer awaited, so this does not come back here
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for callback in callbacks:
                callback()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_watcher = _ImportWatcher()
sys.meta_path.insert(0, _watcher)


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Run `callback` now if `module` is imported already, otherwise right after it has been."""
    if module in sys.modules:
        callback()
    else:
        _watcher.waiting.setdefault(module, []).append(callback)
