"""Tiles that `pliant tune` has found to be faster than those of the rules, on a GPU like this one.

They lie in a file for each model of GPU, in the folder $PLIANT_TUNED (by default pliant/tuned in
the user's cache; "0" for none), and hold for the versions that they were measured with. A file is
read when the first launch is worked out; nothing is measured but by `pliant tune`.

A tile goes by its rule, the rule's arguments, and what else tells the problem from others. Numbers
above 1024 (positions, rows, queries) count in powers of two: images of nearly the same size share
their tiles. Whatever the file says, no tile is taken that could not be right: `CHOICES` are the
numbers that the kernels allow.
"""

import contextlib
import functools
import hashlib
import json
import logging
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

log = logging.getLogger("pliant")
Tile = dict[str, int | None]  # None for a number that is left to the compiler

# What a tile may be


def powers(least: int, most: int) -> list[int | None]:
    """Powers of two from `least` to `most`."""
    return [1 << i for i in range(most.bit_length()) if least <= 1 << i <= most]


def _divisors(n: int, among: Iterable[int | None]) -> list[int | None]:
    return [i for i in among if i and n % i == 0]


WARPS = {"num_warps": powers(1, 8)}
LAUNCH = {**WARPS, "maxnreg": [64, 72, 80, 96, 128, 168, 224, None]}
PRODUCT = {**LAUNCH, "num_stages": [1, 2, 3, 4]}

# By the name of a rule, from its arguments to the values that each number of its tile may take.
# What is not named is not refined.
CHOICES: dict[str, Callable[..., dict[str, list[int | None]]]] = {
    "query_tile": lambda channels, queries, groups, points, dtype: {
        "BQ": powers(1, 1024), "BG": _divisors(groups, powers(1, 128)),
        "BP": _divisors(points, range(1, 9)), **LAUNCH,
    },
    "point_tile": lambda *_: {"BP": powers(1, 64), "BC": powers(1, 256), **LAUNCH},
    "backward_tile": lambda *_: {"BQ": powers(1, 16), "BJ": powers(1, 512), **LAUNCH},
    "enter_tile": lambda *_: {"B": powers(32, 1024), **WARPS},
    "list_tile": lambda *_: {"BR": powers(4, 128), **WARPS},
    "bins_tile": lambda *_: {"BE": powers(1, 64), "BC": powers(1, 1024), **WARPS},
    "forward_tile": lambda *_: {
        "BM": powers(16, 256), "BN": powers(16, 256), "BK": powers(16, 128), **PRODUCT
    },
    "columns_tile": lambda *_: {"BJ": powers(32, 128), "BC": powers(1, 128), **LAUNCH},
    "product_tile": lambda *_: {
        "BM": powers(16, 256), "BN": powers(16, 256), "BK": powers(16, 128), **PRODUCT
    },
    "settle_tile": lambda *_: {"BC": powers(1, 64), "BO": powers(1, 64), **WARPS},
    "differentiate_tile": lambda *_: {"BM": powers(4, 256), "BC": powers(1, 256), **LAUNCH},
    "collect_tile": lambda *_: {
        "BP": powers(1, 16), "BE": powers(4, 128), "BC": powers(1, 256), **LAUNCH
    },
}  # fmt: skip

# Tiles that must have a number for each thread. A thread that repeats another's work would read
# where that has written already, or enter a sample twice.
OWN = {"differentiate_tile": ("BM", "BC"), "enter_tile": ("B",)}


class Asked(NamedTuple):
    """What a launch asked for: the tile of the rule, and what else it may be."""

    rule: str
    tile: Tile
    choices: dict[str, list[int | None]]

    def allows(self, tile: Mapping[str, Any]) -> bool:
        allowed = self.choices
        if tile.keys() != allowed.keys():
            return False
        if any(type(n) not in (int, type(None)) or n not in allowed[k] for k, n in tile.items()):
            return False
        own = OWN.get(self.rule, ())
        return not own or math.prod(tile[name] for name in own) >= 32 * tile["num_warps"]


# From a rule to a launch


class _Here(threading.local):
    """Those who listen, and tiles that are tried: what a search does concerns no other thread."""

    def __init__(self) -> None:
        self.listening: list[dict[str, Asked]] = []
        self.tried: dict[str, Tile] = {}


_here = _Here()


def refined(
    device: torch.device, rule: Callable[..., dict[str, int]], /, *args: Any, **about: Any
) -> dict[str, int]:
    """The tile that `rule` gives for `args`, or a better one for a problem that is like this."""
    tile, choices = rule(*args), CHOICES.get(rule.__name__)
    known = stored(model(device))
    if choices is None or not (known or _here.listening or _here.tried):
        return tile
    words = [_text(x) for x in args if not isinstance(x, torch.device)]
    key = f"{rule.__name__}({', '.join(words)})"
    key = " ".join([key, *(f"{name}={_text(x)}" for name, x in about.items())])
    allowed = choices(*args)
    asked = Asked(rule.__name__, {name: tile.get(name) for name in allowed}, allowed)
    for heard in _here.listening:
        heard[key] = asked
    better = _here.tried.get(key) or known.get(key)
    if better is None or not asked.allows(better):
        return tile
    return {name: n for name, n in {**tile, **better}.items() if n is not None}


def _text(x: Any) -> str:
    if isinstance(x, int) and not isinstance(x, bool) and x > 1024:
        return f"2^{(x - 1).bit_length()}"
    if isinstance(x, tuple):
        return "-".join(map(_text, x))
    return str(x).removeprefix("torch.")


@contextlib.contextmanager
def listen() -> Iterator[dict[str, Asked]]:
    """Collect what launches ask for while this thread works them out."""
    heard: dict[str, Asked] = {}
    before, _here.listening = _here.listening, [*_here.listening, heard]
    try:
        yield heard
    finally:
        _here.listening = before


@contextlib.contextmanager
def trying(tiles: Mapping[str, Tile]) -> Iterator[None]:
    """These tiles instead of any others, for launches that this thread works out meanwhile."""
    before, _here.tried = _here.tried, {**_here.tried, **tiles}
    try:
        yield
    finally:
        _here.tried = before


# What is kept


def folder() -> Path | None:
    """Where the files lie; None if none are wanted."""
    where = os.environ.get("PLIANT_TUNED")
    if where == "0":
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.path.expanduser(where or os.path.join(cache, "pliant", "tuned")))


def path(device: str) -> Path | None:
    where = folder()
    return where and where / (re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-") + ".json")


@functools.cache
def model(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


@functools.cache
def versions() -> dict[str, str]:
    """Of Triton and of these kernels: with others, other tiles are the best."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    kernels = hashlib.sha256(b"".join(source.read_bytes() for source in sources))
    return {"triton": triton.__version__, "kernels": kernels.hexdigest()[:16]}


@functools.cache
def stored(device: str) -> dict[str, Tile]:
    """The tiles in the file of this model of GPU, if they were measured with these versions."""
    file = path(device)
    if file is None:
        return {}
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:  # a cache that is somebody else's
        log.debug("no tiles of pliant tune: %s", error)
        return {}
    try:
        content = json.loads(content)
        tiles = content["tiles"] if content["versions"] == versions() else {}
        return {str(key): dict(tile) for key, tile in tiles.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = f"it cannot be read: {type(error).__name__}: {error}"
        warnings.warn(f"pliant: the tiles in {file} are not used, {why}", stacklevel=2)
        return {}


def about(device: str) -> str:
    """For `pliant info`: what is used of the file; nothing where there is none."""
    file, tiles = path(device), len(stored(device))
    if file is None or not (tiles or os.path.exists(file)):
        return ""
    if tiles:
        return f"; {tiles} tiles of {file}"
    readable = os.access(file, os.R_OK)
    return f"; {file} {'has none for these versions' if readable else 'cannot be read'}"


def keep(device: str, tiles: Mapping[str, Tile | None]) -> Path:
    """Put tiles into the file, or take those out that are None; other versions' are dropped."""
    import fcntl  # which other systems than Linux may lack

    file = path(device)
    if file is None:
        raise RuntimeError("pliant tune: PLIANT_TUNED=0 says that no tiles are wanted")
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # what others keep meanwhile is kept as well
        stored.cache_clear()
        known = {**stored(device), **tiles}
        content = {
            "device": device,
            "versions": versions(),
            "tiles": {key: tile for key, tile in sorted(known.items()) if tile is not None},
        }
        part = file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(file)  # readers see the old file or the new one
        stored.cache_clear()
    return file
