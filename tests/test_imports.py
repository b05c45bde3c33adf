"""The house's import order, and what `import hop` costs."""

import ast
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each layer may import itself and those named.
VALUES = (
    *("hop.spelling", "hop.memory_format", "hop.blocks", "hop.packing", "hop.formats", "hop.hadamard"),
    *("hop.requantization", "hop.scaling", "hop.layouts", "hop.quantizer"),
)
LAYERS = {
    "hop.compat": set(),
    "hop.kernels": {"hop.compat", "hop.copies", "cutlass_kernels", *VALUES},
    **{name: {"hop.compat", *VALUES[:i]} for i, name in enumerate(VALUES)},
    "hop.copies": {"hop.compat", *VALUES},
    "hop.sharding": {"hop.compat", "hop.copies", "hop.kernels", *VALUES},
    "hop._leaf": {"hop.compat", "hop.spelling", "hop.memory_format"},
    "hop._hop": {"hop.compat", "hop._leaf", "hop.kernels"},
    "hop.noise": {"hop.compat", "hop._hop", "hop.kernels", "hop.blocks"},
    "hop.leaves": {"hop.compat", "hop._hop", "hop.kernels", "hop.noise", "hop.copies", "hop.sharding", *VALUES},
    "hop.tensor": {"hop.compat", "hop._hop", "hop.kernels", "hop.leaves", "hop.copies", *VALUES},
    "hop.proto": {"hop.tensor", "hop.blocks", "hop.copies", "hop.quantizer"},
    "hop.impls": {
        "hop.compat",
        "hop._hop",
        "hop.kernels",
        "hop.leaves",
        "hop.copies",
        "hop.sharding",
        "hop.tensor",
        "hop.proto",
        "hop.noise",
        "hop.schemes",
        *VALUES,
    },
    "hop.presets": {*VALUES},
    "hop.schemes": {"hop.presets", *VALUES},
    "hop.calibration": {"hop.kernels", *VALUES},
    "hop.storage": {"hop.proto", "hop.tensor", "hop.copies", "hop.spelling", "hop.quantizer"},
    "hop.checkpoint": {"hop.compat", "hop.leaves", "hop.tensor", "hop.copies"},
    "hop.nn": {
        *("hop.compat", "hop.impls", "hop.leaves", "hop.tensor", "hop.calibration", "hop.schemes", "hop.presets"),
        *("hop.copies", "hop.sharding"),
        *VALUES,
    },
    "hop.distributed": {"hop.compat", "hop.nn"},
    "hop.optim": {
        *("hop.compat", "hop.impls", "hop.kernels", "hop.leaves", "hop.noise", "hop.tensor", "hop.copies"),
        "hop.presets",
        *VALUES,
    },
    "hop.export": {
        *("hop.compat", "hop._hop", "hop.impls", "hop.kernels", "hop.leaves", "hop.tensor", "hop.nn"),
        *("hop.copies", "hop.presets", "hop.schemes"),
        *VALUES,
    },
    "hop.report": {
        *("hop.compat", "hop._hop", "hop.impls", "hop.leaves", "hop.tensor", "hop.nn", "hop.export"),
        *("hop.presets", "hop.schemes"),
        *VALUES,
    },
    "hop.cli": {
        *("hop.compat", "hop.kernels", "hop.presets", "hop.export", "hop.storage", "hop.tensor", "cutlass_kernels"),
        "hop.report",
        *VALUES,
    },
    "cutlass_kernels": set(),
}


def layer(module: str) -> str | None:
    return next((name for name in LAYERS if module == name or module.startswith(name + ".")), None)


def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, `from hop import x` counted as hop.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def private_torch(tree: ast.AST) -> set[str]:
    """Names of PyTorch that are private or experimental, in imports, expressions, and strings that are a module's name.
    ATen's operators are public, with an underscore too."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    names = {name for name in names if re.fullmatch(r"torch(\.\w+)+", name) and not name.startswith("torch.ops.aten.")}
    return {name for name in names if any(re.match("_[^_]", p) or p == "experimental" for p in name.split("."))}


# Of named tuples; and what everybody uses who writes operators or modules.
KNOWN = {"_replace", "_asdict", "_fields", "_schema", "_version", "_load_from_state_dict", "_apply"}


def defined(tree: ast.AST) -> set[str]:
    """Names that a file gives to functions, classes, variables and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def private_attributes(tree: ast.AST) -> set[str]:
    """Attributes with an underscore that a file reads, but for operators."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr)
        if not re.search(r"\b(aten|ops|c10d)\b", ast.unparse(node.value))
    }


def run(code: str, env: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=env).stdout


class TestImports(unittest.TestCase):
    def test_run_one_way(self):
        for path in [*ROOT.glob("hop/**/*.py"), *ROOT.glob("cutlass_kernels/**/*.py")]:
            own = layer(".".join(path.relative_to(ROOT).with_suffix("").parts))
            if own is None:
                continue
            for module in imports(path) - {"hop"}:
                if module.split(".")[0] in ("hop", "cutlass_kernels"):
                    assert layer(module) in {own, *LAYERS[own]}, f"{path} imports {module}"

    def test_private_torch_is_named_in_one_folder(self):
        for path in ROOT.glob("hop/**/*.py"):
            if path.parent.name != "compat":
                assert not (found := private_torch(ast.parse(path.read_text()))), f"{path} names {sorted(found)}"

    def test_private_attributes_are_read_in_one_folder(self):
        """Attributes with an underscore that nothing of ours defines are PyTorch's."""
        trees = {path: ast.parse(path.read_text()) for path in ROOT.glob("hop/**/*.py")}
        own = set().union(*map(defined, trees.values()))
        for path, tree in trees.items():
            if path.parent.name != "compat":
                assert not (found := private_attributes(tree) - own - KNOWN), f"{path} reads {sorted(found)}"
        assert private_attributes(ast.parse("graph._codegen; x = aten._softmax; ops.c10d._f")) == {"_codegen"}

    def test_private_torch_is_found(self):
        for line in (
            *("import torch._dynamo", "from torch.utils._pytree import tree_map", "from torch.fx import _x as x"),
            *("torch._C._x()", "torch.ops._c10d_functional.wait_tensor(x)", "torch.library._del_library('x')"),
            *("import_module('torch.distributed._functional_collectives')", "torch.fx.experimental.f(x)"),
        ):
            assert private_torch(ast.parse(line)), line
        for line in ("torch.ops.aten._softmax.default", "'the norm of torch._x'", "x._replace(a=1)"):
            assert not private_torch(ast.parse(line)), line

    def test_cheap(self):
        """Nothing heavy comes with it: not Dynamo, Inductor, DTensor or the CuTe DSL, nor the command line."""
        code = "import torch, sys; before = set(sys.modules); import hop; print(*set(sys.modules) - before)"
        new = {m for m in run(code).split() if not m.startswith("hop")}
        assert not {m for m in new if m.split(".")[0] in ("torch", "cutlass", "numpy", "sympy", "typer", "rich")}, new

    @pytest.mark.full
    def test_fast(self):
        """At most 0.12 s of this process's time beyond `import torch`, once Python has compiled the files."""
        code = "import time, torch; t = time.process_time(); import hop; print(time.process_time() - t)"
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
            times = [float(run(code, env)) for _ in range(4)]
        assert min(times[1:]) <= 0.12, times

    def test_what_is_not_needed_at_once_is_not_imported(self):
        modules = run("import hop, sys; print(*(m for m in sys.modules if m.startswith('hop.')))").split()
        late = {m for m in modules for name in ("export", "nn", "storage", "tensor.rules") if m == f"hop.{name}"}
        assert not late, late

    @pytest.mark.full
    def test_the_others_come_when_they_are_asked_for(self):
        code = "import hop, sys; print('hop.optim' in sys.modules, hop.optim.AdamW8bit.__name__, 'report' in dir(hop))"
        assert run(code).split() == ["False", "AdamW8bit", "True"]
        code = "import hop\ntry: hop.linear\nexcept AttributeError as e: print(e)"
        assert run(code).strip() == "module 'hop' has no attribute 'linear'"

    @pytest.mark.full
    def test_importing_dynamo_first_or_last(self):
        call = "hop.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)"
        body = (
            f"f = torch.compile(lambda x: {call}, backend='eager', fullgraph=True);"
            "x = torch.ones(2, 2, dtype=torch.int8); print(f(x).sum().item())"
        )
        for imports in ("import torch, torch._dynamo, hop", "import torch, hop, torch._dynamo", "import torch, hop"):
            assert run(f"{imports}; {body}").strip() == "8"


PUBLIC = ("hop", "hop.nn", "hop.optim", "hop.export", "hop.export.onnx", "hop.checkpoint", "hop.tensor", "hop.report")
ALSO_PUBLIC = {"hop.formats", "hop.scaling", "hop.requantization", "hop.hadamard", "hop.distributed", *PUBLIC}


def source(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


class TestTypes(unittest.TestCase):
    def test_public_modules_are_strict(self):
        """Each module that gives a public name says so to pyright in its first line."""
        given = set(ALSO_PUBLIC)
        for package in PUBLIC:
            for node in ast.walk(ast.parse(source(package).read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hop."):
                    given.add(node.module)
                elif isinstance(node, ast.ImportFrom) and node.module == "hop":
                    given |= {f"hop.{alias.name}" for alias in node.names}
        strict = {m for m in given if source(m).read_text().startswith("# pyright: strict")}
        assert not given - strict, "begin these files with the first line of hop/__init__.py"
