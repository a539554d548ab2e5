"""Kernels in Triton, for NVIDIA GPUs.

    taps.py                        from a position to the pixels it reads
    sum.py                         the weighted sum of samples: launchers
    forward.py, backward.py, bins.py, lists.py
                                   its kernels; bins.py has those of the deterministic mode,
                                   lists.py those for few samples in 16 bits
    convolution.py, convolution_backward.py
                                   deformable convolution, kernels and launchers
    transpose.py                   the change of layout before and after
    launch.py                      launches that are worked out once
    tuning.py, refined.py          block sizes by rule, and those that `pliant tune` has found

This file imports no Triton, so that a machine without it can be told so.
"""

import functools
import importlib
import os
import shutil
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from pliant.sampling.problem import FEATURE_DTYPES

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

_HOMES = {
    "plan_conv": "convolution",
    "plan_conv_backward": "convolution_backward",
    "plan_sum": "sum",
    "plan_sum_backward": "sum",
    "sample_sum": "sum",
    "sample_sum_backward": "sum",
    "deform_columns": "convolution",
    "deform_columns_backward": "convolution_backward",
    "deform_conv": "convolution",
    "deform_conv_backward": "convolution_backward",
}


@functools.cache
def missing() -> list[str]:
    """Why the kernels cannot run on this machine; empty if they can."""
    reasons = []
    if find_spec("triton") is None:
        reasons.append("Triton is not installed")
    if not INTERPRET and not torch.cuda.is_available():
        reasons.append("no CUDA device is available, and TRITON_INTERPRET=1 is not set")
    if not INTERPRET and torch.version.hip is not None:
        reasons.append("the kernels are for NVIDIA GPUs, and this torch is built for ROCm")
    return reasons


def describe() -> str:
    """One line for `pliant info`."""
    version = importlib.import_module("triton").__version__
    if INTERPRET:
        return f"Triton {version}, interpreted on the CPU"
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    without = "" if compiler else "; no C compiler, which Triton needs for what it has not cached"
    device = torch.cuda.get_device_name()
    tiles = importlib.import_module(".refined", __name__).about(device)
    return f"Triton {version}, on {device}{tiles}{without}"


def supports(value: Tensor, loc: Tensor, weight: Tensor | None) -> list[str]:
    """Every reason against running this problem; empty if it can run."""
    reasons = list(missing())
    if not INTERPRET and value.device.type != "cuda":
        reasons.append(f"Triton kernels need CUDA tensors, got {value.device.type}")
    if value.dtype not in FEATURE_DTYPES:
        reasons.append(f"features of {value.dtype}")
    return reasons


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    kernel = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = kernel
    return kernel
