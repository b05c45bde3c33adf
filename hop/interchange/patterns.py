"""Regular expressions of configurations, matched without backtracking.

Configurations come from elsewhere, and Python's `re` takes exponential time for some expressions. Here the set of
positions that a part of an expression can end at is computed from those it can begin at, so that time is polynomial in
the length of the expression and of the name.

Supported: characters, `.`, escapes, classes, groups, alternatives, quantifiers, `^`, `$` and lookahead.
"""

import functools
from collections.abc import Callable

Node = Callable[[str, set[int]], set[int]]
"""A part of an expression: from the positions where it begins to those where it can end."""

LONGEST = 512  # characters of an expression
_DEEPEST = 8  # groups in groups
_MOST_REPEATS = 1000
_KINDS: dict[str, Callable[[str], bool]] = {"d": str.isdigit, "w": lambda c: c.isalnum() or c == "_", "s": str.isspace}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r"}


def matches(expression: str, text: str) -> bool:
    """Whether an expression matches at the beginning of `text`, as re.match does.

    Raises:
        ValueError: the expression is longer than 512 characters, malformed, or has other constructs.
    """
    return bool(_compiled(expression)(text, {0}))


@functools.lru_cache(maxsize=512)
def _compiled(expression: str) -> Node:
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters, and at most {LONGEST} are supported")
    parser = _Parser(expression)
    node = parser.alternatives()
    if parser.at != len(expression):
        raise parser.error("has a ')' too many")
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def error(self, problem: str) -> ValueError:
        return ValueError(f"the expression {self.text!r} {problem}, at character {self.at}")

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, wanted: str) -> bool:
        """Whether `wanted` comes next, which is then skipped."""
        found = self.text.startswith(wanted, self.at)
        self.at += len(wanted) if found else 0
        return found

    def next(self) -> str:
        if self.at == len(self.text):
            raise self.error("ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def alternatives(self) -> Node:
        nodes = [self.sequence()]
        while self.take("|"):
            nodes.append(self.sequence())
        return nodes[0] if len(nodes) == 1 else lambda s, at: set().union(*(node(s, at) for node in nodes))

    def sequence(self) -> Node:
        nodes: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            nodes.append(self.repeated(self.atom()))
        return lambda s, at: functools.reduce(lambda now, node: node(s, now) if now else now, nodes, at)

    def atom(self) -> Node:
        char = self.next()
        if char == "(":
            return self.group()
        if char == "[":
            return _one(self.char_class())
        if char == ".":
            return _one(lambda c: c != "\n")
        if char == "^":
            return lambda s, at: at & {0}
        if char == "$":
            return lambda s, at: at & {len(s)}
        if char in "*+?{":
            raise self.error(f"repeats nothing with {char!r}")
        return _one(self.escape() if char == "\\" else _is(char))

    def group(self) -> Node:
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"has more than {_DEEPEST} groups in groups")
        ahead = {"?=": True, "?!": False}
        look = next((wanted for start, wanted in ahead.items() if self.take(start)), None)
        if look is None and not self.take("?:") and self.peek() == "?":
            raise self.error("has a group that is not supported")
        node = self.alternatives()
        if not self.take(")"):
            raise self.error("lacks a ')'")
        self.depth -= 1
        return node if look is None else lambda s, at: {p for p in at if bool(node(s, {p})) == look}

    def escape(self) -> Callable[[str], bool]:
        char = self.next()
        if char.lower() in _KINDS:
            kind = _KINDS[char.lower()]
            return kind if char.islower() else lambda c: not kind(c)
        if char.isalnum() and char not in _CONTROLS:
            raise self.error(f"has the escape \\{char}, which is not supported")
        return _is(_CONTROLS.get(char, char))

    def char_class(self) -> Callable[[str], bool]:
        inverted, tests = self.take("^"), list[Callable[[str], bool]]()
        while not (tests and self.take("]")):
            first = self.next()
            if first == "\\":
                tests.append(self.escape())
            elif self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]", "\\"):
                self.at += 1
                tests.append(_between(first, self.next()))
            else:
                tests.append(_is(first))
        return lambda c: any(test(c) for test in tests) != inverted

    def repeated(self, node: Node) -> Node:
        if not self.peek() or self.peek() not in "*+?{":
            return node
        least, most = self.counts()
        self.take("?")  # a lazy quantifier ends at the same positions
        if self.peek() and self.peek() in "*+?{":
            raise self.error("repeats a repetition, which is not supported")
        return _repeat(node, least, most)

    def counts(self) -> tuple[int, int | None]:
        char = self.next()
        if char != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        inside, _, _ = self.text[self.at :].partition("}")
        low, comma, high = inside.partition(",")
        if not self.take(f"{inside}}}") or not low.isdecimal() or (high and not high.isdecimal()):
            raise self.error("has a malformed {}")
        counts = int(low), int(high) if high else None if comma else int(low)
        if max(n or 0 for n in counts) > _MOST_REPEATS:
            raise self.error(f"repeats more than {_MOST_REPEATS} times")
        return counts


def _is(char: str) -> Callable[[str], bool]:
    return lambda c: c == char


def _between(first: str, last: str) -> Callable[[str], bool]:
    return lambda c: first <= c <= last


def _one(test: Callable[[str], bool]) -> Node:
    """A single character."""
    return lambda s, at: {p + 1 for p in at if p < len(s) and test(s[p])}


def _repeat(node: Node, least: int, most: int | None) -> Node:
    def run(s: str, at: set[int]) -> set[int]:
        for _ in range(least):
            at = node(s, at)
        ends, new, count = set(at), at, least
        while new and (most is None or count < most):
            new = node(s, new) - ends
            ends |= new
            count += 1
        return ends

    return run
