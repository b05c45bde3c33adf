"""Programs of our operators as programs of core ATen."""

from torch.export import ExportedProgram

from hop.export.rewrite.program import check_program
from hop.impls.decompositions import decompositions
from hop.kernels.cpu import native as native_kernels


def lower(program: ExportedProgram, *, native: bool = False) -> ExportedProgram:
    """The same program in core ATen: every operator of ours as what it means, with equal integers.

    Args:
        native: make of our operators those of the native library, hop_native::*, where its kernels take a call, as
            eager mode does, and leave PyTorch's as they are; a package of the program runs where the library is loaded
            (`native_library`).

    Raises TypeError for what is no ExportedProgram, RuntimeError for native=True without the native library.
    """
    check_program(program, "lower")
    if native:
        native_library()
    return program.run_decompositions(decompositions(native=native))


def native_library() -> str:
    """The path of the native library, whose operators programs of `lower(program, native=True)` call: for
    torch.ops.load_library in a process of Python, dlopen in one of C++. It needs PyTorch's libtorch_cpu, of any version
    that the package supports, and nothing else of the package.

    Raises RuntimeError where it was not built.
    """
    library = native_kernels.library()
    if library.file is None:
        raise RuntimeError(f"native_library: {library.missing}")
    return library.file
