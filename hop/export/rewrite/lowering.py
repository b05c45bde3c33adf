"""lower: rewrite our operators in core ATen."""

from torch.export import ExportedProgram

from hop.export.rewrite.program import check_program
from hop.impls.decompositions import decompositions
from hop.kernels.cpu import native as native_kernels


def lower(program: ExportedProgram, *, native: bool = False) -> ExportedProgram:
    """Lower a program to core ATen: replace each of our operators by its reference, with equal integers.

    Args:
        program: an exported program; it is not changed.
        native: use operators of the native library, hop_native::*, where its kernels accept a call, as in eager mode,
            and keep PyTorch's operators unchanged. A package of the program then needs the library (`native_library`).

    Raises TypeError if `program` is not an ExportedProgram, and RuntimeError for native=True without the native
    library.
    """
    check_program(program, "lower")
    if native:
        native_library()
    return program.run_decompositions(decompositions(native=native))


def native_library() -> str:
    """The path of the native library, whose operators programs of `lower(program, native=True)` call.

    Load it with torch.ops.load_library in Python, or dlopen in C++. It only needs PyTorch's libtorch_cpu, of any
    version that the package supports. Raises RuntimeError if it was not built.
    """
    library = native_kernels.library()
    if library.file is None:
        raise RuntimeError(f"native_library: {library.missing}")
    return library.file
