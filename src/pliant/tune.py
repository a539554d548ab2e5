"""`pliant tune`: better tiles for the GPU kernels, measured on the problems that a program has.

A `Tuner` sees every call of our registered operators, forward and backward, with its tensors. A
problem that it has not seen before is refined on the spot: each kernel's tile, as the rule gives
it, is changed in one number or two, and the change is kept where the operator's results stay the
same and it takes the GPU less time. What is found is kept for later processes (see
kernels/triton/refined.py); results differ in their last bits at most, as sums have another order.
"""

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import compiler

import pliant
from pliant import testing
from pliant.compat.scripts import script
from pliant.kernels.triton import launch, refined
from pliant.kernels.triton.convolution import precision
from pliant.kernels.triton.refined import Asked, Tile
from pliant.testing.timing import Replay, replayed

WORTH = 0.02  # of the time: less is not told from noise
Tiles = dict[str, Tile]


# The search


class Found(NamedTuple):
    """Tiles by what asked for them, and what the operator takes by rule and with them."""

    asked: dict[str, Asked]
    tiles: Tiles
    before: float  # microseconds
    after: float
    wrong: list[str]  # tiles whose results differ: a defect of a kernel

    @property
    def better(self) -> bool:
        return self.after < (1 - WORTH) * self.before


def search(
    call: Callable[[], Any],
    settled: Collection[str] = (),
    prepare: Callable[[Callable[[], Any]], Any] = Replay,
    times: Callable[..., list[float]] = replayed,
) -> Found | None:
    """The best tiles for `call`, an operator; None if it asks for none but those that are settled.

    `times` says what each of the calls takes that `prepare` has made ready.
    """
    with launch.anew(), refined.listen() as heard:
        call()
    new = heard.keys() - settled
    asked = {key: one for key, one in heard.items() if key in new and one.allows(one.tile)}
    if not asked:
        return None
    own = {key: one.tile for key, one in asked.items()}
    wrong: list[str] = []
    expected: list[Tensor] = []

    def ready(tiles: Tiles) -> Any:
        """None if it cannot run so."""
        with launch.anew(), refined.trying(tiles):
            _spoil(expected)
            try:
                with _silent_compiler():
                    got = _tensors(call())
                    if not expected:
                        expected.extend(got)
                    elif not _same(got, expected):
                        wrong.append(describe(asked, own, tiles))
                        return None
                    return prepare(call)
            except triton.TritonError:
                return None
            except RuntimeError as error:
                if "PassManager::run failed" not in str(error):  # how its compiler gives up
                    raise
                return None

    first = fastest = ready(own)
    if first is None:  # only what was kept before can run
        return None
    best = dict(own)
    for key, one in asked.items():
        tried, candidates = [own[key]], _neighbours(one, own[key])
        while (tile := next((t for t in candidates if t not in tried), None)) is not None:
            tried.append(tile)
            if not one.allows(tile):
                continue
            candidate = ready({**best, key: tile})
            if candidate is None:
                continue
            now, then = times(candidate, fastest)
            if now < (1 - WORTH / 2) * then:
                best[key], fastest = tile, candidate
                candidates = _neighbours(one, tile)
    before, after = times(first, fastest) if fastest is not first else (times(first)[0],) * 2
    return Found(asked, best, before, after, wrong)


@contextlib.contextmanager
def _silent_compiler() -> Iterator[None]:
    """Triton prints all of a program that needs too many registers, into what the script prints."""
    compiler.print = lambda *_: None
    try:
        yield
    finally:
        del compiler.print


def _neighbours(asked: Asked, tile: Tile) -> Iterator[Tile]:
    """`tile` with one number changed by a step; or the warps, and with them another one."""
    for name in asked.choices:
        for n in _steps(asked, tile, name):
            yield {**tile, name: n}
    for name in asked.choices:
        if name not in ("num_warps", "num_stages", "maxnreg"):
            both = _steps(asked, tile, "num_warps"), _steps(asked, tile, name)
            for warps, n in product(*both):
                yield {**tile, "num_warps": warps, name: n}


def _steps(asked: Asked, tile: Tile, name: str) -> list[int | None]:
    """The values before and after; of registers all, since few of them differ from the next."""
    values = asked.choices[name]
    if tile[name] not in values:
        return []
    at = values.index(tile[name])
    if name == "maxnreg":
        return [*values[:at], *values[at + 1 :]]
    return [*values[max(at - 1, 0) : at], *values[at + 1 : at + 2]]


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def _spoil(likes: Sequence[Tensor]) -> None:
    """Fill the memory that results of these forms will get: what a tile leaves out is to show."""
    _ = [torch.full_like(x, torch.nan) for x in likes]


def _same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether both can be the same result: each has an error budget of its own."""
    both = zip(got, expected, strict=True)
    return all(testing.worst(x.detach(), y.detach().double()).share <= 2 for x, y in both)


def describe(asked: dict[str, Asked], before: Tiles, after: Tiles) -> str:
    """What differs, in words."""
    changes = []
    for key, one in asked.items():
        moved = [n for n in one.choices if before[key][n] != after[key][n]]
        if moved:
            words = (f"{n} {before[key][n]} -> {after[key][n]}" for n in moved)
            changes.append(f"{one.rule}: {', '.join(words)}")
    return "; ".join(changes)


# What a program does


class Tuner(TorchDispatchMode):
    """Refines the problems that it sees, each once; and of those that share a tile, the first."""

    supports_higher_order_operators = True  # they go on as they would

    def __init__(self, search: Callable[..., Found | None] = search) -> None:
        super().__init__()
        self.search = search
        self.seen: set[Any] = set()
        self.settled: set[str] = set()
        self.refined = self.wrong = 0
        self.one_at_a_time = threading.Lock()  # autograd has a thread for each device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled programs are compiled all the same, and call our operators."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        call = functools.partial(func, *args, **(kwargs or {}))
        if func.namespace == "pliant" and _tunable(args):
            # What kernels depend on, besides their arguments.
            told = torch.are_deterministic_algorithms_enabled(), precision(torch.float32)
            problem = (func, *told, *map(_signature, args))
            if problem not in self.seen:
                self.seen.add(problem)
                with self.one_at_a_time:
                    self._refine(func, args, call)
        return call()

    def _refine(self, func: Any, args: Sequence[Any], call: Callable[[], Any]) -> None:
        value = next(x for x in args if isinstance(x, Tensor))
        what = f"{func._schema.name.removeprefix('pliant::')} {list(value.shape)} {value.dtype}"
        try:
            found = self._searched(value, call)
        except RuntimeError as error:  # PyTorch, Triton and cuBLAS have words of their own for it
            if not re.search("out of memory|ALLOC_FAILED", str(error)):
                raise
            tell(f"{what}: passed over, since the search itself would need more memory")
            return
        if found is None:
            return
        tell(f"{what}: {found.before:.1f} us by rule, {found.after:.1f} us at best")
        self.settled |= found.asked.keys()
        own = {key: one.tile for key, one in found.asked.items()}
        kept: dict[str, Tile | None] = dict.fromkeys(own)
        if found.better:
            tell(f"  {describe(found.asked, own, found.tiles)}")
            kept |= {key: tile for key, tile in found.tiles.items() if tile != own[key]}
            self.refined += 1
        try:
            refined.keep(refined.model(value.device), kept)
        except OSError as error:
            tell(f"  not kept: {error}")
        for tile in found.wrong:
            tell(f"  WRONG RESULTS, please report: {tile}")
        self.wrong += len(found.wrong)

    def _searched(self, value: Tensor, call: Callable[[], Any]) -> Found | None:
        """On a stream of its own, since none but such a one can be captured."""
        with torch.cuda.device(value.device), torch.no_grad():
            side, before = _side_stream(value.device), torch.cuda.current_stream()
            side.wait_stream(before)
            try:
                with torch.cuda.stream(side):
                    return self.search(call, self.settled)
            finally:
                before.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all searches: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream(device)


def _signature(x: Any) -> Any:
    if isinstance(x, Tensor):
        return tuple(x.shape), x.stride(), x.dtype, x.device
    return tuple(x) if isinstance(x, list) else x


def _tunable(args: Sequence[Any]) -> bool:
    """Whether the call has memory on a GPU, and time can be taken."""
    tensors = [x for x in args if isinstance(x, Tensor)]
    ordinary = all(type(x) in (Tensor, torch.nn.Parameter) and x.is_cuda for x in tensors)
    return ordinary and not torch.cuda.is_current_stream_capturing()


def tell(line: str) -> None:
    """Beside what the program itself prints."""
    print(f"pliant tune: {line}", file=sys.stderr, flush=True)


def run(
    program: Path | None, argv: Sequence[str], cases: Sequence[str], dtypes: Sequence[str]
) -> int:
    """Refine what a program, or the named workloads, ask for; the exit status."""
    try:
        file = refined.keep(torch.cuda.get_device_name(), {})
    except OSError as error:
        tell(f"nothing can be kept: {error}")
        return 2
    tuner = Tuner()
    try:
        if program is not None:
            with tuner, script(program, argv) as start:
                start()
        for case, dtype in product(cases, dtypes):
            tell(f"{case} {dtype}")
            with tuner:
                _workload(case, getattr(torch, dtype))
    except SystemExit as end:  # as many scripts end
        if end.code or not tuner.wrong:
            raise
    finally:
        tell(f"{tuner.refined} of {len(tuner.seen)} problems refined, kept in {file}")
    return 1 if tuner.wrong else 0


def _workload(id: str, dtype: torch.dtype) -> None:
    """One of the problems of real models, forward and backward."""
    operator = testing.WORKLOADS[id].operator
    inputs = testing.workload(id, dtype, "cuda")
    for name, x in inputs.items():
        if isinstance(x, Tensor):
            inputs[name] = x.cuda()  # metadata too, as models hold them
    names = [n for n in testing.DIFFERENTIABLE[operator] if inputs.get(n) is not None]
    leaves = [inputs[name].requires_grad_() for name in names]
    out = getattr(pliant, operator)(**inputs)
    torch.autograd.grad(out, leaves, testing.incoming(out.detach()))
