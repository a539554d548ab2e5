"""Checks of what a caller passes. Each error names the operator, the argument, what was expected
and what came.

Checks look at shapes, dtypes and devices only, never at the content of a tensor that may lie on a
device, so they never synchronise. They are pure functions of those signatures: `once` remembers
the ones that passed.
"""

import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch

from .problem import FEATURE_DTYPES, INDEX_DTYPES, POLICIES

# Every call asks these: an attribute's look-up takes as long as the answer.
_is_compiling = torch.compiler.is_compiling
_modes, _jit_trace = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch


class Signature(NamedTuple):
    """What checks may know of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def tracing() -> bool:
    """Whether a tracer is at work, whose symbolic sizes and fake tensors must not be remembered."""
    return _is_compiling() or _modes() > 0 or _jit_trace() is not None or _included(_PRE_DISPATCH)


def once(check: Callable[..., Any]) -> Callable[..., Any]:
    """Remember the signatures that passed `check`; while tracing, check each time."""
    remembered = functools.lru_cache(maxsize=1024)(check)

    @functools.wraps(check)
    def checked(*signatures: Any) -> Any:
        return check(*signatures) if tracing() else remembered(*signatures)

    return checked


def signature(op: str, name: str, x: Any, kind: str = "a torch.Tensor") -> Signature:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be {kind}, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested tensor" if x.is_nested else x.layout
        raise TypeError(f"{op}: {name} must be a dense tensor, got {layout}")
    # A named tuple's own constructor takes three times as long.
    return tuple.__new__(Signature, (x.shape, x.stride(), x.dtype, x.device))


def optional(op: str, name: str, x: Any) -> Signature | None:
    return None if x is None else signature(op, name, x, "a torch.Tensor or None")


def shape(
    op: str, name: str, got: Sequence[int], axes: str, sizes: dict[str, int], others: str = ""
) -> None:
    """Match `got` with `axes`, say "B Q 2": numbers and known sizes must be met, new ones noted.

    `others` are the arguments that the known sizes come from, where it may be these that are wrong.
    """
    letters = axes.split()
    expected = [int(a) if a.isdigit() else sizes.get(a) for a in letters]
    if len(got) != len(letters) or any(
        e is not None and e != s for e, s in zip(expected, got, strict=True)
    ):
        known = ", ".join(
            a if e is None else str(e) for a, e in zip(letters, expected, strict=True)
        )
        named = f"[{', '.join(letters)}]"
        numbers = (
            "" if all(e is None for e in expected) or f"[{known}]" == named else f" = [{known}]"
        )
        fit = f" to fit {others}" if others and numbers else ""
        raise ValueError(f"{op}: {name} must have shape {named}{numbers}{fit}, got {list(got)}")
    sizes.update((a, s) for a, s in zip(letters, got, strict=True) if not a.isdigit())


def feature_dtype(
    op: str, name: str, dtype: torch.dtype, allow: tuple[torch.dtype, ...] = FEATURE_DTYPES
) -> None:
    if dtype not in allow:
        names = ", ".join(str(d).removeprefix("torch.") for d in allow)
        got = str(dtype).removeprefix("torch.")
        raise TypeError(f"{op}: {name} must have one of the dtypes {names}, got {got}")


def same_device(op: str, first: str, device: torch.device, others: dict[str, Signature]) -> None:
    for name, other in others.items():
        if other.device != device:
            raise ValueError(
                f"{op}: {name} must be on the device of {first}, {device}, got {other.device}"
            )


def divides(op: str, name: str, size: int, by_name: str, by: int) -> None:
    if isinstance(by, float) or by < 1 or size % by:
        raise ValueError(f"{op}: {by_name} must divide {name} = {size}, got {by}")


def pair(op: str, name: str, x: Any, least: int) -> tuple[int, int]:
    """An int or a pair of ints (height, width), each at least `least`."""
    both = (x, x) if _integer(x) else tuple(x) if isinstance(x, (tuple, list)) else ()
    if len(both) != 2 or not all(map(_integer, both)):
        got = f"a tensor {list(x.shape)}" if isinstance(x, torch.Tensor) and x.dim() else repr(x)
        raise TypeError(f"{op}: {name} must be an int or two ints (height, width), got {got}")
    bounds(op, name, x, both, least)
    plain: Any = tuple(v if isinstance(v, (int, torch.SymInt)) else int(v) for v in both)
    return plain  # type: ignore[no-any-return]


def _integer(v: Any) -> bool:
    """Whether it counts: NumPy's integers do, truth values do not."""
    return not isinstance(v, bool) and isinstance(v, (int, torch.SymInt, Integral))


def bounds(op: str, name: str, x: Any, values: Sequence[int], least: int) -> None:
    """Steps `x` of a convolution must leave positions integers of 32 bits."""
    if any(v < least for v in values):
        raise ValueError(f"{op}: {name} must be at least {least}, got {x!r}")
    if any(v >= 2**29 for v in values):
        raise ValueError(f"{op}: {name} must be below 2**29, got {x!r}")


def autocast(device: str) -> bool:
    """Whether autocast is on for this type of device; some types know none."""
    known = device in ("cpu", "cuda") or torch.amp.is_autocast_available(device)
    return known and torch.is_autocast_enabled(device)


def count(op: str, name: str, axis: str, got: int, other: str, expected: int) -> None:
    """Two arguments must agree on an axis."""
    if got != expected:
        raise ValueError(f"{op}: {name} must have {axis} = {expected} as {other} has, got {got}")


# Direct calls of the registered operators, which no public function has checked


def expect(met: bool, what: str, expected: Any, got: Any) -> None:
    if not met:
        raise ValueError(f"{what} must be {expected}, got {got}")


def _direct_operands(op: str, impl: str, *operands: torch.Tensor | None) -> None:
    expect(impl in ("", "reference", "cpu", "triton"), f"{op}: impl", "a backend", repr(impl))
    given = [x for x in operands if x is not None]
    devices = sorted({str(x.device) for x in given})
    expect(len(devices) == 1, f"{op}: the operands' device", "one", devices)


def direct_sum(
    value: torch.Tensor,
    shapes: torch.Tensor,
    starts: torch.Tensor,
    loc: torch.Tensor,
    weight: torch.Tensor,
    *rest: str,
) -> None:
    op, sizes = "sample_sum", dict[str, int]()
    shape(op, "value", value.shape, "N S G K D", sizes)
    shape(op, "shapes", shapes.shape, "V R 2", sizes)
    shape(op, "starts", starts.shape, "V R", sizes)
    shape(op, "weight", weight.shape, "N Q G V P R K", sizes)
    shape(op, "loc", loc.shape, "N Q G V P 2", sizes)
    places = sorted({"cpu", str(value.device)})
    for name, x in (("shapes", shapes), ("starts", starts)):
        expect(x.dtype in INDEX_DTYPES, f"{op}: {name}", "int32 or int64", x.dtype)
        readable = str(x.device) in places
        expect(readable, f"{op}: {name}", f"on {' or '.join(places)}", x.device)
    expect(rest[:3] in POLICIES, f"{op}: the policy", "one of POLICIES", rest[:3])
    _direct_operands(op, rest[3], value, loc, weight)


def direct_columns(
    input: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor | None,
    kernel: Sequence[int],
    *rest: Any,
) -> None:
    op, sizes = "deform_columns", dict[str, int]()
    shape(op, "input", input.shape, "N C H W", sizes)
    shape(op, "offset", offset.shape, "N O Ho Wo", sizes)
    names = ("kernel", "stride", "padding", "dilation")
    for name, steps in zip(names, (kernel, *rest[:3]), strict=True):
        fits = len(steps) == 2 and min(steps) >= (name != "padding")
        expect(fits, f"{op}: {name}", "two sizes (height, width)", list(steps))
    taps, channels, shifts = kernel[0] * kernel[1], input.shape[1], offset.shape[1]
    expect(shifts % (2 * taps) == 0, f"{op}: offset's axis 1", f"k * {2 * taps}", shifts)
    groups = shifts // (2 * taps)
    fits = groups > 0 and channels % groups == 0
    expect(fits, f"{op}: the deformable groups", f"a divisor of {channels}", groups)
    if mask is not None:
        size = [offset.shape[0], shifts // 2, *offset.shape[2:]]
        expect(list(mask.shape) == size, f"{op}: mask's shape", size, list(mask.shape))
    _direct_operands(op, rest[-1], input, offset, mask)


def direct_conv(
    input: torch.Tensor,
    offset: torch.Tensor,
    mask: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *rest: Any,
) -> None:
    op, sizes = "deform_conv", dict[str, int]()
    shape(op, "weight", weight.shape, "Co Ci kh kw", sizes)
    direct_columns(input, offset, mask, weight.shape[2:], *rest)
    (outputs, per_group), channels = weight.shape[:2], input.shape[1]
    groups = channels // per_group if per_group and channels % per_group == 0 else 0
    fits = channels == per_group == 0 or (groups > 0 and outputs % groups == 0)
    expect(fits, f"{op}: weight's axes 0 and 1", "k * groups and C / groups", list(weight.shape))
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None:
            expect(x.dtype == input.dtype, f"{op}: {name}", input.dtype, x.dtype)
    if bias is not None:
        shape(op, "bias", bias.shape, "Co", sizes)
    _direct_operands(op, rest[-1], input, weight, bias)
