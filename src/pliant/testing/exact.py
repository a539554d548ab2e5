"""What large problems must give: the reference in float64, image by image to bound the memory."""

from typing import Any

import torch
from torch import Tensor

from pliant.testing.running import Gradients, run

# Arguments without a batch axis; the gradients of all images add up.
PARAMETERS = {"deform_conv2d": ("weight", "bias")}


def exact(operator: str, inputs: dict[str, Any], grad_output: Tensor) -> tuple[Tensor, Gradients]:
    """Result and gradients of `operator`, as `run` returns them, in float64."""
    shared = PARAMETERS.get(operator, ())
    double = {
        name: x.double()
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    outs: list[Tensor] = []
    grads: dict[str, list[Tensor]] = {}
    for n in range(len(grad_output)):
        image = {name: x if name in shared else x[n : n + 1] for name, x in double.items()}
        grad = grad_output[n : n + 1].double()
        out, by_name = run(operator, {**inputs, **image}, "reference", grad_output=grad)
        outs.append(out)
        for name, gradient in by_name.items():
            grads.setdefault(name, []).append(gradient)
    return torch.cat(outs), {
        name: torch.stack(parts).sum(0) if name in shared else torch.cat(parts)
        for name, parts in grads.items()
    }
