"""`pliant info`: what is installed, which backends work on this machine, why the others do not."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

import pliant
from pliant.sampling import ops
from pliant.sampling.problem import FEATURE_DTYPES

BACKENDS = ("reference", "cpu", "triton")
ENVIRONMENT = {
    "PLIANT_CHECK": "1 at import: check map sizes and starts on a device by value (synchronises)",
    "PLIANT_CPU_ISA": "instruction set of the CPU kernels (default: the best one here)",
    "PLIANT_TUNED": "folder of what `pliant tune` has found, 0: none (default: in the cache)",
    "TRITON_INTERPRET": "1: run the Triton kernels without a GPU, in the interpreter (slow)",
}


def collect() -> dict[str, Any]:
    """Everything that `pliant info` shows, ready for JSON."""
    return {
        "versions": {
            "pliant": pliant.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
        },
        "platform": platform.platform(),
        "devices": _devices(),
        "threads": torch.get_num_threads(),
        "backends": {name: _backend(name) for name in BACKENDS},
        "default": {device: _default(device) for device in _device_types()},
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device_types() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _devices() -> list[str]:
    devices = [f"cpu: {_processor()}, {os.cpu_count()} logical cores"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        devices.append(f"cuda:{index}: {gpu.name}, {memory}, compute {gpu.major}.{gpu.minor}")
    return devices


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _backend(name: str) -> dict[str, Any]:
    if name == "reference":
        about = "plain PyTorch, any device; exact, not fast"
        return {"works": True, "missing": [], "about": about, "takes": {}, "refuses": {}}
    kernels = ops.backend(name)
    missing = kernels.missing()
    about = "" if missing else kernels.describe()
    takes, refuses = ({}, {}) if missing else _supported(kernels)
    return {
        "works": not missing, "missing": missing, "about": about, "takes": takes, "refuses": refuses
    }  # fmt: skip


def _supported(kernels: Any) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By device: the dtypes of features that the kernels take, or why they take none."""
    takes, refuses = {}, {}
    for device in _device_types():
        samples = [torch.empty(0, dtype=dtype, device=device) for dtype in FEATURE_DTYPES]
        reasons = [kernels.supports(x, samples[0], None) for x in samples]
        if all(reasons):
            refuses[device] = list(reasons[0])
        else:
            taken = (x for x, why in zip(samples, reasons, strict=True) if not why)
            takes[device] = [str(x.dtype).removeprefix("torch.") for x in taken]
    return takes, refuses


def _default(device: str) -> str:
    """The backend that serves tensors of a device when `impl` is not given."""
    name: str = ops.AUTOMATIC[device]
    return "reference" if ops.backend(name).missing() else name


def show(report: dict[str, Any]) -> None:
    """Print the report, in colour where rich is installed."""
    text = "\n".join(_lines(report))
    try:
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        print(text)
        return
    coloured = Text(text)
    coloured.highlight_regex(r"(?m)^[A-Z].*$", "bold")
    coloured.highlight_regex(r"(?m)^  \S+", "cyan")
    coloured.highlight_regex(r"\bworks\b", "bold green")
    coloured.highlight_regex(r"\bdoes not work\b", "bold yellow")
    Console(soft_wrap=True).print(coloured)


def _lines(report: dict[str, Any]) -> list[str]:
    lines = ["Versions"]
    lines += [f"  {name:10}{version or 'none'}" for name, version in report["versions"].items()]
    lines += ["Devices", *(f"  {device}" for device in report["devices"])]
    lines += [f"  {report['threads']} threads (torch.set_num_threads)"]
    lines += ["Backends"]
    for name, state in report["backends"].items():
        about = f": {state['about']}" if state["about"] else ""
        lines.append(f"  {name:10}{'works' if state['works'] else 'does not work'}{about}")
        lines += [f"  {'':10}- {reason}" for reason in state["missing"]]
        for device, dtypes in state["takes"].items():
            lines.append(f"  {'':10}- takes features of {', '.join(dtypes)} on {device}")
        for device, reasons in state["refuses"].items():
            lines.append(f"  {'':10}- takes nothing on {device}: {'; '.join(reasons)}")
    lines += ["Backend where impl is not given"]
    lines += [f"  {name:10}for tensors on {device}" for device, name in report["default"].items()]
    lines += ["Environment"]
    for name, value in report["environment"].items():
        setting = f"{name} not set" if value is None else f"{name}={value}"
        lines.append(f"  {setting:26}{ENVIRONMENT[name]}")
    return lines
