"""Steps of run_decompositions for programs with tensor subclasses, where PyTorch's own steps fail (`patches`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from torch import nn

if TYPE_CHECKING:
    from torch.export import ExportedProgram

P = ParamSpec("P")
R = TypeVar("R")


def refuse_inputs(program: "ExportedProgram", classes: tuple[type, ...]) -> None:
    """Raise TypeError if a user's input of the program is an instance of one of the classes."""
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in names and isinstance(value, classes):
            raise TypeError(
                f"run_decompositions: the input {node.name!r} of the program is a {type(value).__name__}, which "
                "torch.export cannot lower; take codes and scales, make the tensor with hop.from_codes in the module, "
                "and export again. The program runs, and can be saved, as it is"
            )


@contextmanager
def constants_as_buffers(program: "ExportedProgram", classes: tuple[type, ...]) -> Iterator[None]:
    """Within it, constants of the classes are buffers that are not saved, whose parts torch.export knows to find."""
    from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec

    before = program.graph_signature
    specs = [
        InputSpec(InputKind.BUFFER, spec.arg, spec.target, False)
        if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(program.constants.get(spec.target or ""), classes)
        else spec
        for spec in before.input_specs
    ]
    program._graph_signature = ExportGraphSignature(specs, before.output_specs)
    try:
        yield
    finally:
        program._graph_signature = before


def unwrap_parameters(
    module: nn.Module, unwrap: Callable[[nn.Module], nn.Module], classes: tuple[type, ...]
) -> nn.Module:
    """As `unwrap`, PyTorch's, which replaces subclasses among the parameters and buffers of a module by their parts: of
    parameters that train too, whose codes have no gradient, and of those that have several names."""
    for child in module.modules():
        names: dict[int, list[str]] = {}
        for name, p in child.named_parameters(recurse=False, remove_duplicate=False):
            names.setdefault(id(p), []).append(name)
        for same in names.values():
            _detach(child, same, classes)
    return unwrap(module)


def _detach(module: nn.Module, names: Sequence[str], classes: tuple[type, ...]) -> None:
    """Give each name a separate parameter, without a gradient, around the same codes."""
    p = module.get_parameter(names[0])
    if not isinstance(p, classes) or (len(names) == 1 and not p.requires_grad):
        return
    for name in names:
        setattr(module, name, nn.Parameter(p.detach(), requires_grad=False))


def lowering(
    lower: "Callable[Concatenate[ExportedProgram, P], R]", classes: Sequence[type]
) -> "Callable[Concatenate[ExportedProgram, P], R]":
    """`lower`, torch.export's, with all of that."""

    def lower_subclasses(program: "ExportedProgram", *args: P.args, **kwargs: P.kwargs) -> R:
        found = tuple(classes)
        refuse_inputs(program, found)
        with constants_as_buffers(program, found):
            return lower(program, *args, **kwargs)

    return lower_subclasses
