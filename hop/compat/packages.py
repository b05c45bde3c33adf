"""AOTInductor packages: compiled for this machine, and loaded with tensors of the caller."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hop.compat import inductor
from hop.compat.files import move, temporary_folder

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_OPTIONS = {
    "aot_inductor.package_constants_in_so": False,  # the caller's tensors are used without a copy
    "aot_inductor.compile_wrapper_opt_level": "O0",  # it only calls kernels, and optimizing it is slow
    "cpp.threads": 1,  # loops over the values of one token take less time than waking a thread
    "cpp.dynamic_threads": False,
}


def cache_folder() -> Path:
    """Inductor's cache folder: TORCHINDUCTOR_CACHE_DIR, or one of this user's in the temporary folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def compile_package(
    program: "ExportedProgram", path: Path, change: Callable[[torch.fx.Graph], None], precompile_headers: bool = False
) -> None:
    """Compile an ExportedProgram into a package at `path`, without the tensors that it reads.

    It uses operators of the native library for calls that its kernels support. The file is written completely or not at
    all.

    Args:
        program: a program with our operators, not lowered, since lowering takes a quarter of the compile time.
        path: the package's file.
        change: a function that changes the graph of ATen and native operators, before it is fused.
        precompile_headers: whether to precompile PyTorch's headers, which pays off from the second program on.
    """
    options = {
        **_OPTIONS,
        "post_grad_custom_pre_pass": change,
        "aot_inductor.precompile_headers": precompile_headers,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path.parent) as folder, inductor.keeping_native():
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=f"{folder}/{path.name}", inductor_configs=options
        )
        move(Path(package), path)


class Package:
    """A loaded package and the tensors that it reads and writes, which are not copied.

    Args:
        path: the package's file. Loading it loads machine code.
        tensors: the tensors by their names in the program; others are ignored.

    Raises:
        KeyError: the program reads a tensor that `tensors` does not contain.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self._loaded = torch._inductor.aoti_load_package(str(path))
        self.tensors = {name: tensors[name].detach() for name in self._loaded.get_constant_fqns()}  # keeps them alive
        self._loaded.load_constants(self.tensors, check_full_update=True, user_managed=True)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs of the program; inputs and outputs are flattened."""
        return self._loaded.loader.boxed_run(list(inputs))  # _loaded(...) would parse the trees at each call
