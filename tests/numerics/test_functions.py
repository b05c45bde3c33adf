"""Elementary functions: the inputs that float64 does not decide, and random ones, against mpmath; lowered, too."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hop.compat.export import as_decomposition
from hop.numerics import functions
from tests.numerics.hard_cases import settled

_LINES = Path(__file__).with_name("hard_cases.txt").read_text().splitlines()
HARD = {name: pairs for name, *pairs in map(str.split, _LINES)}


def hard_cases(name: str) -> tuple[Tensor, Tensor]:
    """Inputs that float64 does not decide, and their results."""
    pairs = [[int(word, 16) for word in pair.split(":")] for pair in HARD.get(name, [])]
    words = torch.from_numpy(np.array(pairs, dtype=np.uint32).reshape(-1, 2).view(np.float32))
    return words[:, 0].contiguous(), words[:, 1].contiguous()


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), 0x7FC00000, x.contiguous().view(torch.int32))


@pytest.mark.parametrize("name", functions.NAMES)
def test_what_float64_does_not_decide(name: str) -> None:
    x, want = hard_cases(name)
    assert len(x) > 5 or name in ("sqrt", "rsqrt")
    for found in (functions.apply(name, x), as_decomposition(functions.apply)(name, x)):
        assert torch.equal(found, want), x[found != want]


@pytest.mark.parametrize("name", functions.NAMES)
def test_hard_cases_by_more_digits(name: str) -> None:
    x, want = hard_cases(name)
    for number, y in list(zip(x.tolist(), want.tolist(), strict=True))[::3]:
        assert settled(name, number)[2] == y


@pytest.mark.parametrize("name", functions.NAMES)
def test_other_libraries_would_do(name: str, monkeypatch: Any) -> None:
    """A float64 library that is wrong by a unit in the last place, either way, gives the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([hard_cases(name)[0], torch.randn(50_000, generator=generator) * 4])
    x = x.abs() if name in ("log", "sqrt", "rsqrt") else x
    want, own = functions.apply(name, x), functions._WIDE[name]
    for away in (1 - 2.0**-53, 1 + 2.0**-52):
        monkeypatch.setitem(functions._WIDE, name, lambda v, away=away: own(v) * away)
        if name in ("sqrt", "rsqrt"):  # √ and / are right everywhere, and it is moved by nothing
            continue
        assert torch.equal(functions.apply(name, x), want)


@pytest.mark.parametrize("name", functions.NAMES)
def test_lowered_forms_give_the_same(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(30_000, generator=generator) * scale for scale in (1e-3, 1.0, 5.0, 50.0)]
    words = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    x = torch.cat([*parts, words.view(torch.float32), torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0])])
    assert torch.equal(bits(functions.apply(name, x)), bits(as_decomposition(functions.apply)(name, x)))
