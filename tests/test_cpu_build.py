"""The library of the CPU kernels: built by hand, by pip, and not at all where no compiler is."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pliant.kernels.cpu import library as loader

ROOT = Path(__file__).parents[1]
ISAS = loader.ISAS
CMAKE, COMPILER = shutil.which("cmake"), shutil.which("c++")

pytestmark = pytest.mark.slow
needs_compiler = pytest.mark.skipif(not (CMAKE and COMPILER), reason="no CMake or no C++ compiler")


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A build by hand: its folder, and what it printed. Without optimisation nothing is inlined
    away, so that every symbol shows."""
    folder = tmp_path_factory.mktemp("build")
    options = ["-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0"]
    run(CMAKE, "-S", ROOT, "-B", folder, f"-DPLIANT_OUTPUT={folder}", *options)
    return folder, run(CMAKE, "--build", folder, "--parallel", "2")


@needs_compiler
def test_a_build_by_hand_is_loaded_without_a_warning_of_the_compiler(built, monkeypatch):
    folder, printed = built
    assert "warning" not in printed
    monkeypatch.setattr(loader, "_find", lambda: folder / "libpliant_cpu.so")
    found = loader.library.__wrapped__()
    assert found.reasons == []
    assert found.path == str(folder / "libpliant_cpu.so")


@needs_compiler
def test_kernels_of_an_instruction_set_share_no_symbol_with_another(built):
    """A function that two objects define is merged by the linker: AVX-512 might serve all."""
    seen = 0
    for isa in ISAS:
        for compiled in built[0].rglob(f"pliant_{isa}.dir/**/*.o"):
            lines = run(
                "nm", "--defined-only", "--extern-only", "--demangle", compiled
            ).splitlines()
            symbols = [line.split(maxsplit=2)[2] for line in lines if line.strip()]
            assert symbols, compiled
            assert all(symbol.startswith(f"pliant::{isa}::") for symbol in symbols), symbols
            seen += 1
    assert seen >= 3


@needs_compiler
def test_the_library_shows_its_entry_points_and_nothing_else(built):
    lines = run("nm", "-D", "--defined-only", built[0] / "libpliant_cpu.so").splitlines()
    names = {line.split()[-1] for line in lines}
    assert names
    assert [name for name in names if not name.startswith("pliant_")] == []


def copy_of_the_tree(to):
    to.mkdir()
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE", "src"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)
    return to


USE = """
import torch, pliant
print(pliant.__file__)
value, samples = torch.rand(1, 20, 2, 4), (torch.rand(1, 3, 2, 1, 2, 2), torch.rand(1, 3, 2, 1, 2))
automatic = pliant.multi_scale_deformable_attn(value, [(4, 5)], None, *samples)
reference = pliant.multi_scale_deformable_attn(value, [(4, 5)], None, *samples, impl="reference")
assert torch.equal(automatic, reference)
try:
    pliant.multi_scale_deformable_attn(value, [(4, 5)], None, *samples, impl="cpu")
except NotImplementedError as error:
    print("refused:", error)
"""


def test_without_a_compiler_the_install_succeeds_and_the_reference_serves(tmp_path):
    """pip builds with nothing on the path but Python; CC and CXX point nowhere."""
    tree, site, tools = copy_of_the_tree(tmp_path / "tree"), tmp_path / "site", tmp_path / "none"
    tools.mkdir()
    bare = {
        name: value for name, value in os.environ.items()
        if name not in ("PATH", "PYTHONPATH", "CMAKE_ARGS", "CMAKE_GENERATOR")
    }  # fmt: skip
    bare |= {"PATH": str(tools), "CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    run(*pip, "--target", site, tree, env=bare)
    assert (site / "pliant" / "py.typed").exists()
    assert not list(site.rglob("*.so"))
    assert re.search(r"Tag: py3-none-any", next(site.glob("pliant-*/WHEEL")).read_text())
    there = {**os.environ, "PYTHONPATH": str(site), "NO_COLOR": "1"}
    printed = run(sys.executable, "-c", USE, env=there)
    assert str(site) in printed
    assert re.search(r"refused: \w+: impl='cpu' cannot run this: the CPU kernels are not", printed)
    printed = run(sys.executable, "-m", "pliant", "info", env=there)
    assert re.search(r"cpu +does not work\n +- the CPU kernels are not built", printed)


def test_the_installed_wheel_is_for_every_python_and_has_the_library():
    try:
        installed = importlib.metadata.distribution("pliant")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("used from the source tree")
    files = [str(file) for file in installed.files]
    assert re.search(r"^Tag: py3-none-(?!any)", installed.read_text("WHEEL"), re.MULTILINE)
    assert "pliant/kernels/cpu/libpliant_cpu.so" in files
    assert "pliant/py.typed" in files
    assert not any("csrc" in file for file in files)


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch):
    if not loader.library().handle:
        pytest.skip("; ".join(loader.missing()))
    monkeypatch.setattr(loader, "ABI", loader.ABI + 1)
    assert "is from another version of pliant" in loader.library.__wrapped__().reasons[0]


def test_a_library_that_cannot_be_loaded_is_a_reason(tmp_path, monkeypatch):
    broken = tmp_path / "libpliant_cpu.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(loader, "_find", lambda: broken)
    assert "the CPU kernels cannot be loaded" in loader.library.__wrapped__().reasons[0]


def test_what_the_kernels_cannot_run_is_said_with_every_reason():
    value, loc = torch.zeros(1, dtype=torch.int8), torch.zeros(1, device="meta")
    reasons = loader.supports(value, loc, None)
    assert any("the features must be one of float32" in reason for reason in reasons)
    assert any("the positions must be on the CPU, they are on meta" in reason for reason in reasons)
