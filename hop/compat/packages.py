"""AOTInductor's packages: compiled for this machine, loaded with the tensors that the caller has."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hop.compat import inductor
from hop.compat.files import move, temporary_folder

_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,  # the caller's tensors are read where they lie
    "aot_inductor.compile_wrapper_opt_level": "O0",  # it calls kernels; a third of the compiler's time
    "cpp.threads": 1,  # loops over the numbers of a token take less time than to wake a thread
    "cpp.dynamic_threads": False,
}


def cache_folder() -> Path:
    """Where Inductor keeps what it compiled: TORCHINDUCTOR_CACHE_DIR, or one of the user's in the temporary folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def compile_package(program: Any, path: Path, change: Callable[[torch.fx.Graph], None]) -> None:
    """Compile an ExportedProgram into a package at `path`, without the tensors that it reads, with operators of the
    native library where its kernels take a call. It stands there whole or not at all.

    Args:
        program: of our operators as they are: lowering it first would take a quarter of the time.
        path: of the file.
        change: is given the graph in operators of ATen and of the native library, before it is fused.
    """
    options = {**_OPTIONS, "post_grad_custom_pre_pass": change}
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path.parent) as folder, inductor.keeping_native():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/{path.name}", inductor_configs=options
        )
        move(Path(package), path)


class Package:
    """A package and the tensors that it reads and writes, which are not copied.

    Args:
        path: of the file. Machine code is loaded from it.
        tensors: by the names that the program has for them, and maybe more.

    Raises:
        KeyError: the program reads a tensor that is not there."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._loaded: Any = torch._inductor.aoti_load_package(str(path))
        self.tensors = {name: tensors[name].detach() for name in self._loaded.get_constant_fqns()}  # kept alive
        self._loaded.load_constants(self.tensors, check_full_update=True, user_managed=True)

    def __call__(self, *args: Any) -> Any:
        return self._loaded(*args)
