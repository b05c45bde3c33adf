# pyright: strict, reportUnnecessaryIsInstance=false, reportUnknownMemberType=false, reportPrivateImportUsage=false
"""Programs of our operators as programs of core ATen."""

from torch.export import ExportedProgram

from hop._hop import decompositions
from hop.export.program import check_program


def lower(program: ExportedProgram) -> ExportedProgram:
    """The same program in core ATen: every operator of ours as what it means, with equal integers.

    Raises TypeError for what is no ExportedProgram.
    """
    check_program(program, "lower")
    return program.run_decompositions(decompositions())
