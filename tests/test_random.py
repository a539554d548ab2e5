"""Random legal problems, compared with the loops: sizes, layouts, dtypes and positions together."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pliant.testing import DIFFERENTIABLE, POSITIONS, impls, verify
from pliant.testing.cases import (
    aggregation,
    attention,
    columns,
    convolution,
    expanded,
    gaps,
    geometric,
    strided,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
MAPS = st.tuples(st.integers(0, 5), st.integers(0, 5))
FEW, SOME, CHANNELS = st.integers(0, 2), st.integers(0, 4), st.integers(0, 9)
LAYOUTS = st.sampled_from([lambda tensor: tensor, strided, expanded])


@st.composite
def problems(draw, operator):
    """The arguments of one call."""
    if operator in ("multi_scale_deformable_attn", "geometric_kernel_attention"):
        make = attention if operator.startswith("multi") else geometric
        inputs = make(
            batch=draw(FEW), levels=draw(st.lists(MAPS, max_size=3)), queries=draw(SOME),
            heads=draw(FEW), channels=draw(CHANNELS), points=draw(SOME),
        )  # fmt: skip
    elif operator == "deformable_aggregation":
        groups, scales = draw(st.integers(1, 3)), draw(FEW)
        cameras = draw(st.lists(st.lists(MAPS, min_size=scales, max_size=scales), max_size=3))
        inputs = aggregation(
            batch=draw(FEW), cameras=cameras, anchors=draw(SOME), points=draw(SOME),
            channels=groups * draw(FEW), groups=groups,
        )  # fmt: skip
    else:
        inputs = draw(convolutions())
        inputs = columns(inputs) if operator == "deform_columns" else inputs
    made = inputs(draw(DTYPES), DEVICE, draw(st.integers(0, 2**16)))
    places(made, operator, draw(st.sampled_from(["between", "on pixels", "wild"])))
    for name in DIFFERENTIABLE[operator]:
        if made.get(name) is not None:
            made[name] = draw(LAYOUTS)(made[name])
    if operator not in ("deform_conv2d", "deform_columns"):
        positions = POSITIONS[operator]
        made[positions] = made[positions].to(draw(DTYPES))
        weight = list(made)[4]
        made[weight] = made[weight].to(draw(DTYPES))
        if draw(st.booleans()):
            gaps(made)
    return made


@st.composite
def convolutions(draw):
    groups, deformable_groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 4), (3, 2)]))
    channels = {1: 1, 2: 2, 4: 4, 3: 6}[max(groups, deformable_groups)] * draw(st.integers(1, 2))
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    # Large enough for one output at least.
    size = tuple(
        d * (k - 1) + 1 + draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True)
    )
    return convolution(
        batch=draw(FEW), channels=channels, size=size, out_channels=groups * draw(FEW),
        kernel=kernel, stride=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        padding=draw(st.tuples(FEW, FEW)), dilation=dilation, groups=groups,
        deformable_groups=deformable_groups, bias=draw(st.booleans()), mask=draw(st.booleans()),
    )  # fmt: skip


def places(inputs, operator, kind):
    """Positions between pixels as they are, on pixels and borders, or anything a float can be."""
    positions = inputs[POSITIONS[operator]]
    generator = torch.Generator().manual_seed(0)
    if kind == "on pixels":
        step = 0.125 if operator.startswith(("multi", "deformable")) else 1.0
        inputs[POSITIONS[operator]] = (positions / step).round() * step
    elif kind == "wild":
        numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, 0, -0.0, 1, -1, 6e4, -6e4, 0.5])
        chosen = torch.randint(len(numbers), positions.shape, generator=generator)
        mixed = torch.rand(positions.shape, generator=generator) < 0.3
        wild = numbers[chosen].to(positions)
        inputs[POSITIONS[operator]] = torch.where(mixed.to(positions.device), wild, positions)


@pytest.mark.parametrize("impl", impls(DEVICE))
@pytest.mark.parametrize(
    "operator",
    ["multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention",
     "deform_conv2d", "deform_columns"],
)  # fmt: skip
@settings(max_examples=80)
@given(data=st.data())
def test_random_problem(operator, impl, data):
    verify(operator, data.draw(problems(operator)), impl)
