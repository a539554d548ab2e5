"""Run scripts written for the vendor's NPU: its package names, and `npu` as the name of a device.

    from pliant.compat import ascend
    ascend.install()      # from here on: import torch_npu, mx_driving; x.npu(), device="npu"
    ascend.uninstall()    # nothing of it is left

The GPU stands in for the NPU if there is one, else the CPU; a tensor's `device` says which.
PyTorch reads two things before any hook, so they know no npu: `torch.Generator("npu")`, and
`torch.device("npu")` inside a compiled function.
"""

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import overrides, serialization

from . import torch_npu
from .scripts import script
from .torch_npu.npu import Device, standin

_ALIASES = {
    "mx_driving": "pliant.compat.mx_driving",
    "torch_npu": "pliant.compat.torch_npu",
    "torch.npu": "pliant.compat.torch_npu.npu",
}
_SCHEMA = (
    "npu_deformable_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor? bias, "
    "int[2] kernel_size, int[] stride, int[] padding, int[] dilation=[1, 1, 1, 1], int groups=1, "
    "int deformable_groups=1, bool modulated=True) -> (Tensor, Tensor)"
)
_installed: contextlib.ExitStack | None = None  # what undoes each step, last step first


def install() -> None:
    """Put the vendor's names in place. Twice is as once; where the real packages are, it raises."""
    global _installed
    if _installed is not None:
        return
    for name in ("mx_driving", "torch_npu"):
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            raise RuntimeError(
                f"ascend.install: the real package {name} is importable here and is not replaced; "
                "use it, or run where it is not installed"
            )
    with contextlib.ExitStack() as undo:
        _add_packages(undo)
        _add_operator(undo)
        _add_methods(undo)
        _add_device_strings(undo)
        _installed = undo.pop_all()


def uninstall() -> None:
    """Undo `install`; without it, nothing happens."""
    global _installed
    undo, _installed = _installed, None
    if undo is not None:
        undo.close()


def run_script(path: str | os.PathLike[str], argv: Sequence[str] = ()) -> None:
    """Run a script as `python path argv...` would, the vendor's names in place until it ends."""
    before = _installed
    try:
        with script(path, argv) as run:
            install()
            run()
    finally:
        if before is None:
            uninstall()


def _put(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


# Packages and the registered operator


class _Aliases(MetaPathFinder):
    """Finds the packages under their aliases, each submodule when it is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        real = _real_name(fullname)
        if real is None or importlib.util.find_spec(real) is None:
            return None
        return ModuleSpec(fullname, _Alias(real))


class _Alias(Loader):
    """Gives a module another name: under both it is the same object."""

    def __init__(self, real: str) -> None:
        self.real = real

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = importlib.import_module(self.real)


def _real_name(name: str) -> str | None:
    for alias, real in _ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            return real + name.removeprefix(alias)
    return None


def _add_packages(undo: contextlib.ExitStack) -> None:
    undo.callback(_forget_packages)
    finder = _Aliases()
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)
    _put(undo, torch, "npu", torch_npu.npu)
    for alias in _ALIASES:
        importlib.import_module(alias)


def _forget_packages() -> None:
    for name in [name for name in sys.modules if _real_name(name) is not None]:
        del sys.modules[name]


def _add_operator(undo: contextlib.ExitStack) -> None:
    if "npu" not in vars(torch.ops):
        undo.callback(vars(torch.ops).pop, "npu", None)
    if not hasattr(torch.ops.npu, "npu_deformable_conv2d"):
        library = torch.library.Library("npu", "FRAGMENT")
        undo.callback(library._destroy)
        library.define(_SCHEMA)
        library.impl(
            "npu_deformable_conv2d", torch_npu.npu_deformable_conv2d, "CompositeImplicitAutograd"
        )


# Tensors, modules and device strings


def _tensor_npu(
    self: torch.Tensor, device: Device = None, non_blocking: bool = False
) -> torch.Tensor:
    return self.to(standin(device), non_blocking=non_blocking)


def _module_npu(self: torch.nn.Module, device: Device = None) -> torch.nn.Module:
    return self.to(standin(device))


def _add_methods(undo: contextlib.ExitStack) -> None:
    _put(undo, torch.Tensor, "npu", _tensor_npu)
    _put(undo, torch.Tensor, "is_npu", property(lambda self: self.device.type == standin().type))
    _put(undo, torch.nn.Module, "npu", _module_npu)


def _is_npu(x: Any) -> bool:
    return isinstance(x, str) and (x == "npu" or x.startswith("npu:"))


def _translated(x: Any) -> Any:
    return str(standin(x)) if _is_npu(x) else x


class _DeviceStrings(overrides.TorchFunctionMode):
    """Translates device strings in all that a mode sees: factories, `to`, `torch.device`..."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        spelled = any(map(_is_npu, args)) or any(map(_is_npu, kwargs.values()))
        # einsum: an equation may read "npu". Another thread's uninstall leaves this one's mode.
        if not spelled or func is torch.einsum or _installed is None:
            return func(*args, **kwargs)
        result = func(*map(_translated, args), **{k: _translated(v) for k, v in kwargs.items()})
        # torch.device("npu", 0) is the CPU without an index, as the device of its tensors says
        return standin() if isinstance(result, torch.device) and result.type == "cpu" else result


def _add_device_strings(undo: contextlib.ExitStack) -> None:
    mode = _DeviceStrings()
    overrides._push_mode(mode)
    undo.callback(_leave, mode)

    start = threading.Thread.start

    @functools.wraps(start)
    def start_in_mode(thread: threading.Thread) -> None:  # a mode holds for one thread
        run = thread.run

        def run_in_mode() -> None:
            with _DeviceStrings():
                run()

        thread.run = run_in_mode  # type: ignore[method-assign]
        start(thread)

    _put(undo, threading.Thread, "start", start_in_mode)

    init = torch.autocast.__init__

    @functools.wraps(init)
    def autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, standin().type if _is_npu(device_type) else device_type, *args, **kwargs)

    _put(undo, torch.autocast, "__init__", autocast)

    def restore(storage: Any, location: str) -> Any:
        if not _is_npu(location):
            return None  # not ours: the next package is asked
        return serialization.default_restore_location(storage, _translated(location))

    # torch.load: map_location="npu", and checkpoints that were saved on an NPU
    registered = list(serialization._package_registry)
    serialization.register_package(0, lambda storage: None, restore)
    undo.callback(serialization._package_registry.__setitem__, slice(None), registered)


def _leave(mode: overrides.TorchFunctionMode) -> None:
    """Take `mode` out of this thread's stack, from under those entered since."""
    if mode not in overrides._get_current_function_mode_stack():
        return
    above = []
    while (top := overrides._pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        overrides._push_mode(other)
