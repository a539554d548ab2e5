"""The guards of the benchmarks, each seen red."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pliant import testing
from pliant.sampling import reference

FOLDER = Path(__file__).parents[1] / "benchmarks"
ATTENTION = "multi_scale_deformable_attn"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The CPU benchmark, with one small named case to pass."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("common", "bench_cpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    cases = [case for case in testing.CASES if case.operator == ATTENTION]
    monkeypatch.setattr(testing, "CASES", cases[:1])
    return importlib.import_module("bench_cpu")


def spoil(monkeypatch: pytest.MonkeyPatch, only: torch.dtype) -> None:
    kernel = reference.sample_sum

    def spoilt(value: torch.Tensor, *rest: Any) -> torch.Tensor:
        return kernel(value, *rest) * (1.001 if value.dtype == only else 1)

    monkeypatch.setattr(reference, "sample_sum", spoilt)


def call(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *argv: str) -> int:
    quick = ["--impl", "reference", "--threads", "1", "--rounds", "1", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", ["bench_cpu.py", *quick, "--case", "msda-doc", *argv])
    threads = torch.get_num_threads()
    try:
        return int(bench.main())
    finally:
        torch.set_num_threads(threads)


def test_it_measures(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "new" / "bench.json"
    assert call(bench, monkeypatch, "--json", str(kept)) == 0
    assert "msda-doc" in capsys.readouterr().out
    assert '"extra_memory"' in kept.read_text()


def test_a_failing_operator_is_not_timed(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, torch.float32)
    monkeypatch.setattr(bench.timing, "in_turns", lambda *_, **__: pytest.fail("timed"))
    assert call(bench, monkeypatch) == 1
    assert f"not timed {ATTENTION}: its named cases fail" in capsys.readouterr().out


def test_a_missed_target_is_named(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {
        "case": "rtdetr-dec-b1",
        "threads": 1,
        "faster": {"forward": 11.5, "backward": 8.5},
        "seconds": {"forward": 1.0, "backward": 1.0},
        "extra_memory": {"forward": 0, "backward": 2**27},
        "allowed_memory": 2**26,
    }
    met, missed = bench._verdicts([row], {"without gradients": 16e-6})
    assert missed == [
        "rtdetr-dec-b1 backward: 8.5x, target 9x",
        "rtdetr-dec-b1 backward: 128 MiB, 64 MiB allowed",
        "a tiny call: 16 us, 15 us allowed",
    ]
    assert met == [
        "rtdetr-dec-b1 forward: 11.5x, target 11x",
        "rtdetr-dec-b1 forward: 0 MiB, 64 MiB allowed",
    ]


def test_scratch_memory_is_seen(bench: ModuleType) -> None:
    def step() -> list[torch.Tensor]:
        result = torch.zeros(2**24)
        torch.zeros(2**28)  # 1 GiB that is freed again
        return [result]

    # Pages of libraries count too, and a machine short of memory drops them meanwhile.
    seen = [bench._peak(step) / 2**30 for _ in range(3)]
    assert any(0.9 < x < 1.1 for x in seen), seen
