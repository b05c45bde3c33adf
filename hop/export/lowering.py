"""Programs of our operators as programs of core ATen."""

from torch.export import ExportedProgram

from hop._hop import decompositions


def lower(program: ExportedProgram) -> ExportedProgram:
    """The same program in core ATen: every operator of ours as what it means, with equal integers."""
    return program.run_decompositions(decompositions())
