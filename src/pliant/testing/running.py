"""One way to run any writing of an operator: public function, composite or loops."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

import pliant
from pliant.testing import composite, loops
from pliant.testing.cases import DIFFERENTIABLE, POSITIONS
from pliant.testing.compare import HALVES, check

Gradients = dict[str, Tensor]


class Expected(NamedTuple):
    """What the loops give in float64, and the magnitudes that errors scale with."""

    out: Tensor
    grads: Gradients
    out_magnitude: Tensor
    grad_magnitudes: Gradients
    working: torch.dtype  # of the arithmetic: float64 where features and positions are


def impls(device: str | torch.device = "cpu") -> list[str]:
    """The implementations that can run on `device` here: the reference, and every able backend."""
    value = torch.zeros(1, 1, 1, 1, 1, device=device)
    loc = torch.zeros(1, 1, 1, 1, 1, 2, device=device)
    weight = torch.zeros(1, 1, 1, 1, 1, 1, 1, device=device)
    able = ["reference"]
    for name in ("cpu", "triton"):
        spec = find_spec(f"pliant.kernels.{name}")
        if spec is None or spec.origin is None:  # no such package, or only its sources
            continue
        backend = import_module(spec.name)
        if not backend.missing() and not backend.supports(value, loc, weight):
            able.append(name)
    return able


def run(
    operator: str,
    inputs: dict[str, Any],
    impl: str | None = None,
    *,
    grad: bool = True,
    grad_output: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """The result of `operator` and the gradients of its differentiable floating-point arguments.

    `impl` is that of the public functions, or "composite". The incoming gradient is `grad_output`,
    by default the one that `incoming` draws.
    """
    names = [n for n in DIFFERENTIABLE[operator] if inputs.get(n) is not None] if grad else []
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    if impl == "composite":
        out = getattr(composite, operator)(**{**inputs, **leaves})
    else:
        out = getattr(pliant, operator)(**{**inputs, **leaves}, impl=impl)
    if not names:
        return out, {}
    if grad_output is None:
        grad_output = incoming(out)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_output, allow_unused=True)
    return out.detach(), {
        name: torch.zeros_like(leaves[name]) if gradient is None else gradient
        for name, gradient in zip(names, grads, strict=True)
    }


def expect(operator: str, inputs: dict[str, Any], grad_output: Tensor | None = None) -> Expected:
    """What `run` must give, by the loops: small problems only."""
    loop = getattr(loops, operator)
    features, positions = inputs[DIFFERENTIABLE[operator][0]], inputs[POSITIONS[operator]]
    exact = features.dtype == torch.float64 == positions.dtype
    if grad_output is None:
        grad_output = incoming(loop(**inputs).to(features.dtype))
    out, grads = loop(**inputs, grad_output=grad_output)
    out_magnitude, grad_magnitudes = loop(**inputs, grad_output=grad_output, absolute=True)
    working = torch.float64 if exact else torch.float32
    return Expected(out, grads, out_magnitude, grad_magnitudes, working)


def verify(
    operator: str,
    inputs: dict[str, Any],
    impl: str | None = None,
    *,
    expected: Expected | None = None,
    grad_output: Tensor | None = None,
) -> float:
    """Checks result and gradients of `impl` against the loops; returns the share of the budget.

    In half precision a kernel may be off by twice what the reference is, and the reference by what
    float32 arithmetic and one rounding explain.
    """
    expected = expected or expect(operator, inputs, grad_output)
    out, grads = run(operator, inputs, impl, grad_output=grad_output)
    if grads.keys() != expected.grads.keys():
        raise AssertionError(f"gradients of {list(grads)}, expected {list(expected.grads)}")
    half = out.dtype in HALVES and impl != "reference"
    base, base_grads = out, grads
    if half:
        base, base_grads = run(operator, inputs, "reference", grad_output=grad_output)

    def share(name: str, got: Tensor, exact: Tensor, baseline: Tensor, magnitude: Tensor) -> float:
        return check(
            got.cpu(),
            exact,
            baseline.cpu() if half and got.dtype in HALVES else None,
            magnitude=magnitude,
            working=expected.working,
            dtype=inputs[name].dtype,
            what=f"{operator}: {'result' if got is out else f'gradient of {name}'}",
        )

    features = DIFFERENTIABLE[operator][0]
    shares = [share(features, out, expected.out, base, expected.out_magnitude)]
    for name, got in grads.items():
        magnitude = expected.grad_magnitudes[name]
        shares.append(share(name, got, expected.grads[name], base_grads[name], magnitude))
    return max(shares)


def incoming(out: Tensor, seed: int = 1) -> Tensor:
    """A gradient for `out` that is the same on every device, up to the rounding of its dtype."""
    generator = Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
