"""Sampling points over the feature maps that they read (needs matplotlib, the extra `plot`).

One function an operator. Each takes the axes to draw on and the operator's own arguments, and shows
image 0. Features appear as the norm over their channels, with pixel centres on whole numbers, so
that a position in pixels is drawn where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, PAPER, FEATURES = "#e8ecf4", "#10131c", "bone"
COLOURS = (
    "#ffd166", "#ff6b8b", "#4dd6c1", "#7aa2ff", "#c792ea",
    "#ff9f5a", "#a5e06f", "#f2a7c3", "#5fd0ff", "#e0c097",
)  # fmt: skip


def attention(
    axes: Axes,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level: int = 0,
    queries: Sequence[int] | None = None,
) -> None:
    """What `multi_scale_deformable_attn` reads of a level: a colour a head, area by weight."""
    size = _map(axes, value[0].flatten(1), spatial_shapes[level], level_start_index[level])
    chosen = range(sampling_locations.shape[1]) if queries is None else queries
    points = _pixels(sampling_locations[0, list(chosen), :, level], size)  # [q, H, P, 2]
    weights = attention_weights[0, list(chosen), :, level]
    middle = points.mean((1, 2), keepdim=True).expand_as(points)
    for head in range(points.shape[1]):
        spokes = torch.stack([middle[:, head], points[:, head]], 2).flatten(0, 1)
        _lines(axes, spokes, head, width=0.5, alpha=0.5)
        _points(axes, points[:, head].flatten(0, 1), weights[:, head], head)
    _frame(axes, size)


def aggregation(
    axes: Axes,
    feature_maps: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sample_locations: Tensor,
    weight: Tensor,
    *,
    camera: int = 0,
    scale: int = 0,
) -> None:
    """What `deformable_aggregation` reads of a map: a colour an anchor; crosses do not count."""
    which = (camera, scale)
    size = _map(axes, feature_maps[0], spatial_shape[which], scale_start_index[which])
    for anchor in range(sample_locations.shape[1]):
        unit = sample_locations[0, anchor, :, camera].detach().cpu()  # [P, 2]
        strength = weight[0, anchor, :, camera, scale].detach().cpu().norm(dim=1)
        counts = ((unit > 0) & (unit < 1)).all(1)
        _points(axes, _pixels(unit[counts], size), strength[counts], anchor, area=6, edge=0)
        x, y = _pixels(unit[~counts], size).T
        axes.scatter(x, y, s=10, marker="x", linewidths=0.5, color=INK, alpha=0.4)
    _frame(axes, size, margin=0.06)


def geometric(
    axes: Axes,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    level: int = 0,
    head: int = 0,
    queries: Sequence[int] = range(12),
) -> None:
    """What `geometric_kernel_attention` reads: each position, and the one pixel it becomes."""
    from matplotlib.patches import Rectangle

    size = _map(axes, value[0].flatten(1), spatial_shapes[level], level_start_index[level])
    for number, query in enumerate(queries):
        points = sampling_locations[0, query, head, level].detach().float().cpu()  # [P, 2]
        pixels = points.trunc().clamp(min=0).minimum(torch.tensor([size[1] - 1, size[0] - 1]))
        _lines(axes, torch.stack([points, pixels], 1), number)
        for x, y in (pixels - 0.5).tolist():
            colour = _colour(number)
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, edgecolor=colour, linewidth=1.3))
        _points(axes, points, attention_weights[0, query, head, level], number)
    _frame(axes, size)


def convolution(
    axes: Axes,
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    mask: Tensor | None = None,
    *,
    outputs: Sequence[tuple[int, int]] | None = None,
) -> None:
    """What `deform_conv2d` reads for some outputs (y, x): windows (dotted), moved by offsets."""
    size = (input.shape[2], input.shape[3])
    _map(axes, input[0].flatten(1).T, torch.tensor(size), torch.tensor(0))
    kernel, (rows, columns) = weight.shape[2:], offset.shape[2:]
    count = kernel.numel()
    if outputs is None:  # the middle, and between it and the corners
        near, far = (0.2, 0.78)
        spots = ((near, near), (near, far), (0.5, 0.48), (far, near), (far, far))
        outputs = [(int(y * rows), int(x * columns)) for y, x in spots]
    taps = torch.cartesian_prod(torch.arange(kernel[1]), torch.arange(kernel[0]))  # (x, y)
    taps = taps.view(kernel[1], kernel[0], 2).transpose(0, 1) * dilation - padding
    for number, (y, x) in enumerate(outputs):
        window = (taps + torch.tensor([x, y]) * stride).float()  # [kh, kw, 2]
        shift = offset[0, : 2 * count, y, x].detach().float().cpu().view(*kernel, 2).flip(-1)
        moved = window + shift
        for grid, style, alpha in ((window, "dotted", 0.55), (moved, "solid", 0.9)):
            _lines(axes, grid, number, style=style, alpha=alpha)
            _lines(axes, grid.transpose(0, 1), number, style=style, alpha=alpha)
        strength = torch.ones(count) if mask is None else mask[0, :count, y, x]
        _points(axes, moved.flatten(0, 1), strength, number)
    _frame(axes, size)


def figure(
    title: str,
    mosaic: Sequence[Sequence[str]],
    size: tuple[float, float],
    widths: Sequence[float] | None = None,
) -> tuple[Figure, dict[str, Axes]]:
    """An empty figure in the style of these pictures, and its axes by their names in `mosaic`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)
    canvas = Figure(figsize=size, facecolor=PAPER, layout=layout)
    canvas.suptitle(title, color=INK, fontsize=18, fontweight="bold")
    rows: list[Any] = [list(row) for row in mosaic]
    return canvas, canvas.subplot_mosaic(rows, width_ratios=widths)


def label(axes: Axes, title: str, note: str) -> None:
    """A title over the axes and, smaller, what is to be seen in them."""
    bold = {"color": INK, "fontsize": 12.5, "fontweight": "bold", "family": "monospace"}
    axes.set_title(title, bold, loc="left", pad=22)
    at = axes.transAxes
    text = axes.text(0, 1.015, note, transform=at, color=INK, alpha=0.75, fontsize=9.5)
    text.set_in_layout(False)


def save(canvas: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=150, facecolor=PAPER)


def _map(axes: Axes, features: Tensor, shape: Tensor, start: Tensor) -> tuple[int, int]:
    """Draw the norms of one map of `features` [S, C]; its size (height, width)."""
    height, width = shape.tolist()
    norms = features[int(start) :][: height * width].detach().float().norm(dim=1).cpu()
    low, high = torch.quantile(norms, torch.tensor([0.01, 0.995])).tolist()
    image = norms.view(height, width).numpy()
    axes.imshow(image, cmap=FEATURES, vmin=low, vmax=1.5 * high, interpolation="nearest")
    return height, width


def _pixels(unit: Tensor, size: tuple[int, int]) -> Tensor:
    """Unit frame to pixels, as the operators do it."""
    return unit.detach().float().cpu() * torch.tensor([size[1], size[0]]) - 0.5


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _points(
    axes: Axes, points: Tensor, weight: Tensor, number: int, area: float = 34, edge: float = 0.5
) -> None:
    """`points` [n, 2] with areas by `weight` (n values)."""
    weight = weight.detach().float().cpu().flatten()
    strength = weight / weight.max().clamp(min=1e-12) if len(weight) else weight
    x, y = points.T
    look: dict[str, Any] = {"color": _colour(number), "edgecolors": PAPER, "linewidths": edge}
    axes.scatter(x, y, s=area * (0.15 + strength), alpha=0.85, zorder=3, **look)


def _lines(
    axes: Axes,
    lines: Tensor,
    number: int,
    width: float = 0.9,
    style: str = "solid",
    alpha: float = 1,
) -> None:
    """`lines` [n, points, 2] in one colour."""
    from matplotlib.collections import LineCollection

    look: dict[str, Any] = {"colors": _colour(number), "linewidths": width, "linestyles": style}
    axes.add_collection(LineCollection(list(lines.numpy()), alpha=alpha, **look))


def _frame(axes: Axes, size: tuple[int, int], margin: float = 0.04) -> None:
    from matplotlib.patches import Rectangle

    height, width = size
    border: dict[str, Any] = {"fill": False, "edgecolor": INK, "linewidth": 0.8, "alpha": 0.6}
    axes.add_patch(Rectangle((-0.5, -0.5), width, height, **border))
    room = margin * math.sqrt(height * width)
    axes.set_xlim(-0.5 - room, width - 0.5 + room)
    axes.set_ylim(height - 0.5 + room, -0.5 - room)
    axes.set_aspect("equal")
    axes.set_axis_off()
