"""Imports go one way: compat, nn, functional, sampling, kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pliant

ROOT = Path(pliant.__file__).parent

# A layer imports itself and what stands before it. The canonical form is the vocabulary of all of
# them and stands on nothing; everything unnamed (command line, testing, plots) stands on the rest.
LAYERS = ["sampling.problem", "kernels", "sampling", "functional", "nn", "compat"]
MODULES = sorted(ROOT.rglob("*.py"))


def layer(module: str) -> int:
    """The rank of `module`, a dotted name inside pliant; pliant itself is its public functions."""
    if not module:
        return LAYERS.index("functional")
    for name in LAYERS:
        if module == name or module.startswith(f"{name}."):
            return LAYERS.index(name)
    return len(LAYERS)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every module that `source` imports, at the top or inside a function; ours without `pliant.`,
    marked by a leading dot."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = ["pliant", *module.split(".")] if module else ["pliant"]
                parts = parts[: len(parts) - node.level + is_package]
                base = ".".join([*parts, base]).rstrip(".")
            # `from . import checks` imports a module as well as it imports a name.
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = names if base.split(".")[0] == "pliant" else [base]
        else:
            continue
        for name in names:
            ours = name == "pliant" or name.startswith("pliant.")
            found.add("." + name[len("pliant.") :] if ours else name)
    return found


def against_the_order(source: str, module: str, is_package: bool = False) -> list[str]:
    used = {name[1:] for name in imports(source, module, is_package) if name.startswith(".")}
    # A name imported from a module has the layer of that module.
    return sorted(name for name in used if layer(name) > layer(module))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_one_way(path):
    module = name_of(path)
    if module:  # pliant/__init__.py is the public face and imports what it shows
        assert against_the_order(path.read_text(), module, path.name == "__init__.py") == []


@pytest.mark.parametrize(
    "path", [p for p in MODULES if name_of(p).startswith("sampling")], ids=name_of
)
def test_sampling_imports_torch_alone(path):
    """No Triton, no compiled code: kernels are loaded by name, on first use."""
    used = imports(path.read_text(), name_of(path), path.name == "__init__.py")
    foreign = {name.split(".")[0] for name in used if not name.startswith(".")}
    assert foreign <= {"torch", *sys.stdlib_module_names} - {"ctypes"}
    assert not any(name.startswith(".kernels") for name in used)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if name_of(p).startswith("kernels.")], ids=name_of
)
def test_backends_do_not_import_each_other(path):
    module = name_of(path)
    own = ".".join(module.split(".")[:2])
    used = imports(path.read_text(), module, path.name == "__init__.py")
    others = [n[1:] for n in used if n.startswith(".kernels.")]
    assert [name for name in others if not f"{name}.".startswith(f"{own}.")] == []


def test_import_pliant_imports_torch_alone():
    code = (
        "import torch, sys; before = set(sys.modules); import pliant; "
        "print(*(set(sys.modules) - before))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert "pliant.functional.attention" in loaded
    assert [name for name in loaded if name.startswith("pliant.kernels.")] == []
    roots = {name.split(".")[0] for name in loaded}
    assert roots.isdisjoint({"triton", "numpy", "rich", "matplotlib", "hypothesis"})


def test_the_guard_sees_each_way_to_write_an_import():
    for source in (
        "import pliant",
        "import pliant.functional.attention",
        "from pliant import functional",
        "from pliant.functional import attention",
        "from .. import functional",
        "from ..functional.attention import multi_scale_deformable_attn",
        "from ..testing import cases",
        "def late():\n    from pliant.compat import torch_npu",
    ):
        assert against_the_order(source, "sampling.ops"), source
    for source in ("import torch", "import json", "from . import checks", "from .. import kernels"):
        assert against_the_order(source, "sampling.ops") == [], source
    assert against_the_order("from ...sampling.problem import Policy", "kernels.cpu.launch") == []
    assert against_the_order("from ...sampling.ops import choose", "kernels.cpu.launch")
    assert against_the_order("from . import ops", "sampling", is_package=True) == []
    assert against_the_order("from . import functional", "", is_package=True) == []
