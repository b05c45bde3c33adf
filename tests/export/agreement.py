"""How many codes of the quantize and dequantize nodes the integer program gives, operator by operator, as a table:

    python -m tests.export.agreement

Each of a million codes and more. "one scale" is where the result has the operand's, which pools and means of PT2E have.
"""

import torch
from torch import Tensor
from torch.export import ExportedProgram

from hop import export
from tests.export.test_integer import BY_NAME, CASES, IN_ONE_SCALE, exported, in_one_scale, made

LEAST = 1_000_000
FACTORS = (1.0, 0.7, 0.41, 0.23)


def of_case(name: str) -> tuple[int, int]:
    """How many codes differ, and of how many."""
    differ = outputs = draw = 0
    while outputs < LEAST:
        model, xs = made(BY_NAME[name], (0, 2)[draw % 2])
        differ, outputs = added(exported(model, *xs), [[x * f for x in xs] for f in FACTORS], differ, outputs)
        draw += 1
    return differ, outputs


def of_one_scale(name: str) -> tuple[int, int]:
    differ = outputs = draw = 0
    while outputs < LEAST:
        program, x = in_one_scale(name, 0.0137 + 0.0031 * draw, 3 - 7 * draw)
        given = [[x.flatten()[torch.randperm(x.numel())].reshape(x.shape)] for _ in range(20)]
        differ, outputs = added(program, given, differ, outputs)
        draw += 1
    return differ, outputs


def added(program: ExportedProgram, inputs: list[list[Tensor]], differ: int, outputs: int) -> tuple[int, int]:
    own, integers = program.module(), export.to_integer(program).program.module()
    for xs in inputs:
        want, got = own(*xs), integers(*xs)
        differ, outputs = differ + int((want != got).sum()), outputs + want.numel()
    return differ, outputs


def main() -> None:
    torch.set_num_threads(1)
    print("| operator | codes | differ | equal |\n| --- | --- | --- | --- |")
    for name, count in ((case.name, of_case) for case in CASES):
        differ, outputs = count(name)
        print(f"| {name} | {outputs:,} | {differ} | {100 * (1 - differ / outputs):.3f} % |", flush=True)
    for name in IN_ONE_SCALE:
        differ, outputs = of_one_scale(name)
        print(f"| {name}, one scale | {outputs:,} | {differ} | {100 * (1 - differ / outputs):.3f} % |", flush=True)


if __name__ == "__main__":
    main()
