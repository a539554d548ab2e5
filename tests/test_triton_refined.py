"""Tiles that `pliant tune` may find, how it finds them, and where they are used again."""

import contextlib
import functools
import itertools
import json
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import pliant
from pliant.sampling import direct
from pliant.testing import WORKLOADS, expect, run, verify, workload
from pliant.testing.cases import aggregation, attention, columns, convolution, geometric

GPU = torch.cuda.is_available()
if not GPU and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

import triton  # noqa: E402

from pliant import cli, tune  # noqa: E402
from pliant.kernels import triton as kernels  # noqa: E402
from pliant.kernels.triton import launch, refined, tuning  # noqa: E402

DEVICE = "cuda" if GPU else "cpu"
NAME = torch.cuda.get_device_name() if GPU else "interpreter"
F16, F32 = torch.float16, torch.float32
ATTENTION, AGGREGATION, CONVOLUTION = (
    "multi_scale_deformable_attn", "deformable_aggregation", "deform_conv2d",
)  # fmt: skip
DRAW = {
    ATTENTION: attention(queries=5, heads=4, channels=16, points=4),
    AGGREGATION: aggregation(points=6),
    "geometric_kernel_attention": geometric(),
    CONVOLUTION: convolution(channels=20, out_channels=36),
    "deform_columns": columns(convolution(channels=20)),
}
gpu_only = pytest.mark.skipif(not GPU, reason="needs a GPU")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Nothing is known, and nothing planned. Gradients are computed in the thread that asks, as a
    search does: tiles that are tried concern no other."""
    monkeypatch.setattr(launch, "_remembered", {})
    monkeypatch.setattr(direct, "plans", direct.Plans())
    monkeypatch.setenv("PLIANT_TUNED", str(tmp_path / "tuned"))
    refined.stored.cache_clear()
    with torch.autograd.set_multithreading_enabled(False):
        yield tmp_path / "tuned"
    refined.stored.cache_clear()


def inputs(operator, dtype=F32):
    return DRAW[operator](dtype, DEVICE, 0)


def asked(operator, dtype=F32):
    """What the kernels of an operator ask for, forward and backward."""
    with launch.anew(), refined.listen() as heard, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "plans", direct.Plans())
        patch.setattr(launch.Launch, "__call__", lambda *_: None)
        run(operator, inputs(operator, dtype), "triton")
    return heard


@functools.cache
def exact(operator, dtype):
    return expect(operator, inputs(operator, dtype))


@contextlib.contextmanager
def launched():
    """Collect the names and constants of the kernels whose launches are worked out."""
    used, start = [], launch.Launch.__init__

    def spy(self, kernel, *args, **constants):
        used.append((kernel.__name__, constants))
        start(self, kernel, *args, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__init__", spy)
        yield used


class Watched(TorchDispatchMode):
    """Public functions go the long way, in which nothing is planned but by `launch`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


# What a tile may be


# An operator whose kernels ask for the rule, and in which way.
ASKS = {
    "query_tile": (ATTENTION, F32, ""),
    "point_tile": (AGGREGATION, F32, ""),
    "backward_tile": (ATTENTION, F32, ""),
    "enter_tile": (ATTENTION, F16, "lists"),
    "list_tile": (ATTENTION, F16, "lists"),
    "bins_tile": (AGGREGATION, F32, "deterministic"),
    "forward_tile": (CONVOLUTION, F32, ""),
    "columns_tile": ("deform_columns", F32, ""),
    "product_tile": (CONVOLUTION, F32, ""),
    "settle_tile": (CONVOLUTION, F32, ""),
    "differentiate_tile": (CONVOLUTION, F32, ""),
    "collect_tile": (CONVOLUTION, F32, ""),
}
COMPILED = ("num_warps", "num_stages", "maxnreg")  # of which the interpreter knows nothing


@pytest.fixture
def in_way(monkeypatch):
    """A function that sets what makes the backward go a way of its own."""

    def go(way):
        if way == "lists":
            monkeypatch.setattr(tuning, "by_list", lambda value, *_: value.shape[3] == 1)
        torch.use_deterministic_algorithms(way == "deterministic", warn_only=True)

    yield go
    torch.use_deterministic_algorithms(False)


def test_every_rule_that_may_be_refined_is_one():
    assert ASKS.keys() == refined.CHOICES.keys()
    assert all(callable(getattr(tuning, name)) for name in ASKS)


def drawn(one, draw):
    """A tile that may be, any of them that is not too large to compile or to interpret."""
    while True:
        tile = {name: draw.choice(values) for name, values in one.choices.items()}
        size = math.prod(n for name, n in tile.items() if name not in (*COMPILED, "BK"))
        if one.allows(tile) and size <= (2**10 * tile["num_warps"] if GPU else 2**12):
            return tile


@pytest.mark.parametrize("seed", range(12 if GPU else 3))
@pytest.mark.parametrize("rule", ASKS)
def test_what_a_tile_may_be_is_right(rule, seed, in_way):
    operator, dtype, way = ASKS[rule]
    in_way(way)
    heard = {key: one for key, one in asked(operator, dtype).items() if one.rule == rule}
    draw = random.Random(f"{rule} {seed}")
    tiles = {key: drawn(one, draw) for key, one in heard.items()}
    with refined.trying(tiles), launched() as used:
        try:
            verify(operator, inputs(operator, dtype), "triton", expected=exact(operator, dtype))
        except triton.TritonError as error:
            pytest.skip(f"too large for this GPU: {error}")
    wanted = {k: n for k, n in next(iter(tiles.values())).items() if n is not None}
    assert any(wanted.items() <= constants.items() for _, constants in used)


def test_a_thread_has_a_number_of_its_own_where_it_must():
    [one] = [x for x in asked(CONVOLUTION).values() if x.rule == "differentiate_tile"]
    assert one.allows({**one.tile, "BM": 16, "BC": 16, "num_warps": 8})
    assert not one.allows({**one.tile, "BM": 16, "BC": 8, "num_warps": 8})


@pytest.mark.parametrize("id", [id for id in WORKLOADS if "-b8" not in id])
def test_rules_give_what_a_tile_may_be(id, monkeypatch):
    """For the problems of models: a search could not leave from elsewhere."""
    monkeypatch.setattr(tuning, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch.Launch, "__call__", lambda *_: None)
    problem = workload(id, F32, DEVICE)
    for dtype in (F32, F16, torch.float64):
        given = {
            name: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x
            for name, x in problem.items()
        }
        with refined.listen() as heard:
            out = run(WORKLOADS[id].operator, given, "triton", grad=False)[0]
            run(WORKLOADS[id].operator, given, "triton", grad_output=torch.zeros_like(out))
        assert heard
        for key, one in heard.items():
            assert one.allows(one.tile), (key, one)


def test_rules_give_what_a_tile_may_be_for_other_sizes_too():
    device = torch.device("cpu")
    for channels, groups, dtype in itertools.product(
        (1, 8, 37, 64, 147, 256, 3000), (1, 3, 4, 16, 32, 128), (F16, F32, torch.float64)
    ):
        size = dtype.itemsize
        for rule, *args in (
            (tuning.query_tile, channels, 9, groups, 5, dtype),
            (tuning.query_tile, channels, 20_000, groups, 4, dtype),
            (tuning.point_tile, channels, groups),
            (tuning.bins_tile, channels, groups, 3),
            (tuning.forward_tile, channels, groups, "tf32x3" if dtype == F32 else "ieee", dtype),
            (tuning.columns_tile, channels, groups, size),
            (tuning.product_tile, channels, groups),
            (tuning.settle_tile, channels, groups),
            (tuning.differentiate_tile, channels, size),
            (tuning.collect_tile, channels, size, 100 * groups),
        ):
            with refined.listen() as heard:
                refined.refined(device, rule, *args)
            [one] = heard.values()
            assert one.allows(one.tile), (rule, args, one)


# From the file to a launch


def other(one, name="num_warps"):
    values = one.choices[name]
    return {**one.tile, name: values[values.index(one.tile[name]) - 1]}


def constants(operator=ATTENTION):
    """Those of each kernel that a fresh process launches."""
    refined.stored.cache_clear()
    with launch.anew(), launched() as used, pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "plans", direct.Plans())
        run(operator, inputs(operator), "triton", grad=False)
    return dict(used)


def test_a_kept_tile_is_used_where_the_problem_is_the_same(folder):
    [(key, one)] = [x for x in asked(ATTENTION).items() if x[1].rule == "query_tile"]
    assert constants()["by_query"]["num_warps"] == one.tile["num_warps"] == 4
    file = refined.keep(NAME, {key: other(one)})
    assert file.parent == folder
    assert constants()["by_query"]["num_warps"] == 2
    verify(ATTENTION, inputs(ATTENTION), "triton")
    assert constants("geometric_kernel_attention")["by_query"]["num_warps"] == 4
    refined.keep(NAME, {key: None})
    assert constants()["by_query"]["num_warps"] == 4


def test_the_short_way_and_the_long_way_ask_for_the_same():
    """A program that is tuned is observed; one that runs is not."""
    for operator in DRAW:
        short = asked(operator)
        with Watched():
            assert short.keys() == asked(operator).keys() != set()


def test_large_numbers_count_in_powers_of_two():
    def key(queries, channels=64):
        with refined.listen() as heard:
            rule = (tuning.query_tile, channels, queries, 8, 4, F32)
            refined.refined(torch.device("cpu"), *rule, rows=queries, policy=("unit", "zero"))
        return next(iter(heard))

    assert key(17821) == key(16385) == key(32768) != key(32769)
    assert key(300) != key(301)
    assert key(5, 63) != key(5, 64)
    assert key(2000) == "query_tile(64, 2^11, 8, 4, float32) rows=2^11 policy=unit-zero"


@pytest.mark.parametrize(
    "tile",
    [{"num_warps": 3}, {"num_warps": "4"}, {"BQ": 0}, {"BQ": 3}, {"BG": 8}, {"BP": 3}, {"BX": 1},
     {"BQ": None}, {"BQ": 4.0}, {"BQ": True}],
    ids=str,
)  # fmt: skip
def test_a_tile_that_may_not_be_is_not_taken(tile):
    """BG must divide the heads, of which there are 4, and BP the points: 4."""
    [(key, one)] = [x for x in asked(ATTENTION).items() if x[1].rule == "query_tile"]
    refined.keep(NAME, {key: {**one.tile, **tile}})
    used = constants()["by_query"]
    assert {name: used.get(name) for name in one.tile} == one.tile


def test_tiles_of_other_versions_are_not_used(folder, monkeypatch):
    [(key, one)] = [x for x in asked(ATTENTION).items() if x[1].rule == "query_tile"]
    file = refined.keep(NAME, {key: other(one)})
    assert refined.about(NAME) == f"; 1 tiles of {file}"
    monkeypatch.setattr(refined, "versions", lambda: {"triton": "4.0", "kernels": "0"})
    assert constants()["by_query"]["num_warps"] == 4
    assert refined.about(NAME) == f"; {file} has none for these versions"
    refined.keep(NAME, {"another": one.tile})
    assert json.loads(file.read_text())["tiles"].keys() == {"another"}


def test_others_may_read_what_is_kept(folder, monkeypatch):
    before = os.umask(0o022)
    try:
        file = refined.keep(NAME, {"a": {"B": 64}})
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(refined, "versions", lambda: {"triton": "4.0", "kernels": "0"})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refined.stored.cache_clear()
    assert refined.about(NAME) == f"; {file} cannot be read"


def test_what_is_kept_is_added_to_what_was(folder):
    tile = {"B": 64, "num_warps": 1}
    refined.keep(NAME, {"a": tile, "b": tile})
    refined.keep(NAME, {"b": None, "c": tile})
    assert refined.stored(NAME) == {"a": tile, "c": tile}
    assert {x.suffix for x in folder.iterdir()} == {".json", ".lock"}  # and no part of a file


def test_what_several_keep_at_once_is_all_kept():
    def keep(who):
        for i in range(10):
            refined.keep(NAME, {f"{who}-{i}": {"B": 64}})

    threads = [threading.Thread(target=keep, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refined.stored(NAME)) == 40


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"tiles": 3}', '{"versions": 1, "tiles": {}}', "\xff", "[" * 100_000],
    ids=range(7),
)
def test_a_file_that_is_none_is_said_and_not_used(content, folder):
    file = refined.path(NAME)
    folder.mkdir()
    file.write_bytes(content.encode("latin-1"))
    if content.startswith('{"versions"'):  # of another version, perhaps
        assert constants()["by_query"]["num_warps"] == 4
        return
    with pytest.warns(UserWarning, match=f"pliant: the tiles in {file} are not used"):
        assert constants()["by_query"]["num_warps"] == 4


@pytest.mark.parametrize("name", ["x" * 300, "a-file/below"])
def test_a_folder_that_cannot_be_read_is_passed_over(name, tmp_path, monkeypatch):
    """As that of another user: programs that never tuned anything must not care."""
    (tmp_path / "a-file").write_text("")
    monkeypatch.setenv("PLIANT_TUNED", str(tmp_path / name))
    assert constants()["by_query"]["num_warps"] == 4
    assert refined.about(NAME) == ""
    with pytest.raises(OSError, match=r"File name too long|Not a directory"):
        refined.keep(NAME, {})


def test_tiles_that_are_none_are_said(folder):
    folder.mkdir()
    content = {"versions": refined.versions(), "tiles": {"a": 3}}
    refined.path(NAME).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="cannot be read: TypeError"):
        assert refined.stored(NAME) == {}


def test_none_are_wanted(monkeypatch):
    refined.keep(NAME, {"a": {"B": 64}})
    monkeypatch.setenv("PLIANT_TUNED", "0")
    refined.stored.cache_clear()
    assert refined.stored(NAME) == {}
    with pytest.raises(RuntimeError, match="PLIANT_TUNED=0"):
        refined.keep(NAME, {"a": None})


def test_where_files_lie(monkeypatch):
    monkeypatch.delenv("PLIANT_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert refined.path("NVIDIA H200") == Path("/cache/pliant/tuned/NVIDIA-H200.json")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert refined.path("A (B) C") == Path("/home/me/.cache/pliant/tuned/A-B-C.json")
    monkeypatch.setenv("PLIANT_TUNED", "~/tiles")
    assert refined.path("A") == Path("/home/me/tiles/A.json")


# The search, by a clock of our own: what a call takes is what its tiles say


def by_tiles(cost):
    """`prepare` and `times` of a search in which a call takes what `cost` says of its tiles."""

    def prepare(call):
        return dict(refined._here.tried)

    def times(*ready):
        return [float(sum(map(cost, tiles.values()))) for tiles in ready]

    return {"prepare": prepare, "times": times}


def forward_call(operator=ATTENTION):
    given = inputs(operator)
    return lambda: run(operator, given, "triton", grad=False)[0]


@pytest.fixture
def observed():
    with Watched():
        yield


@pytest.mark.usefixtures("observed")
def test_a_search_finds_what_takes_the_least():
    found = tune.search(
        forward_call(), **by_tiles(lambda tile: 100 + abs(tile["BQ"] - 16) + 3 * tile["num_warps"])
    )
    [tile] = found.tiles.values()
    assert (tile["BQ"], tile["num_warps"], tile["BG"], tile["BP"]) == (16, 1, 4, 4)
    assert (found.before, found.after) == (100 + 8 + 12, 103)
    assert found.better
    assert not found.wrong
    words = tune.describe(found.asked, {k: one.tile for k, one in found.asked.items()}, found.tiles)
    assert words == "query_tile: BQ 8 -> 16, num_warps 4 -> 1"


@pytest.mark.usefixtures("observed")
def test_every_tile_is_launched_while_it_is_measured():
    """What was worked out for another tile is not used, in the search and after it."""
    call, seen = forward_call(), []
    call()

    def prepare(again):
        [tile] = refined._here.tried.values()
        with launched() as used:
            again()
        assert used == []  # it was worked out before
        seen.append(tile["num_warps"])
        return dict(refined._here.tried)

    clock = by_tiles(lambda tile: 100 + tile["num_warps"])
    with launched() as used:
        tune.search(call, **{**clock, "prepare": prepare})
    warps = [constants["num_warps"] for name, constants in used if name == "by_query"]
    assert warps == [4, *seen]  # that of the rule, which was asked first
    with launched() as used:
        call()
    assert used == []  # that of before the search


@pytest.mark.parametrize("way", [contextlib.nullcontext, Watched], ids=["short", "long"])
def test_a_search_concerns_no_other_thread(way, monkeypatch):
    """Another thread, which works out the same launch meanwhile, gets the tile of the rule."""
    [(key, one)] = [x for x in asked(ATTENTION).items() if x[1].rule == "query_tile"]
    call, started = forward_call(), []
    monkeypatch.setattr(launch.Launch, "__call__", lambda self, *_: started.append(self))

    def warps():
        direct.plans.kept.clear()
        with way():
            call()
        return started[-1].constants["num_warps"]

    def elsewhere():
        found = []
        thread = threading.Thread(target=lambda: found.append(warps()))
        thread.start()
        thread.join()
        return found.pop()

    with launch.anew(), refined.listen() as heard, refined.trying({key: other(one)}):
        assert elsewhere() == 4
        assert heard == {}
        assert warps() == 2
        assert elsewhere() == 4
    assert warps() == 4


@pytest.mark.usefixtures("observed")
def test_results_are_written_to_memory_that_is_spoilt(monkeypatch):
    events, given = [], forward_call()
    monkeypatch.setattr(tune, "_spoil", lambda likes: events.append(len(likes)))

    def call():
        events.append("call")
        return given()

    tune.search(call, **by_tiles(lambda tile: 100))
    assert events[:5] == ["call", 0, "call", 1, "call"]


@pytest.mark.usefixtures("observed")
def test_two_numbers_that_only_pay_together_are_found():
    def cost(tile):
        return 100 - 50 * (tile["BQ"] == 16 and tile["num_warps"] == 8)

    [tile] = tune.search(forward_call(), **by_tiles(cost)).tiles.values()
    assert (tile["BQ"], tile["num_warps"]) == (16, 8)


@pytest.mark.usefixtures("observed")
def test_what_is_hardly_faster_is_left():
    found = tune.search(forward_call(), **by_tiles(lambda tile: 100 + 0.1 * tile["num_warps"]))
    assert found.before == found.after
    assert not found.better
    assert found.tiles == {key: one.tile for key, one in found.asked.items()}


@pytest.mark.usefixtures("observed")
def test_a_tile_with_other_results_is_not_taken_and_said():
    given = forward_call()

    def call():
        out = given()
        wrong = any(tile["num_warps"] < 4 for tile in refined._here.tried.values())
        return out * (1.01 if wrong else 1)

    found = tune.search(call, **by_tiles(lambda tile: 100 + tile["num_warps"]))
    assert next(iter(found.tiles.values()))["num_warps"] == 4
    assert "query_tile: num_warps 4 -> 2" in found.wrong


@pytest.mark.usefixtures("observed")
def test_without_the_tile_of_the_rule_there_is_nothing_to_compare_with():
    given = forward_call()

    def call():
        if refined._here.tried:
            raise triton.OutOfResources(1, 2, "registers")
        return given()

    assert tune.search(call, **by_tiles(lambda tile: 100)) is None


@pytest.mark.usefixtures("observed")
def test_registers_are_all_tried():
    monotone = [64, 72, 80, 96, 128, 168, 224, None]
    found = tune.search(
        forward_call(), **by_tiles(lambda tile: 100 - 50 * (tile["maxnreg"] == monotone[5]))
    )
    assert [tile["maxnreg"] for tile in found.tiles.values()] == [168]


def test_the_compiler_prints_nothing_into_what_a_script_prints(capsys):
    say = "print('PTX')"
    with tune._silent_compiler():
        exec(say, vars(tune.compiler))
    assert capsys.readouterr().out == ""
    exec(say, vars(tune.compiler))
    assert capsys.readouterr().out == "PTX\n"


def test_memory_that_results_will_get_is_spoilt(monkeypatch):
    """A tile that leaves some of them unwritten would find those of the one before."""
    filled = []
    monkeypatch.setattr(torch, "full_like", lambda x, n: filled.append((x.shape, n)))
    tune._spoil([torch.zeros(2, 3), torch.zeros(4)])
    assert [shape for shape, _ in filled] == [(2, 3), (4,)]
    assert all(math.isnan(n) for _, n in filled)


@pytest.mark.usefixtures("observed")
@pytest.mark.parametrize("kind", ["resources", "compiler", "device"])
def test_a_tile_that_cannot_run_is_passed_over(kind):
    given = forward_call()
    errors = {
        "resources": triton.OutOfResources(1, 2, "shared memory"),
        "compiler": RuntimeError("PassManager::run failed"),
        "device": RuntimeError("CUDA error: an illegal memory access was encountered"),
    }

    def call():
        if any(tile["num_warps"] == 2 for tile in refined._here.tried.values()):
            raise errors[kind]
        return given()

    clock = by_tiles(lambda tile: 100 + tile["num_warps"])
    if kind == "device":
        with pytest.raises(RuntimeError, match="illegal memory access"):
            tune.search(call, **clock)
    else:
        found = tune.search(call, **clock)
        assert next(iter(found.tiles.values()))["num_warps"] == 4
    assert not refined._here.tried


@pytest.mark.usefixtures("observed")
def test_nothing_is_searched_where_no_tile_is_asked_for():
    given = inputs(ATTENTION)
    assert tune.search(lambda: run(ATTENTION, given, "reference", grad=False)[0]) is None


# A program


class OnCPU:
    """Enough of torch.cuda for what is measured by a clock of our own."""

    Stream = current_stream = lambda *_: OnCPU()
    device = stream = lambda *_: contextlib.nullcontext()

    def wait_stream(self, other):
        pass


@pytest.fixture
def tuner(monkeypatch):
    """One whose problems are on any device, and tiles differ in their warps alone."""
    only = dict.fromkeys(("query_tile", "backward_tile"), lambda *_: refined.WARPS)
    monkeypatch.setattr(refined, "CHOICES", only)
    monkeypatch.setattr(tune, "_tunable", lambda args: True)
    for name in ("Stream", "current_stream", "device", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(OnCPU, name))
    tune._side_stream.cache_clear()
    clock = by_tiles(lambda tile: 100 + 10 * tile["num_warps"])
    return tune.Tuner(functools.partial(tune.search, **clock))


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_a_program_is_tuned_forward_and_backward(tuner, capsys, folder):
    given = inputs(ATTENTION)
    for _ in range(2):
        with tuner:
            verify(ATTENTION, given, "triton")
    names = sorted(problem[0]._schema.name for problem in tuner.seen if problem[-1] != "reference")
    assert "pliant::sample_sum" in names
    assert "pliant::sample_sum_backward" in names
    assert tuner.refined == 1
    assert tuner.wrong == 0
    said = capsys.readouterr().err
    assert said.count("pliant tune: sample_sum ") == 1
    assert "pliant tune:   query_tile: num_warps 4 -> 1" in said
    kept = json.loads(refined.path(NAME).read_text())["tiles"]
    warps = {key.split("(")[0]: tile["num_warps"] for key, tile in kept.items()}
    assert warps == {"query_tile": 1}  # that of the backward had one warp before
    assert constants()["by_query"]["num_warps"] == 1  # in a process that only runs it
    verify(ATTENTION, given, "triton")


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_what_is_no_longer_better_is_dropped(tuner):
    [(key, one)] = [x for x in asked(ATTENTION).items() if x[1].rule == "query_tile"]
    refined.keep(NAME, {key: {**one.tile, "num_warps": 8}})
    tuner.search = functools.partial(tune.search, **by_tiles(lambda tile: 100))
    with tuner:
        run(ATTENTION, inputs(ATTENTION), "triton", grad=False)
    assert refined.stored(NAME) == {}


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_problems_that_share_a_tile_are_searched_once(tuner, capsys):
    """As images of nearly the same size do; what the first one found stays."""
    for queries, cost in ((1500, 10), (1600, 0), (1500, 0)):
        warps = by_tiles(lambda tile, cost=cost: 100 + cost * tile["num_warps"])
        tuner.search = functools.partial(tune.search, **warps)
        given = attention(queries=queries, heads=1, channels=1, points=1)(F32, DEVICE, 0)
        with tuner:
            run(ATTENTION, given, "triton", grad=False)
    assert capsys.readouterr().err.count("us by rule") == 1
    [tile] = refined.stored(NAME).values()
    assert tile["num_warps"] == 1


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_what_pytorch_is_told_makes_another_problem(tuner):
    """The deterministic mode and the precision of products have kernels or tiles of their own."""
    given, tuner.search = inputs(CONVOLUTION), lambda *_: None
    try:
        for told in range(3):
            torch.use_deterministic_algorithms(told == 1, warn_only=True)
            torch.backends.cuda.matmul.allow_tf32 = told == 2
            for _ in range(2):
                with tuner:
                    run(CONVOLUTION, given, "triton", grad=False)
            assert len(tuner.seen) == told + 1
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["pytorch", "triton", "cublas"],
)
def test_a_search_that_runs_out_of_memory_is_given_up(error, tuner, capsys):
    def search(*_):
        raise error

    tuner.search, given = search, inputs(ATTENTION)
    with tuner:
        out = run(ATTENTION, given, "triton", grad=False)[0]
    assert "passed over" in capsys.readouterr().err
    torch.testing.assert_close(out, run(ATTENTION, given, "triton", grad=False)[0])


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_what_cannot_be_kept_is_said(tuner, capsys, monkeypatch):
    def keep(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(refined, "keep", keep)
    with tuner:
        run(ATTENTION, inputs(ATTENTION), "triton", grad=False)
    assert "pliant tune:   not kept: No space left on device" in capsys.readouterr().err


@pytest.mark.skipif(GPU, reason="the GPU is there itself")
def test_compiled_programs_are_compiled_and_seen(tuner):
    given = inputs(ATTENTION)
    compiled = torch.compile(
        lambda **given: pliant.multi_scale_deformable_attn(**given, impl="triton"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    with tuner:
        out = compiled(**given)
    assert len(tuner.seen) == 1
    torch.testing.assert_close(out, run(ATTENTION, given, "triton", grad=False)[0])


def test_a_program_goes_on_as_it_would_by_itself():
    """With branches of PyTorch's own, and traced for sizes that are left open."""
    x = torch.arange(3.0)

    def attend(value, loc, weight):
        return pliant.multi_scale_deformable_attn(value, [(3, 4)], None, loc, weight, impl="triton")

    operands = torch.rand(1, 12, 2, 4), torch.rand(1, 5, 2, 1, 3, 2), torch.rand(1, 5, 2, 1, 3)
    operands = [operand.to(DEVICE) for operand in operands]
    with tune.Tuner():
        both = torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
        traced = make_fx(attend, tracing_mode="symbolic")(*operands)
    torch.testing.assert_close(both, x + 1)
    assert "pliant" in traced.code


EXITS = "import sys; sys.exit({status})"


@pytest.mark.parametrize(("status", "wrong", "ends"), [(0, 1, 1), (0, 0, 0), (3, 1, 3)])
def test_a_script_that_exits_does_not_hide_wrong_results(
    status, wrong, ends, tmp_path, monkeypatch, capsys
):
    script = tmp_path / "train.py"
    script.write_text(EXITS.format(status=status))
    made = tune.Tuner()
    made.wrong = wrong
    monkeypatch.setattr(tune, "Tuner", lambda: made)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: NAME)
    try:
        got = tune.run(script, [], [], [])
    except SystemExit as end:
        got = end.code
    assert got == ends
    assert capsys.readouterr().err.startswith("pliant tune: 0 of 0 problems refined")


def test_only_memory_of_a_gpu_is_tuned():
    assert not tune._tunable([torch.zeros(1), 3])
    if GPU:
        assert tune._tunable([torch.zeros(1, device="cuda"), 3])


# The command


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        ([], "either a script or --case is needed"),
        (["--case", "dance"], "--case must be one of detr-enc-b1, "),
        (["no-such-file.py"], "no-such-file.py is not a file"),
        (["--dtype", "float16"], "either a script or --case is needed"),
        (["--dtype", "float16", __file__], "--dtype goes with --case"),
        (["--case", "msda-doc", __file__], "either a script or --case is needed"),
    ],
)
def test_what_cannot_be_tuned_is_refused(argv, why, capsys):
    assert cli.main(["tune", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"pliant tune: {why}")


def test_nothing_is_measured_in_the_interpreter(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", True)
    assert cli.main(["tune", "--case", "msda-doc"]) == 2
    assert capsys.readouterr().err.startswith("pliant tune: TRITON_INTERPRET=1 is set: ")


def test_nothing_is_measured_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(kernels, "missing", lambda: ["no device"])
    assert cli.main(["tune", "--case", "msda-doc"]) == 2
    assert "the GPU kernels do not work here" in capsys.readouterr().err


def test_nothing_is_measured_for_nobody(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRET", False)
    monkeypatch.setattr(kernels, "missing", list)
    monkeypatch.setenv("PLIANT_TUNED", "0")
    assert cli.main(["tune", "--case", "msda-doc"]) == 2
    assert "PLIANT_TUNED=0" in capsys.readouterr().err


SCRIPT = """
import sys
import torch, pliant

assert __name__ == "__main__" and sys.argv[1:] == ["--epochs", "1", "--", "x"], sys.argv
value = torch.randn(2, 20, 2, 16, device="cuda", requires_grad=True)
loc = torch.rand(2, 70, 2, 1, 4, 2, device="cuda", requires_grad=True)
weight = torch.rand(2, 70, 2, 1, 4, device="cuda", requires_grad=True)
for _ in range(2):
    pliant.multi_scale_deformable_attn(value, [(4, 5)], None, loc, weight).sum().backward()
print("done")
"""


@gpu_only
@pytest.mark.slow
def test_a_script_is_tuned(tmp_path, folder):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "pliant", "tune", str(script), "--epochs", "1", "--", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    lines = done.stderr.splitlines()
    assert [line for line in lines if " sample_sum [2, 20, 2, 1, 16] torch.float32: " in line]
    assert [line for line in lines if " sample_sum_backward [2, 70, 2, 1, 16] " in line]
    assert f" of 2 problems refined, kept in {refined.path(NAME)}" in lines[-1]
    assert refined.path(NAME).is_file()
    command = [sys.executable, str(script), "--epochs", "1", "--", "x"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "done\n"
