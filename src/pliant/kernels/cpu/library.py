"""The shared library with the kernels: where it is, if it runs here, its instruction set."""

import ctypes
import functools
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...sampling.problem import FEATURE_DTYPES, INDEX_DTYPES

ABI = 2  # of dispatch.cpp
ISAS = ("baseline", "avx2", "avx512")  # in the order of problem.h
FORCE = "PLIANT_CPU_ISA"
POSITION_DTYPES = FEATURE_DTYPES + INDEX_DTYPES


class Library(NamedTuple):
    """The loaded library, or the reasons why there is none."""

    handle: Any
    isa: int  # index into ISAS
    path: str
    reasons: list[str]


@functools.cache
def library() -> Library:
    """Load the library, once. torch is loaded by now, so its OpenMP runtime serves both."""
    path = _find()
    if path is None:
        return _none(
            "the CPU kernels are not built: the package was installed without a C++ compiler, or "
            "it is used from its source tree and `cmake -B build && cmake --build build` has not "
            "been run there"
        )
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return _none(f"the CPU kernels cannot be loaded: {error}")
    if handle.pliant_abi() != ABI:
        return _none(f"{path} is from another version of pliant: build it again")
    for function in ("sample_sum", "sample_sum_backward", "convolution"):
        getattr(handle, f"pliant_{function}").restype = ctypes.c_int64
    available = _available(handle)
    chosen = os.environ.get(FORCE) or available[-1]
    if chosen not in available:
        reason = f"{FORCE}={chosen}, but this CPU and build run only {', '.join(available)}"
        warnings.warn(f"{reason}: plain PyTorch runs instead", stacklevel=1)
        return _none(reason)
    return Library(handle, ISAS.index(chosen), str(path), [])


def _available(handle: Any) -> list[str]:
    return [isa for i, isa in enumerate(ISAS) if handle.pliant_isas() >> i & 1]


def _find() -> Path | None:
    import pliant.kernels.cpu as package  # an editable install has more than one folder for it

    places = [Path(folder) / "libpliant_cpu.so" for folder in package.__path__]
    return next((place for place in places if place.exists()), None)


def _none(reason: str) -> Library:
    return Library(None, 0, "", [reason])


def missing() -> list[str]:
    """Why the kernels cannot run on this machine at all; empty if they can."""
    return library().reasons


def describe() -> str:
    """One line for `pliant info`."""
    loaded = library()
    available = _available(loaded.handle)
    threads = "OpenMP" if loaded.handle.pliant_has_threads() else "one thread: built without OpenMP"
    return f"{ISAS[loaded.isa]} (of {', '.join(available)}), {threads}, {loaded.path}"


def supports(value: Tensor, loc: Tensor, weight: Tensor | None) -> list[str]:
    """Why the kernels cannot run this problem; empty if they can."""
    loaded = library()
    # The common case first: this is on the way of every call.
    if (
        not loaded.reasons
        and value.is_cpu
        and loc.is_cpu
        and value.dtype in FEATURE_DTYPES
        and loc.dtype in POSITION_DTYPES
        and (weight is None or (weight.is_cpu and weight.dtype in FEATURE_DTYPES))
    ):
        return []
    reasons = list(loaded.reasons)
    for name, x, allowed in (
        ("the features", value, FEATURE_DTYPES),
        ("the positions", loc, POSITION_DTYPES),
        ("the weights", weight, FEATURE_DTYPES),
    ):
        if x is not None and not x.is_cpu:
            reasons.append(f"{name} must be on the CPU, they are on {x.device}")
        if x is not None and x.dtype not in allowed:
            names = ", ".join(_name(dtype) for dtype in allowed)
            reasons.append(f"{name} must be one of {names}, they are {_name(x.dtype)}")
    return reasons


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
