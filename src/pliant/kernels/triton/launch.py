"""Launches that are worked out once: what the signature of a call fixes is not computed again."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import INTERPRET

T = TypeVar("T")

if INTERPRET:
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder

    _add = InterpreterBuilder.create_atomic_rmw

    def _contiguous(self: Any, op: Any, *args: Any) -> Any:
        """The interpreter takes where, what and mask for contiguous, even if one was broadcast."""
        for x in args[:3]:
            x.data = np.ascontiguousarray(x.data)
        return _add(self, op, *args)

    InterpreterBuilder.create_atomic_rmw = _contiguous


class Launch:
    """A kernel, its grid and all arguments but the tensors: what the sizes of a problem fix.

    With a constant EARLY it is made ready while the kernel before it still runs: it must `wait`.
    The first call goes through Triton's own launch, which compiles. Later ones launch the compiled
    kernel, without Triton's look-up by every argument: it takes longer than a small problem runs.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], integers: tuple[int, ...], **constants: Any
    ) -> None:
        self.kernel, self.grid, self.integers = kernel, grid, integers
        self.constants = {**constants, "launch_pdl": True} if constants.get("EARLY") else constants
        self.rest: tuple[Any, ...] = ()
        self.compiled: dict[Hashable, Any] = {}  # by the tensors' alignment

    def __call__(self, *tensors: Tensor) -> None:
        index = tensors[0].device.index
        if index is not None and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):  # Triton launches on the current one
                return self(*tensors)
        pointers = [x.data_ptr() for x in tensors]
        together = 0
        for pointer in pointers:
            together |= pointer
        aligned = 0 if together % 16 == 0 else tuple(pointer % 16 for pointer in pointers)
        compiled = self.compiled.get(aligned)
        if compiled is None:
            compiled = self.kernel[self.grid](*tensors, *self.integers, **self.constants)
            if not INTERPRET:
                names = self.kernel.arg_names[len(tensors) + len(self.integers) :]
                self.rest = (*self.integers, *(self.constants[name] for name in names))
                self.grid = (*self.grid, 1, 1)[:3]
                self.compiled[aligned] = compiled
            return
        stream = triton.runtime.driver.active.get_current_stream(index)
        hook = triton.knobs.runtime.launch_enter_hook
        if getattr(hook, "calls", hook):  # a profiler of Triton's listens
            compiled[self.grid](*tensors, *self.rest, stream=stream)
        else:
            # Pointers are taken as they are; a tensor is asked for its own, and then the driver.
            compiled.run(
                *self.grid, stream, compiled.function, compiled.packed_metadata,
                None, None, None, *pointers, *self.rest,
            )  # fmt: skip


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait until all kernels before have ended, then let the next one be made ready.

    A kernel that was launched EARLY does so before it reads what they write, or writes at all.
    """
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def cover(size, B: tl.constexpr):
    """Blocks of B for `size` numbers, one at least: cdiv, whose sum 32 bits may not hold."""
    return (size - 1) // B + 1


_remembered: dict[Hashable, Any] = {}


def remembered(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave for this key before, or gives now."""
    known = _remembered.get(key)
    if known is None:
        if len(_remembered) >= 4096:
            _remembered.clear()
        known = _remembered[key] = make()
    return known


def run(tensors: Sequence[Tensor], key: Hashable, plan: Callable[[], Callable[..., T]]) -> T:
    """Call what `plan` gives, made once for the sizes, strides and alignment of the tensors."""
    signature = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
    launch = remembered((key, tensors[0].device, signature), plan)
    return launch(*tensors)
