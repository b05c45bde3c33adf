"""The import order of packages, and what `import hop` costs."""

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

import hop

ROOT = Path(__file__).parents[2]
FLOORS = (  # each folder may import itself and those of the floors below
    ("hop.compat", "cutlass_kernels"),
    ("hop.numerics",),
    ("hop.dispatch",),
    ("hop.kernels",),
    ("hop.tensor",),
    ("hop.impls", "hop.checkpoint", "hop.interchange"),
    ("hop.nn", "hop.optim", "hop.export"),
    ("hop.integrations", "hop.algorithms"),
    ("hop.report",),
    ("hop",),  # the names that users take, as the command line does
    ("hop.cli",),
)
# Which floors of tensor, export and kernels lie above which.
INNER = (
    (("hop.tensor.buffers",), ("hop.tensor",)),
    (
        ("hop.kernels.cpu", "hop.kernels.gpu"),
        ("hop.kernels.aten",),
    ),
    (
        ("hop.export.rewrite",),
        ("hop.export.analysis",),
        ("hop.export.targets", "hop.export.golden"),
        ("hop.export.verifying",),
    ),
    (
        ("hop.export.targets.integer",),
        ("hop.export.targets.tflite", "hop.export.targets.tosa", "hop.export.targets.onnx"),
        ("hop.export.targets.qoperator", "hop.export.targets.executorch"),
    ),
)


def place(module: str, floors: Sequence[Sequence[str]]) -> tuple[int, str] | None:
    """The floor and the folder of a module. What lies in no folder is a name of hop itself."""
    for floor, folders in enumerate(floors):
        for folder in folders:
            if folder != "hop" and (module == folder or module.startswith(folder + ".")):
                return floor, folder
    names = [floor for floor, folders in enumerate(floors) if "hop" in folders]
    return (names[0], "hop") if names and module.count(".") < 2 else None


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, directly or by others."""
    order: list[str] = []
    done: set[str] = set()

    def visit(node: str, graph: Mapping[str, set[str]], found: list[str]) -> None:
        stack = [(node, iter(graph.get(node, ())))]
        done.add(node)
        while stack:
            following = next((n for n in stack[-1][1] if n not in done), None)
            if following is None:
                found.append(stack.pop()[0])
            else:
                done.add(following)
                stack.append((following, iter(graph.get(following, ()))))

    for node in edges:
        if node not in done:
            visit(node, edges, order)
    back: dict[str, set[str]] = {}
    for node, others in edges.items():
        for other in others:
            back.setdefault(other, set()).add(node)
    done.clear()
    parts = []
    for node in reversed(order):
        if node not in done:
            visit(node, back, part := [])
            parts.append(part)
    return [part for part in parts if len(part) > 1]


@functools.cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


@functools.cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports anywhere, `from hop import x` counted as hop.x."""
    found = set()
    for node in ast.walk(tree_of(path)):
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


# Of named tuples; what everybody uses who writes operators or modules; and what transformers and PEFT give to those who
# add to them.
KNOWN = {"_replace", "_asdict", "_fields", "_schema", "_version", "_load_from_state_dict", "_apply"}
KNOWN |= {"_getframe", "_apply_gate", "_attn_implementation", "_keep_in_fp32_modules", "_register_custom_module"}


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


def modules(*folders: str) -> list[tuple[Path, str]]:
    """Each file, and the name of its module."""
    paths = [path for folder in folders or ("hop", "cutlass_kernels") for path in ROOT.glob(f"{folder}/**/*.py")]
    return [(p, ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")) for p in paths]


def imported(files: Sequence[tuple[Path, str]]) -> dict[str, set[str]]:
    """Which of these modules each of them imports."""
    known = {own for _, own in files}
    return {own: {i if i in known else i.rpartition(".")[0] for i in imports(path)} & known for path, own in files}


def run(code: str, env: dict[str, str] | None = None) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=env
    ).stdout


class TestImports(unittest.TestCase):
    def test_run_one_way(self):
        for path, own in modules():
            if own == "hop.__main__":
                continue
            for module in imports(path):
                if module.split(".")[0] in ("hop", "cutlass_kernels"):
                    for floors in (FLOORS, *INNER):
                        here, there = place(own, floors), place(module, floors)
                        if floors is FLOORS:
                            assert here is not None, f"{path} lies on no floor"
                            assert there is not None, f"{path} imports {module}, which lies on no floor"
                        if here and there:
                            assert there[0] < here[0] or there == here, f"{path} imports {module}"

    def test_no_circles(self):
        edges = imported(modules())
        assert len(edges) > 200 and not circles(edges), circles(edges)
        assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["c", "b"]]

    def test_every_folder_has_a_floor(self):
        packages = {"hop", "cutlass_kernels", *(f"hop.{path.parent.name}" for path in ROOT.glob("hop/*/__init__.py"))}
        assert packages == {name for folders in FLOORS for name in folders}

    def test_few_modules_are_loose(self):
        """The public ones that show the names of modules below."""
        loose = {own for path, own in modules() if path.parent == ROOT / "hop"} - {"hop", "hop.__main__"}
        assert loose == {f"hop.{name}" for name in hop.__all__} & loose
        bodies = {own: ast.parse(path.read_text()).body for path, own in modules() if own in loose}
        kinds = ast.FunctionDef | ast.ClassDef
        defining = [own for own, body in bodies.items() if any(isinstance(statement, kinds) for statement in body)]
        assert defining == []

    def test_private_torch_is_named_in_one_folder(self):
        for path in ROOT.glob("hop/**/*.py"):
            if path.parent.name != "compat":
                assert not (found := private_torch(tree_of(path))), f"{path} names {sorted(found)}"

    def test_private_attributes_are_read_in_one_folder(self):
        """Attributes with an underscore that nothing of ours defines are PyTorch's."""
        trees = {path: tree_of(path) for path in ROOT.glob("hop/**/*.py")}
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

    @pytest.mark.full
    def test_cheap(self):
        """Nothing heavy comes with it: not Dynamo, Inductor, DTensor or the CuTe DSL, nor the command line."""
        code = "import torch, sys; before = set(sys.modules); import hop; print(*set(sys.modules) - before)"
        new = {m for m in run(code).split() if not m.startswith("hop")}
        assert not {m for m in new if m.split(".")[0] in ("torch", "cutlass", "numpy", "sympy", "typer", "rich")}, new

    @pytest.mark.full
    def test_fast(self):
        """At most 0.16 s of this process's time beyond `import torch`, once Python has compiled the files."""
        code = "import time, torch; t = time.process_time(); import hop; print(time.process_time() - t)"
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
            times = [float(run(code, env)) for _ in range(4)]
        assert min(times[1:]) <= 0.16, times

    @pytest.mark.full
    def test_what_is_not_needed_at_once_is_not_imported(self):
        modules = run("import hop, sys; print(*(m for m in sys.modules if m.startswith('hop.')))").split()
        late = {m for m in modules for name in ("export", "nn", "storage", "tensor.rules") if m == f"hop.{name}"}
        assert not late, late

    @pytest.mark.full
    def test_the_others_come_when_they_are_asked_for(self):
        code = "import hop, sys; print('hop.optim' in sys.modules, hop.optim.AdamW8bit.__name__, 'report' in dir(hop))"
        assert run(code).split() == ["False", "AdamW8bit", "True"]
        code = "import hop\ntry: hop.linear\nexcept AttributeError as e: print(e)"
        assert run(code).startswith("module 'hop' has no attribute 'linear'; ")

    @pytest.mark.full
    def test_importing_dynamo_first_or_last(self):
        call = "hop.out_dtype(torch.ops.aten.mm.default, torch.int32, x, x)"
        body = (
            f"f = torch.compile(lambda x: {call}, backend='eager', fullgraph=True);"
            "x = torch.ones(2, 2, dtype=torch.int8); print(f(x).sum().item())"
        )
        for imports in ("import torch, torch._dynamo, hop", "import torch, hop, torch._dynamo", "import torch, hop"):
            assert run(f"{imports}; {body}").strip() == "8"


FORKS = """
import contextlib, io, json, os, sys, hop
for code in json.load(sys.stdin):
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            sys.exit(f"failed: {code}")
        continue
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    print(json.dumps([out.getvalue(), err.getvalue()]), flush=True)
    os._exit(0)
"""


def run_each(programs: list[str]) -> list[tuple[str, str]]:
    """What each prints, and its warnings, by itself: in forks of one process that has imported `hop` alone, which an
    import of any of its modules does first."""
    command = [sys.executable, "-W", "always", "-c", FORKS]
    done = subprocess.run(command, input=json.dumps(programs), stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


class TestPublicModules(unittest.TestCase):
    @pytest.mark.full
    def test_by_import_and_by_attribute(self):
        """A module is reached either way, after `import hop` alone, and dir(hop) names it."""
        names = [f"hop.{name}" for name in hop.__all__ if isinstance(getattr(hop, name), ModuleType)]
        assert len(names) > 15
        programs = [
            f"import hop\nfound = {name}\nimport {name}, sys; print(found is sys.modules['{name}'])" for name in names
        ]
        for name, (printed, _) in zip(names, run_each(programs), strict=True):
            assert printed == "True\n", name

    def test_dir_shows_the_public_names_alone(self):
        assert dir(hop) == sorted([*hop.__all__, "__version__"])
        for name in ("compile_decode", "load_model", "patch_torch", "quantize_"):
            assert name in hop.__all__ and callable(getattr(hop, name))

    @pytest.mark.full
    def test_a_function_that_needs_another_package_says_so_when_it_is_called(self):
        code = "import sys; sys.modules['transformers'] = None\nfrom hop import *\ntry: load_model('x')\n"
        said = run(f"{code}except ImportError as e: print(e)")
        assert said.startswith("hop.load_model needs the package transformers: pip install ")
