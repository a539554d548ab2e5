"""The README's examples run as they are, one after another."""

import re
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
