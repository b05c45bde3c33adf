"""Give modules another forward by a subclass of their class, which keeps its name, signature, copies and pickles."""

import functools
from collections.abc import Callable

from torch import nn

Maker = Callable[[type[nn.Module]], type[nn.Module]]


def subclass(
    maker: Maker, cls: type[nn.Module], forward: Callable[..., object], mark: type = object
) -> type[nn.Module]:
    """The subclass of `cls` and of `mark` with this forward.

    Args:
        maker: the module-level function that returns this subclass for `cls`, which pickles name.
        cls: the class.
        forward: the new forward, which gets the name and signature of the class's.
        mark: a class by which isinstance recognizes the modules.
    """

    def reduce(self: nn.Module, protocol: object) -> tuple[object, ...]:
        return _new, (maker, cls), self.__dict__

    functools.update_wrapper(forward, cls.forward)  # transformers reads the signature
    names = {"forward": forward, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, mark), {**names, "__reduce_ex__": reduce})


def _new(maker: Maker, cls: type[nn.Module]) -> nn.Module:
    made = maker(cls)
    return made.__new__(made)
