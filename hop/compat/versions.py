"""Versions of torch: the one that runs, those that are tested, and what works with some of them alone."""

import re
from dataclasses import dataclass

import torch

Version = tuple[int, int]
"""The first two numbers of a version of torch."""

TESTED: tuple[Version, ...] = ((2, 11), (2, 13), (2, 15))
"""Those with which tests are run, docs/versions.md says which; pyproject.toml has the first and the last as bounds."""


def version() -> Version:
    """That of the torch that runs."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


@dataclass(frozen=True)
class Lack:
    """What the library does not do with some versions of torch, since they lack what it takes."""

    what: str
    """What does not work, as a user calls it."""
    instead: str
    """What happens instead, and what to do."""
    until: Version | None = None
    """The first tested version with which it works; None of what no version has yet."""
    since: Version | None = None
    """The first tested version with which it does not; None for the first of all."""
    reported: tuple[str, ...] = ()
    """Issues and pull requests of PyTorch's that are about it."""

    def shows(self, torch_version: Version | None = None) -> bool:
        """Whether that version, by default the one that runs, lacks it."""
        running = version() if torch_version is None else torch_version
        return (self.since is None or running >= self.since) and (self.until is None or running < self.until)


LACKS: dict[str, Lack] = {
    "replace_in_programs": Lack(
        "`dataclasses.replace` of a quantizer, a scheme or one of their parts, inside of a compiled function",
        "Dynamo raises: its classes have static methods, which it cannot wrap there; make the value outside",
        until=(2, 13),
    ),
    "casts_saturate": Lack(
        "a result in `torch.float8_e4m3fn`, of `hop.out_dtype` or `hop.scaled`, of numbers beyond 464",
        "NaN, PyTorch's own cast, where it is 448 from 2.13 on; quantizers and `hop.fake_quantize` saturate in all",
        until=(2, 13),
    ),
    "scan_gradients": Lack(
        "the gradient of `scan` where what it carries begins without one",
        "wrong gradients in eager mode, of plain float tensors too, or, compiled, an error that scan might be aliasing "
        "the input or the output; write the loop in Python",
        until=(2, 13),
    ),
    "saved_associative_scans": Lack(
        "saving an exported program that has an `associative_scan`",
        "torch.export.save raises that serializing lazy_load_decompositions is not supported; save what "
        "`run_decompositions()` gives",
        until=(2, 13),
    ),
}
"""By name. For each, tests/project/test_versions.py has a probe of the same name, which tells whether it works."""
