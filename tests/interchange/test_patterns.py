"""Regular expressions without backtracking, against Python's re."""

import itertools
import random
import re
import time
import unittest

from hop.interchange.patterns import matches

EXPRESSIONS = [
    r".*", r"a", r"^a$", r"", r"a|b|", r"model\.layers\.\d+\.mlp\..*", r".*(q|k|v)_proj$",
    r"(?:ab)*c", r"(a|ab)(c|bcd)d*",
    r"[a-c]+x?", r"[^.]*\.w", r"^(?!.*lm_head).*$", r"(?=a)ab", r"a{2}", r"a{1,2}b", r"a{0,}b", r"a*?b", r"\w+\.\D",
    r"[]a]b", r"[a\]]+", r"[\d.]+$", r"(a*)*b", r"((a|b)*c){2}", r".*down_proj", r"x{3,}",
]  # fmt: skip
TEXTS = [
    "", "a", "ab", "abcd", "aab", "aaab", "ac", "ababc", "acbc", "model.layers.12.mlp.up_proj", "model.layers.x.mlp.up",
    "lm_head", "model.lm_head.w", "a.self_attn.q_proj", "]b", "a]", "1.2", "xxxx", "b.down_proj", "w.w", "aaaaaaaac",
]  # fmt: skip


class TestMatches(unittest.TestCase):
    def test_equals_re(self):
        for expression, text in itertools.product(EXPRESSIONS, TEXTS):
            assert matches(expression, text) == bool(re.match(expression, text)), (expression, text)

    def test_random_expressions(self):
        draw = random.Random(0)
        for _ in range(3000):
            expression = "".join(
                draw.choice([*"ab.()|*+?^$[]", "\\d", "(?:", "(?!"]) for _ in range(draw.randint(1, 8))
            )
            try:
                compiled = re.compile(expression)
                found = matches(expression, "")
            except (re.error, ValueError, FutureWarning):  # [[ may come to nest
                continue
            assert found == bool(compiled.match("")), expression
            for text in ("a", "ab", "ba", "aab", "1a"):
                assert matches(expression, text) == bool(compiled.match(text)), (expression, text)

    def test_no_backtracking(self):
        start = time.process_time()
        assert not matches(r"(a*)*(a*)*(a|a)*b", "a" * 200)
        assert not matches(r"(((a+)+)+)+$", "a" * 200 + "!")
        assert time.process_time() - start < 5

    def test_refused(self):
        for expression in (
            "a++",
            "(",
            ")",
            "a)",
            "*a",
            "[a",
            "\\",
            "\\1",
            "(?P<x>a)",
            "(?<=a)b",
            "a{x}",
            "a{2000}",
            "a" * 513,
            "(" * 9,
        ):
            with self.assertRaisesRegex(ValueError, "the expression"):
                matches(expression, "a")
