"""Versions of torch: the running one, the tested ones, and features that only work with some of them."""

import re
from dataclasses import dataclass

import torch

Version = tuple[int, int]
"""The first two numbers of a version of torch."""

TESTED: tuple[Version, ...] = ((2, 11), (2, 13), (2, 15))
"""The versions that tests run with (docs/versions.md); pyproject.toml has the first and the last as bounds."""


def version() -> Version:
    """The version of the running torch."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Lack:
    """A feature that the library does not support with some versions of torch."""

    what: str
    """The feature, as a user calls it."""
    instead: str
    """The actual behavior, and what to do."""
    until: Version | None = None
    """The first tested version with which it works; None if there is none yet."""
    since: Version | None = None
    """The first tested version with which it does not work; None for all before `until`."""
    reported: tuple[str, ...] = ()
    """PyTorch issues and pull requests about it."""

    def shows(self, torch_version: Version | None = None) -> bool:
        """Whether a version, by default the running one, lacks the feature."""
        running = version() if torch_version is None else torch_version
        return (self.since is None or running >= self.since) and (self.until is None or running < self.until)


LACKS: dict[str, Lack] = {
    "replace_in_programs": Lack(
        "`dataclasses.replace` of a quantizer, a scheme or a part of one in a compiled function",
        "Dynamo raises because it cannot wrap static methods; create the value outside",
        until=(2, 13),
    ),
    "casts_saturate": Lack(
        "a result of `hop.out_dtype` or `hop.scaled` in `torch.float8_e4m3fn` beyond 464",
        "NaN, as PyTorch casts, instead of 448; quantizers and `hop.fake_quantize` saturate in all versions",
        until=(2, 13),
    ),
    "scan_gradients": Lack(
        "the gradient of `scan` if the initial carry requires none",
        "wrong gradients in eager mode, of plain float tensors too; an aliasing error when compiled; write the loop "
        "in Python",
        until=(2, 13),
    ),
    "saved_associative_scans": Lack(
        "saving an exported program with an `associative_scan`",
        "torch.export.save raises 'serializing lazy_load_decompositions is not supported'; save the result of "
        "`run_decompositions()`",
        until=(2, 13),
    ),
}
"""By name. For each, tests/project/test_versions.py has a probe with the same name, which checks whether it works."""
