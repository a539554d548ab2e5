"""Launches that are worked out once: what the signature of a call fixes is not computed again."""

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
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

    _add, _splat = InterpreterBuilder.create_atomic_rmw, InterpreterBuilder.create_splat

    def _contiguous(self: Any, op: Any, *args: Any) -> Any:
        """The interpreter takes where, what and mask for contiguous, even if one was broadcast."""
        for x in args[:3]:
            x.data = np.ascontiguousarray(x.data)
        return _add(self, op, *args)

    def _truth(self: Any, form: Any, x: Any) -> Any:
        """The interpreter spreads what a comparison gave as numbers of what was compared."""
        spread = _splat(self, form, x)
        if x.data.dtype == np.bool_:
            spread.data = spread.data.astype(np.bool_)
        return spread

    InterpreterBuilder.create_atomic_rmw = _contiguous
    InterpreterBuilder.create_splat = _truth


class Launch:
    """A kernel, its grid and all arguments but the tensors: what the sizes of a problem fix.

    With a constant EARLY it is made ready while the kernel before it still runs: it must `wait`.
    The first call goes through Triton's own launch, which compiles. Later ones launch the compiled
    kernel, without Triton's look-up by every argument: it takes longer than a small problem runs.
    """

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], integers: tuple[int, ...], **constants: Any
    ) -> None:
        self.kernel, self.grid, self.integers = kernel, (*grid, 1, 1)[:3], integers
        self.constants = {**constants, "launch_pdl": True} if constants.get("EARLY") else constants
        self.rest: tuple[Any, ...] = ()
        self.compiled: dict[Hashable, tuple[Any, ...]] = {}  # by the tensors' alignment

    def __call__(self, *tensors: Tensor) -> None:
        pointers = [x.data_ptr() for x in tensors]
        together = 0
        for pointer in pointers:
            together |= pointer
        aligned = 0 if together % 16 == 0 else tuple(pointer % 16 for pointer in pointers)
        index = tensors[0].get_device()
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):  # Triton launches on the current one
                return self(*tensors)
        known = self.compiled.get(aligned)
        if known is None:
            self._compile(aligned, tensors)
            return
        compiled, start, between = known
        stream = torch._C._cuda_getCurrentRawStream(index)
        hook = _knobs.launch_enter_hook
        if getattr(hook, "calls", hook):  # a profiler of Triton's listens
            compiled[self.grid](*tensors, *self.rest, stream=stream)
        else:
            # Pointers are taken as they are; a tensor is asked for its own, and then the driver.
            start(*self.grid, stream, *between, *pointers, *self.rest)

    def _compile(self, aligned: Hashable, tensors: Sequence[Tensor]) -> None:
        # A product and a sum are one instruction, as they were measured: newer compilers must be
        # told. Where rounding matters, the tap layer rounds.
        how = {"enable_fp_fusion": True, **self.constants}
        compiled = self.kernel[self.grid](*tensors, *self.integers, **how)
        if not INTERPRET:
            names = self.kernel.arg_names[len(tensors) + len(self.integers) :]
            self.rest = (*self.integers, *(self.constants[name] for name in names))
            self.compiled[aligned] = (compiled, *_starter(compiled))


_knobs = triton.knobs.runtime


def _starter(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """What starts a compiled kernel, and its arguments between the stream and the kernel's own."""
    run, no_hooks = compiled.run, (None, None, None)
    known = triton.__version__.startswith("3.6.")
    if known and not run.global_scratch_size and not run.profile_scratch_size:
        # Triton's function in C, past the one in Python that looks for scratch space.
        how = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        return run.launch, (compiled.function, *how, compiled.packed_metadata, *no_hooks)
    return run, (compiled.function, compiled.packed_metadata, *no_hooks)


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # sizes and strides; no torch.Size


def form(x: Tensor) -> Form:
    return tuple(x.shape), x.stride(), x.dtype


def empty(like: Tensor, size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Any:
    """A tensor of that form where `like` is, in half of the time of PyTorch's own functions."""
    index = like.get_device()
    if index < 0:
        return _guards._empty_strided_cpu(size, strides, dtype)
    if index == torch._C._cuda_getDevice():
        return _guards._empty_strided_cuda(size, strides, dtype)
    return like.new_empty_strided(size, strides, dtype=dtype)


_guards: Any = torch._C._dynamo.guards  # where the compiler's own programs find it


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


class _Own(threading.local):
    """What a thread remembers by itself."""

    remembered: dict[Hashable, Any] | None = None


_own = _Own()


def remembered(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` gave for this key before, or gives now."""
    kept = _remembered if _own.remembered is None else _own.remembered
    known = kept.get(key)
    if known is None:
        if len(kept) >= 4096:
            kept.clear()
        known = kept[key] = make()
    return known


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """This thread works all launches out again, and forgets them in the end."""
    before, _own.remembered = _own.remembered, {}
    try:
        yield
    finally:
        _own.remembered = before


def run(tensors: Sequence[Tensor], key: Hashable, plan: Callable[[], Callable[..., T]]) -> T:
    """Call what `plan` gives, made once for the sizes, strides and alignment of the tensors."""
    signature = tuple((x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors)
    launch = remembered((key, tensors[0].device, signature), plan)
    return launch(*tensors)
