"""Read a kernel's register and stack usage from its machine code."""

import struct
from typing import NamedTuple

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of the section .nv.info: (symbol, value)


class Usage(NamedTuple):
    registers: int
    stack_bytes: int  # where registers are spilled to


def usage(cubin: bytes) -> Usage:
    """The usage of a file with one kernel."""
    found = dict(_attributes(_section(cubin, ".nv.info")))
    return Usage(found[_REGISTERS], found[_FRAME])


def _section(elf: bytes, name: str) -> bytes:
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + i * size) for i in range(count)]
    strings = elf[headers[names][4] :]
    for header in headers:
        if strings[header[0] : strings.index(b"\0", header[0])].decode() == name:
            return elf[header[4] : header[4] + header[5]]
    raise ValueError(f"no section {name}")


def _attributes(section: bytes):
    """The attributes whose value is a symbol and a number."""
    at = 0
    while at < len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form == 4:  # a value of `size` bytes; in the others `size` is the value
            if size == 8:
                yield attribute, struct.unpack_from("<II", section, at)[1]
            at += size
