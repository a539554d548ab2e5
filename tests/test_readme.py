"""The README's examples run as they are, one after another; so do commands that CI does not use."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"


def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
        shape = re.search(r"# (\[\d.*\])$", block, re.MULTILINE)
        if shape and "out" in block:
            assert str(list(names["out"].shape)) == shape.group(1)


def test_make_runs_the_tests_from_the_source_tree() -> None:
    """How many workers there are goes through a shell, and shells differ."""
    arguments = f"ARGS=-q --collect-only {Path(__file__).relative_to(README.parent)}"
    command = ["make", "-C", str(README.parent), "test-gpu", f"PYTHON={sys.executable}", arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 tests collected" in done.stdout
