"""What `make sanitize` gives compute-sanitizer: it runs, and has the tiles of models."""

import os
from unittest import mock

import pytest
import torch

from pliant.testing import run, verify
from pliant.testing.cases import OPERATORS

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import sanitize  # noqa: E402

from pliant.kernels.triton import bins, launch, lists, refined, tuning  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hostile", "ordinary", "written"][: 1 + 2 * GPU])
def test_what_the_sanitizers_are_given_runs(kind, monkeypatch):
    """Of each operator the plain case, in every way."""
    plain = [case for case in sanitize.CHOSEN if case.id == "plain"]
    monkeypatch.setattr(sanitize, "CHOSEN", plain)
    half = (torch.float16,)
    one = {way: (operators, half, half) for way, (operators, *_) in sanitize.WAYS.items()}
    monkeypatch.setattr(sanitize, "WAYS", one)
    with (
        mock.patch.object(bins, "grad_value", wraps=bins.grad_value) as collected,
        mock.patch.object(lists, "grad_value", wraps=lists.grad_value) as listed,
    ):
        done = [d for operator in OPERATORS for d in sanitize.work(kind, operator, DEVICE)]
    assert {d.split()[-1] for d in done} == set(sanitize.WAYS)
    assert collected.called
    assert listed.called
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_in_memory_that_was_written_are_the_same():
    case = next(c for c in sanitize.CHOSEN if c.operator == sanitize.CONVOLUTION)
    results = []
    for written in (False, True):
        with sanitize.mode("chunks", written):
            results.append(run(case.operator, case.make(torch.float32, DEVICE, 0), "triton"))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("channels", [16, 64, 70, 256])
@pytest.mark.parametrize("element", [2, 4, 8])
def test_refined_tiles_are_such_as_may_be_found(channels, element):
    """With warps that have work of their own, above all."""
    rules = {"differentiate_tile": (channels, element), "enter_tile": (), "list_tile": (channels,)}
    for name, args in rules.items():
        choices, tile = refined.CHOICES[name](*args), sanitize._other(name)(*args)
        assert tile != getattr(tuning, name)(*args)
        assert refined.Asked(name, {}, choices).allows({key: tile.get(key) for key in choices})


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [sanitize.F16, sanitize.BF16, sanitize.F32], ids=str)
@pytest.mark.parametrize("case", sanitize.MODELS, ids=str)
def test_all_of_a_product_is_written(case, dtype):
    """Which initcheck does not see: here memory is poisoned."""
    verify(case.operator, case.make(dtype, DEVICE, 0), "triton")


def test_the_sanitizers_are_given_the_tiles_of_models(monkeypatch):
    """Whatever the rules say of them, nothing is launched."""
    said = {}

    def listen(name):
        rule = getattr(tuning, name)

        def spy(*args):
            result = rule(*args)
            parts = result.items() if isinstance(result, dict) else [(name, result)]
            for key, x in parts:
                said.setdefault((name, key), set()).add(x)
            return result

        monkeypatch.setattr(tuning, name, spy)

    monkeypatch.setattr(tuning, "multiprocessors", lambda _: 132)
    for name in ("shared", "forward_tile", "forward_splits", "backward_tile", "point_splits"):
        listen(name)
    monkeypatch.setattr(launch.Launch, "__call__", lambda *_: None)
    monkeypatch.setattr(sanitize, "CHOSEN", sanitize.MODELS)
    ways = {"plain", "lists", "deterministic", "parts", "many", "far", "chunks", "tf32"}
    for operator in (sanitize.ATTENTION, sanitize.AGGREGATION, sanitize.CONVOLUTION):
        ways -= {done.split()[-1] for done in sanitize.work("ordinary", operator, DEVICE)}
    assert not ways
    assert {4, 8} <= said["shared", "shared"]
    assert {1, 4} <= said["backward_tile", "BQ"]
    assert {32, 128, 256} <= said["forward_tile", "BN"]
    assert {4, 8} <= said["forward_tile", "num_warps"]
    assert {1, 2, 3} <= said["forward_tile", "num_stages"]
    assert max(said["forward_splits", "forward_splits"]) > 1
    assert max(said["point_splits", "point_splits"]) > 1
