"""PTX text, read into instructions whose registers and labels are numbers."""

import re
import struct
from dataclasses import dataclass, field

SIZES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2}
SIZES |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f16x2": 4, "bf16x2": 4}
STATEMENT = re.compile(r"(?:@(!?)([\w$%.]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
VARIABLE = re.compile(
    r"\.(b8|[usbf]\d+|f16x2)\s+(?:\.ptr\s+(?:\.\w+\s+)*?(?:\.align\s+\d+\s+)?)?([\w$%.]+)\s*(?:\[(\d*)\])?"
)
ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*\(([^)]*)\)([^{]*)\{|\.entry\s+([\w$.]+)()([^{(]*)\{")
ATTRIBUTE = re.compile(r"\.([a-z]\w+)((?:\s*\d+\s*,?)*)")


@dataclass(frozen=True)
class Reg:
    index: int
    size: int  # bytes; 1 of a predicate
    predicate: bool = False
    negated: bool = False


@dataclass(frozen=True)
class Imm:
    value: int | float


@dataclass(frozen=True)
class Name:
    """A label, variable, parameter or special register."""

    text: str


@dataclass(frozen=True)
class Address:
    """[base + offset], or [base, {coordinates}] of a tensor map."""

    base: "Reg | Imm | Name"
    offset: int = 0
    coordinates: "tuple[Operand, ...]" = ()


@dataclass(frozen=True)
class Vector:
    items: "tuple[Operand, ...]"


@dataclass(frozen=True)
class Pair:
    """a|b: two results."""

    items: "tuple[Operand, ...]"


SINK = Name("_")
Operand = Reg | Imm | Name | Address | Vector | Pair


@dataclass
class Instruction:
    line: int
    text: str
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Reg | None
    target: int = -1  # of a branch

    @property
    def type(self) -> str:
        return self.parts[-1]

    def has(self, part: str) -> bool:
        return part in self.parts


@dataclass(frozen=True)
class Variable:
    name: str
    space: str
    size: int  # bytes; 0: as much as the launch gives
    align: int


@dataclass
class Entry:
    name: str
    parameters: list[Variable]
    attributes: dict[str, tuple[int, ...]]
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    registers: list[Reg] = field(default_factory=list)


class Scope:
    """The names that a pair of braces declares."""

    def __init__(self, parent: "Scope | None") -> None:
        self.parent = parent
        self.registers: dict[str, Reg] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> Reg | None:
        return self.registers.get(name) or (self.parent.register(name) if self.parent else None)

    def label(self, name: str) -> int:
        if name in self.labels:
            return self.labels[name]
        if self.parent is None:
            raise SyntaxError(f"PTX: no label {name}")
        return self.parent.label(name)


def parse(ptx: str) -> dict[str, Entry]:
    """The kernels of a module by their names."""
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m.group()), ptx, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    entries = {}
    outside = []
    position = 0
    while match := ENTRY.search(text, position):
        outside += variables(text[position : match.start()])
        name = match[1] or match[4]
        attributes = {
            k: tuple(map(int, re.findall(r"\d+", v))) for k, v in ATTRIBUTE.findall(match[3] or match[6] or "")
        }
        entry = entries[name] = Entry(name, variables((match[2] or "").replace(",", ";")), attributes)
        position = Body(entry, text, match.end()).end
    for entry in entries.values():
        entry.variables += outside
    return entries


def variables(text: str) -> list[Variable]:
    """The declarations of `.param`, `.shared`, `.local` variables in a piece of text."""
    found = []
    for statement in text.split(";"):
        space = re.search(r"\.(param|shared|local|global|const)\b", statement)
        match = VARIABLE.search(statement)
        if space is None or match is None:
            continue
        if space[1] in ("global", "const"):
            raise NotImplementedError(f"PTX: a variable of the module: {statement.strip()}")
        align = re.search(r"\.align\s+(\d+)", statement)
        item = SIZES[match[1]]
        size = item if match[3] is None else item * int(match[3] or 0)
        # The alignment that follows .ptr is that of what the parameter points to.
        own = align is not None and ".ptr" not in statement[: align.start()]
        found.append(Variable(match[2], space[1], size, int(align[1]) if align and own else item))
    return found


class Body:
    """Reads the statements of one kernel; `end` is where its closing brace is."""

    def __init__(self, entry: Entry, text: str, position: int) -> None:
        self.entry, self.text = entry, text
        self.scope = Scope(None)
        branches: list[tuple[Instruction, str, Scope]] = []
        depth = 1
        line, counted = text.count("\n", 0, position) + 1, position
        while depth:
            position = len(text) - len(text[position:].lstrip()) if text[position].isspace() else position
            line, counted = line + text.count("\n", counted, position), position
            if text[position] == "{":
                self.scope = Scope(self.scope)
                depth, position = depth + 1, position + 1
            elif text[position] == "}":
                self.scope = self.scope.parent or self.scope
                depth, position = depth - 1, position + 1
            elif text[position] == ";":
                position += 1
            elif match := LABEL.match(text, position):
                self.scope.labels[match[1]] = len(entry.instructions)
                position = match.end()
            elif text.startswith((".loc", ".file"), position):
                position = text.index("\n", position)
            else:
                stop = text.index(";", position)
                self.statement(text[position:stop].strip(), line, branches)
                position = stop + 1
        for instruction, label, scope in branches:
            instruction.target = scope.label(label)
        self.end = position

    def statement(self, text: str, line: int, branches: list) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith((".shared", ".local", ".param")):
            self.entry.variables += variables(text)
        elif text.startswith(".pragma"):
            pass
        else:
            match = STATEMENT.fullmatch(text)
            if match is None:
                raise SyntaxError(f"PTX line {line}: {text}")
            negated, guard, opcode, rest = match.groups()
            predicate = self.operand(("!" if negated else "") + guard) if guard else None
            assert predicate is None or isinstance(predicate, Reg)
            operands = tuple(self.operand(o) for o in split(rest))
            short = " ".join(text.split())
            instruction = Instruction(line, short, opcode, tuple(opcode.split(".")), operands, predicate)
            self.entry.instructions.append(instruction)
            if opcode in ("bra", "bra.uni"):
                branches.append((instruction, rest.strip(), self.scope))

    def declare(self, text: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
        if match is None:
            raise SyntaxError(f"PTX: {text}")
        for name in split(match[2]):
            many = re.fullmatch(r"([\w$%]+)<(\d+)>", name)
            for each in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
                register = Reg(len(self.entry.registers), SIZES[match[1]], match[1] == "pred")
                self.entry.registers.append(register)
                self.scope.registers[each] = register

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self.operand(o) for o in split(text[1:-1])))
        if text.startswith("["):
            return self.address(text[1:-1])
        if "|" in text:
            return Pair(tuple(self.operand(o.strip()) for o in text.split("|")))
        if text.startswith("!"):
            register = self.operand(text[1:].strip())
            assert isinstance(register, Reg)
            return Reg(register.index, register.size, register.predicate, not register.negated)
        if register := self.scope.register(text):
            return register
        return number(text) or Name(text)

    def address(self, text: str) -> Address:
        first, *rest = split(text)
        match = re.fullmatch(r"([^+\-]+?)\s*(?:\+\s*(-?\w+))?", first.strip())
        if match is None:
            raise SyntaxError(f"PTX: address [{text}]")
        offset = int(match[2] or "0", 0)
        base = self.operand(match[1].strip())
        assert isinstance(base, Reg | Imm | Name)
        coordinates = self.operand(rest[0].strip()) if rest else Vector(())
        assert isinstance(coordinates, Vector)
        return Address(base, offset, coordinates.items)


def number(text: str) -> Imm | None:
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return Imm(struct.unpack("<f", int(match[1], 16).to_bytes(4, "little"))[0])
    if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", text):
        return Imm(struct.unpack("<d", int(match[1], 16).to_bytes(8, "little"))[0])
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        return Imm(int(text.rstrip("U"), 0 if re.match(r"-?0[xXbB]", text) else 10))
    if re.fullmatch(r"-?\d+\.\d*([eE][+-]?\d+)?", text):
        return Imm(float(text))
    return None


def split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
