"""Pictures show positions where the operators read."""

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.patches import Rectangle

from pliant import plot
from pliant.testing import timing


@pytest.fixture
def axes() -> Axes:
    return plot.figure("title", [["only"]], (4, 4))[1]["only"]


def drawn(axes: Axes) -> list[torch.Tensor]:
    """The points of each scatter, [n, 2]."""
    scatters = [c for c in axes.collections if isinstance(c, PathCollection)]
    return [torch.as_tensor(c.get_offsets().filled(torch.nan)).float() for c in scatters]


def test_attention_is_drawn_in_pixels_of_its_level(axes: Axes) -> None:
    # Level 1, 2x4 pixels from row 3: the middle of the map is between its pixels.
    value = torch.arange(11.0).view(1, 11, 1, 1)
    locations = (
        torch.tensor([[0.5, 0.5], [0.125, 0.25]]).view(1, 1, 1, 1, 2, 2).expand(1, 1, 1, 2, 2, 2)
    )
    weights = torch.ones(1, 1, 1, 2, 2)
    shapes, starts = torch.tensor([[1, 3], [2, 4]]), torch.tensor([0, 3])
    plot.attention(axes, value, shapes, starts, locations, weights, level=1)
    assert drawn(axes)[0].tolist() == [[1.5, 0.5], [0.0, 0.0]]
    assert axes.images[0].get_array().tolist() == [[3, 4, 5, 6], [7, 8, 9, 10]]


def test_aggregation_crosses_out_what_does_not_count(axes: Axes) -> None:
    features = torch.ones(1, 8, 2)
    locations = torch.tensor([[0.5, 0.5], [1.0, 0.5], [0.5, -0.25]]).view(1, 1, 3, 1, 2)
    weight = torch.ones(1, 1, 3, 1, 1, 2)
    plot.aggregation(
        axes, features, torch.tensor([[[2, 4]]]), torch.tensor([[0]]), locations, weight
    )
    counted, crosses = drawn(axes)
    assert counted.tolist() == [[1.5, 0.5]]
    assert crosses.tolist() == [[3.5, 0.5], [1.5, -1.0]]


def test_geometric_marks_the_pixel_that_is_read(axes: Axes) -> None:
    value = torch.ones(1, 8, 1, 1)
    locations = torch.tensor([[2.9, 0.2], [-3.5, 9.0]]).view(1, 1, 1, 1, 2, 2)
    weights = torch.ones(1, 1, 1, 1, 2)
    maps = torch.tensor([[2, 4]]), torch.tensor([0])
    plot.geometric(axes, value, *maps, locations, weights, queries=[0])
    squares = [p.get_xy() for p in axes.patches if isinstance(p, Rectangle) and p.get_width() == 1]
    assert squares == [(1.5, -0.5), (-0.5, 0.5)]  # around the pixels (2, 0) and (0, 1)


def test_convolution_moves_its_window(axes: Axes) -> None:
    offset = torch.zeros(1, 12, 5, 5)
    offset[0, :4, 1, 2] = torch.tensor([0.25, 0.5, -1.0, 2.0])  # (y, x) of the first two taps
    weight = torch.ones(1, 1, 2, 3)
    plot.convolution(
        axes,
        torch.ones(1, 1, 5, 5),
        offset,
        weight,
        None,
        2,
        1,
        1,
        torch.ones(1, 6, 5, 5),
        outputs=[(1, 2)],
    )
    # Output (1, 2) starts at (y, x) = (1, 3): stride 2, padding 1.
    assert drawn(axes)[0].tolist() == [
        [3.5, 1.25], [6.0, 0.0], [5.0, 1.0], [3.0, 2.0], [4.0, 2.0], [5.0, 2.0]
    ]  # fmt: skip


def test_candidates_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of the first takes 1 s and its backward 2 s; of the second, 10 and 20."""
    clock, turns = 0.0, []
    x = torch.ones((), requires_grad=True)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seconds):  # type: ignore[no-untyped-def]
            nonlocal clock
            ctx.seconds = seconds
            clock += seconds
            turns.append(seconds)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            nonlocal clock
            clock += 2 * ctx.seconds
            return grad, None

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    candidates = [lambda: Slow.apply(x, 1), lambda: Slow.apply(x, 10)]
    times = timing.in_turns(candidates, [x], torch.ones(()), rounds=2, seconds=100)
    assert times == [(1, 2), (10, 20)]
    # A round to warm up; five forwards of 11 s, and three backwards of 22 s, to reach 50 s each.
    assert turns == [1, 10] * (1 + 5 + 3)
