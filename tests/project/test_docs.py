"""The code on the pages runs, the commands exist, and their links lead somewhere."""

import importlib
import importlib.util
import re
import unittest
from pathlib import Path

import pytest
import torch
from parameterized import parameterized

import hop
from tests.support import forks

ROOT = Path(__file__).parents[2]
NEEDS = {
    "checkpoints": ("gguf", "transformers", "accelerate", "safetensors"),
    "cookbook": ("torchao", "ai_edge_litert", "executorch", "transformers", "accelerate", "safetensors"),
    "export_executorch": ("executorch",),
    "export_onnx": ("onnxscript", "onnxruntime"),
    "export_targets": ("torchao", "ai_edge_litert", "executorch", "onnxscript", "onnxruntime"),
    "lower": ("torchao", "ai_edge_litert", "executorch", "onnxscript", "onnxruntime"),
    "train": ("sklearn",),
    "transformers": ("transformers", "accelerate", "peft", "safetensors"),
}  # optional packages of the code on a page
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
VARIABLES = set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.M))
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))


def anchors(page: Path) -> set[str]:
    """What links to the headings of a page end with: their words in small letters, joined by hyphens."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in re.findall(r"^#+ (.*)$", text, re.M))
    return {word.strip().replace(" ", "-") for word in words}


FILES = {"hop.json"}  # names of files that read like names in the package


def exists(name: str) -> bool:
    """Whether a dotted name is a module, an attribute of one, or an annotated attribute of a class."""
    path, *rest = name.split(".")
    found: object = hop
    for part in rest:
        path += f".{part}"
        if part in getattr(found, "__annotations__", {}) and not hasattr(found, part):
            return True
        if hasattr(found, part):
            found = getattr(found, part)
        elif importlib.util.find_spec(path) is not None:
            found = importlib.import_module(path)
        else:
            return False
    return True


class TestDocs(unittest.TestCase):
    @parameterized.expand([(p.stem, p) for p in PAGES if "```python" in p.read_text()])
    @pytest.mark.full
    def test_code_runs(self, _name, page):
        """The blocks of a page are one program; what a comment says that it prints, it prints."""
        for package in NEEDS.get(page.stem, ()):
            pytest.importorskip(package)
        code = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
        done = forks.run(code)
        assert done.returncode == 0, done.stderr
        indented = re.findall(r"^ +print\(.*\n +# (.*)$", code, re.M)
        for line in [*re.findall(r"^# (.*)$", code, re.M), *indented]:
            assert line in done.stdout, f"{line!r} not in {done.stdout!r}"

    def test_readme_prints_what_it_says(self):
        """The model in one line."""
        block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
        done = forks.run("import torch; torch.manual_seed(0)\n" + block)
        assert done.returncode == 0, done.stderr
        *report, error = done.stdout.splitlines()
        assert any("parameters quantized (99.8 %)" in line for line in report)
        assert 0 < float(re.findall(r"\d+\.\d+", error)[0]) < 0.02, error

    def test_readme_links_every_page(self):
        linked = set(re.findall(r"\]\(docs/([^)#]+)\)", (ROOT / "README.md").read_text()))
        included = {"index.md", "contributing.md", "changelog.md"}  # the README itself, and pages beside it
        assert linked >= {p.name for p in ROOT.glob("docs/*.md")} - included

    @parameterized.expand([(p.stem, p) for p in PAGES])
    def test_links(self, _name, page):
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), target

    @parameterized.expand([(p.stem, p) for p in PAGES])
    def test_headings_that_links_name(self, _name, page):
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"

    @parameterized.expand([(p.stem, p) for p in PAGES if p.stem != "CHANGELOG"])  # which has old names, too
    def test_names_exist(self, _name, page):
        """Each `hop.…` outside of code blocks is a name of the package or an operator in torch.ops.hop."""
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        names = set(re.findall(r"`(hop(?:\.\w+)+)", text)) - FILES
        operators = {f"hop.{name}" for name in ("gelu_mul", "hadamard", "silu_mul") if hasattr(torch.ops.hop, name)}
        assert not (unknown := {name for name in names - operators if not exists(name)}), unknown

    def test_folders_of_the_map(self):
        """The map of the code names every folder with modules, and only what exists."""
        named = set(re.findall(r"`((?:\w+/)+)`", (ROOT / "docs/code_map.md").read_text()))
        sources = [p for top in ("hop", "cutlass_kernels") for p in (ROOT / top).rglob("*.py")]
        sources += [*(ROOT / "native").rglob("*.cpp")]
        folders = {f"{p.parent.relative_to(ROOT).as_posix()}/" for p in sources} - {"hop/", "native/"}
        assert folders <= named, folders - named
        assert all((ROOT / path).is_dir() for path in named)

    @parameterized.expand([(p.stem, p) for p in PAGES])
    def test_commands_exist(self, _name, page):
        """What a page says to type: targets of make, extras of the package, files and modules that Python runs."""
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^```(?:console|sh)?\n(.*?)^```", text, re.S | re.M)
        spoken = [line for block in blocks for line in block.splitlines()]
        spoken += re.findall(r"`((?:make|python|pip|torchrun) [^`\n]+)`", text)
        for line in spoken:
            program, *words = line.split("#")[0].split() or [""]
            if program == "make":
                assert words and {word for word in words if "=" not in word} <= TARGETS, line
                assert {word.split("=")[0] for word in words if "=" in word} <= VARIABLES, line
            elif program == "pip":
                for extra in re.findall(r"\[([\w,]+)\]", line):
                    assert set(extra.split(",")) <= EXTRAS, line
            elif program in ("python", "torchrun", ".venv/bin/python"):
                files = [word for word in words if word.endswith(".py")]
                assert all((ROOT / file).is_file() for file in files), line
                if "-m" in words:
                    module = words[words.index("-m") + 1]
                    assert importlib.util.find_spec(module) is not None, line
