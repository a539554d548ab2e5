"""What every test runs under: fixed seeds, poisoned memory, a fair share of the cores."""

import functools
import gc
import os
from typing import Any, NamedTuple

# Before torch is imported: some virtual machines advertise AMX but die on its instructions.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# And what PyTorch asks for where products of matrices are to be deterministic on a GPU.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Tiles are those of the rules, whatever somebody has tuned on this machine.
os.environ["PLIANT_TUNED"] = "0"

import pytest
import torch
import torch._dynamo  # before memory is poisoned: it looks PyTorch's functions up, once
from hypothesis import settings
from torch.utils import _python_dispatch

from pliant import testing

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

# The same examples on every run: what fails on one machine fails on the next.
settings.register_profile("pliant", derandomize=True, deadline=None, database=None)
settings.load_profile("pliant")


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    # Triton's interpreter prepares the language again at every call of a function, which takes a
    # third of its time. Once is enough: each launch prepares what the one before has put back.
    prepare = functools.cache(interpreter._patch_lang)

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that none is left at the end for one worker alone; before them those
    that share a build, so that no other worker takes some of them over and builds again."""

    def rank(item: pytest.Item) -> tuple[bool, bool]:
        alone = {"built", "sanitized"}.isdisjoint(getattr(item, "fixturenames", ()))
        return item.get_closest_marker("slow") is None, alone

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """What is there before the first test stays: collections of garbage need not look at it."""
    gc.freeze()


class Backend(NamedTuple):
    """An implementation and a device it runs on."""

    impl: str
    device: str

    def __str__(self) -> str:
        return f"{self.impl}-{self.device}"


DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
BACKENDS = [Backend(impl, device) for device in DEVICES for impl in testing.impls(device)]


@pytest.fixture(params=BACKENDS, ids=str)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every implementation that can run here, on every device it can run on."""
    return request.param


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seeds() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was never written is NaN, or the largest integer."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name)))
    guards = torch._C._dynamo.guards
    for name in ("_empty_strided_cpu", "_empty_strided_cuda"):
        monkeypatch.setattr(guards, name, poisoned(getattr(guards, name)))


def poisoned(make: Any) -> Any:
    @functools.wraps(make)
    def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = make(*args, **kwargs)
        # A traced fill would change the program under test; fakes have no memory to fill.
        if torch.compiler.is_compiling() or type(made) is not torch.Tensor:
            return made
        if _python_dispatch._get_current_dispatch_mode() is not None:
            return made
        with torch.no_grad():
            if made.is_floating_point() or made.is_complex():
                made.fill_(torch.nan)
            else:
                made.fill_(True if made.dtype == torch.bool else torch.iinfo(made.dtype).max)
        return made

    return wrapper
