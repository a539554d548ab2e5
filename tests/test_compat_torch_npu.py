"""The vendor's torch_npu: its deformable convolution against a formula, its layer, its device."""

from typing import Any

import pytest
import torch
from torch import Tensor

import pliant
from pliant.compat import torch_npu
from pliant.compat.torch_npu import contrib, npu
from pliant.compat.torch_npu.contrib.module import DCNv2, ModulatedDeformConv
from pliant.sampling import ops

SETTINGS = {"stride": [1, 1, 2, 1], "padding": [1, 2, 0, 1], "dilation": [1, 1, 2, 1]}
GROUPS = {"groups": 2, "deformable_groups": 3}
OUT = (3, 5)  # by the offset alone


def tensors(modulated: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """input, weight, offset, bias: 2 groups, 3 deformable groups, a 3x2 kernel."""
    blocks = 3 if modulated else 2
    sizes = ((2, 12, 6, 5), (4, 6, 3, 2), (2, blocks * 3 * 6, *OUT), (4,))
    return tuple(torch.randn(size, dtype=dtype).requires_grad_() for size in sizes)


def formula(
    x: Tensor, weight: Tensor, offset: Tensor, bias: Tensor | None, modulated: bool
) -> tuple[Tensor, Tensor]:
    """Output and columns, tap by tap, with dense hat weights: no floor, no corner, no gather."""
    (n, c, h, w), (co, per_group, kh, kw), (ho, wo) = x.shape, weight.shape, offset.shape[2:]
    (sh, sw), (dh, dw) = SETTINGS["stride"][2:], SETTINGS["dilation"][2:]
    top, _, left, _ = SETTINGS["padding"]
    dg, groups = GROUPS["deformable_groups"], GROUPS["groups"]
    blocks = offset.reshape(n, -1, dg, kh, kw, ho, wo)
    mask = blocks[:, 2] if modulated else torch.ones_like(blocks[:, 0])

    def hat(position: Tensor, size: int) -> Tensor:
        return (1 - (position[..., None] - torch.arange(size)).abs()).clamp(min=0)

    columns = x.new_zeros(n, c, ho * kh, wo * kw)
    output = (
        x.new_zeros(n, co, ho, wo) if bias is None else bias[:, None, None].expand(n, co, ho, wo)
    )
    for ky in range(kh):
        for kx in range(kw):
            py = torch.arange(ho)[:, None] * sh - top + ky * dh + blocks[:, 1, :, ky, kx]
            px = torch.arange(wo)[None, :] * sw - left + kx * dw + blocks[:, 0, :, ky, kx]
            read = torch.einsum(
                "ngcij,ngyxi,ngyxj->ngcyx", x.reshape(n, dg, -1, h, w), hat(py, h), hat(px, w)
            )
            tap = (read * mask[:, :, None, ky, kx]).reshape(n, c, ho, wo)
            columns = columns.clone()
            columns[:, :, ky::kh, kx::kw] = tap
            output = output + torch.einsum(
                "ngiyx,goi->ngoyx",
                tap.reshape(n, groups, per_group, ho, wo),
                weight[:, :, ky, kx].reshape(groups, -1, per_group),
            ).reshape(n, co, ho, wo)
    return output, columns


def convolve(*args: Any, **change: Any) -> tuple[Tensor, Tensor]:
    return torch_npu.npu_deformable_conv2d(
        *args, **{"kernel_size": [3, 2], **SETTINGS, **GROUPS, **change}
    )


@pytest.mark.parametrize("modulated", [True, False], ids=["mask", "no-mask"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("at_output", "at_columns"),
    [(1.0, 0.0), (0.0, 1.0), (1.0, 1.0)],
    ids=["output", "columns", "both"],
)
def test_against_the_formula(
    modulated: bool, with_bias: bool, at_output: float, at_columns: float, device: str
) -> None:
    x, weight, offset, bias = tensors(modulated)
    args = (x, weight, offset, bias if with_bias else None)
    wanted = [a for a in args if a is not None]
    with ops.record() as calls:  # copies are differentiated, too
        got = convolve(*(a if a is None else a.to(device) for a in args), modulated=modulated)
    assert [operator for operator, _ in calls] == ["deform_columns", "deform_conv"]
    assert device == "cpu" or {backend for _, backend in calls} == {"triton"}
    expected = formula(*args, modulated)
    incoming = [
        torch.randn_like(r) * f for r, f in zip(expected, (at_output, at_columns), strict=True)
    ]
    for g, e in zip(got, expected, strict=True):
        assert g.device.type == device
        torch.testing.assert_close(g.cpu(), e, rtol=1e-12, atol=1e-12)
    got_grads = torch.autograd.grad(got, wanted, [i.to(device) for i in incoming])
    for g, e in zip(got_grads, torch.autograd.grad(expected, wanted, incoming), strict=True):
        torch.testing.assert_close(g, e, rtol=1e-11, atol=1e-11)


def test_a_gradient_at_the_columns_alone_counts() -> None:
    x, weight, offset, _ = tensors()
    _, columns = convolve(x, weight, offset, None)
    columns.sum().backward()
    assert x.grad.abs().sum() > 0
    assert offset.grad.abs().sum() > 0
    assert weight.grad is None


@pytest.mark.parametrize("modulated", [True, False], ids=["mask", "no-mask"])
def test_conv2dbk_is_the_gradient(modulated: bool) -> None:
    x, weight, offset, bias = tensors(modulated)
    output, columns = convolve(x, weight, offset, bias, modulated=modulated)
    incoming = torch.randn_like(output)
    expected = torch.autograd.grad(output, (x, weight, offset, bias), incoming)
    got = torch_npu.npu_deformable_conv2dbk(
        x.detach(), incoming, columns.detach(), weight.detach(), offset.detach(),
        kernel_size=[3, 2], **SETTINGS, **GROUPS, modulated=modulated,
    )  # fmt: skip
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


def test_conv2dbk_serves_in_any_mode() -> None:
    x, weight, offset, bias = (t.detach() for t in tensors())
    output, columns = convolve(x, weight, offset, bias)
    settings = {"kernel_size": [3, 2], **SETTINGS, **GROUPS}

    def gradients(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch_npu.npu_deformable_conv2dbk(x, grad, columns, weight, offset, **settings)

    expected = gradients(output)
    with torch.inference_mode():
        assert all(map(torch.equal, gradients(output), expected))
    mapped = torch.func.vmap(gradients)(torch.stack([output, 2 * output]))
    for got, once in zip(mapped, expected, strict=True):
        torch.testing.assert_close(got, torch.stack([once, 2 * once]), rtol=1e-12, atol=1e-12)
    with pytest.raises(TypeError, match=r"offset must have one of the dtypes .* got int64$"):
        torch_npu.npu_deformable_conv2dbk(x, output, columns, weight, offset.long(), **settings)


def test_blocks_are_the_interleaved_layout_rearranged() -> None:
    kernel, dg = 6, 3
    x, weight, _, bias = (t.detach() for t in tensors())
    off = torch.randn(2, 2 * dg * kernel, 3, 4, dtype=torch.float64)
    mask = torch.rand(2, dg * kernel, 3, 4, dtype=torch.float64)
    blocks = torch.empty(2, 3 * dg * kernel, 3, 4, dtype=torch.float64)
    for g in range(dg):
        for k in range(kernel):
            blocks[:, g * kernel + k] = off[:, g * 2 * kernel + 2 * k + 1]  # x
            blocks[:, dg * kernel + g * kernel + k] = off[:, g * 2 * kernel + 2 * k]  # y
            blocks[:, 2 * dg * kernel + g * kernel + k] = mask[:, g * kernel + k]
    output, columns = convolve(
        x, weight, blocks, bias, stride=[1, 1, 2, 1], padding=[1, 1, 0, 0], dilation=[1, 1, 1, 1]
    )
    settings = {"stride": (2, 1), "padding": (1, 0)}
    expected = pliant.deform_conv2d(x, off, weight, bias, mask=mask, **settings)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(columns, pliant.deform_columns(x, off, (3, 2), mask=mask, **settings))


def test_the_documented_call() -> None:
    x, weight, offset = torch.rand(2, 8, 32, 32), torch.rand(4, 8, 5, 5), torch.rand(2, 75, 32, 32)
    output, columns = torch_npu.npu_deformable_conv2d(
        x, weight, offset, None, kernel_size=[5, 5], stride=[1, 1, 1, 1], padding=[2, 2, 2, 2]
    )
    assert output.shape == (2, 4, 32, 32)
    assert columns.shape == (2, 8, 160, 160)


def test_bottom_and_right_padding_change_nothing() -> None:
    x, weight, offset, bias = tensors()
    expected = convolve(x, weight, offset, bias)
    for got, e in zip(
        convolve(x, weight, offset, bias, padding=[1, 9, 0, 7]), expected, strict=True
    ):
        assert torch.equal(got, e)


def test_documented_keywords() -> None:
    x, weight, offset, bias = (t.detach() for t in tensors())
    output, columns = convolve(x, weight, offset, bias)
    settings = {**SETTINGS, **GROUPS, "kernel_size": (3, 2)}
    settings["dilations"] = settings.pop("dilation")
    got = torch_npu.npu_deformable_conv2d(
        self=x, weight=weight, offset=offset, bias=bias, **settings
    )
    assert torch.equal(got[0], output)
    back = torch_npu.npu_deformable_conv2dbk(
        self=x, grad_output=output, offset_out=columns, weight=weight, offset=offset, **settings
    )
    assert [b.shape for b in back] == [t.shape for t in (x, weight, offset, bias)]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'bias'"):
        torch_npu.npu_deformable_conv2d(input=x, weight=weight, offset=offset, **settings)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "stride-length": (
        {"stride": [2, 1]},
        TypeError,
        "stride must be four ints [1, 1, height, width], got [2, 1]",
    ),
    "stride-not-a-list": (
        {"stride": 1},
        TypeError,
        "stride must be four ints [1, 1, height, width], got 1",
    ),
    "stride-nhwc": (
        {"stride": [1, 2, 1, 1]},
        ValueError,
        "stride must be [1, 1, height, width], got [1, 2, 1, 1]",
    ),
    "stride-zero": (
        {"stride": [1, 1, 0, 1]},
        ValueError,
        "stride must be at least 1, got [1, 1, 0, 1]",
    ),
    "dilation-batch": (
        {"dilation": [2, 1, 1, 1]},
        ValueError,
        "dilation must be [1, 1, height, width], got [2, 1, 1, 1]",
    ),
    "dilation-float": (
        {"dilation": [1, 1, 1.0, 1]},
        TypeError,
        "dilation must be four ints [1, 1, height, width], got [1, 1, 1.0, 1]",
    ),
    "padding-length": (
        {"padding": [1, 1]},
        TypeError,
        "padding must be four ints [top, bottom, left, right], got [1, 1]",
    ),
    "padding-negative": (
        {"padding": [1, 1, -1, 0]},
        ValueError,
        "padding must be at least 0, got [1, 1, -1, 0]",
    ),
    "padding-large": (
        {"padding": [1, 1, 2**63, 0]},
        ValueError,
        f"padding must be below 2**29, got [1, 1, {2**63}, 0]",
    ),
    "kernel-length": (
        {"kernel_size": [3, 2, 1]},
        TypeError,
        "kernel_size must be an int or two ints (height, width), got [3, 2, 1]",
    ),
    "kernel-swapped": (
        {"kernel_size": [2, 3]},
        ValueError,
        "kernel_size must be that of weight, [3, 2], got [2, 3]",
    ),
    "groups": (
        {"groups": 5},
        ValueError,
        "groups must divide the channels C of input = 12, got 5",
    ),
    "groups-of-weight": (
        {"groups": 3},
        ValueError,
        "weight must have shape [Co, C/groups, kh, kw] = [Co, 4, kh, kw], got [4, 6, 3, 2]",
    ),
    "groups-of-output": (
        {"weight": torch.zeros(5, 6, 3, 2, dtype=torch.float64)},
        ValueError,
        "groups must divide the output channels Co of weight = 5, got 2",
    ),
    "deformable-groups": (
        {"deformable_groups": 5},
        ValueError,
        "deformable_groups must divide the channels C of input = 12, got 5",
    ),
    "offset-channels": (
        {"deformable_groups": 2},
        ValueError,
        "offset must have shape [N, 3*dg*kh*kw, Ho, Wo] = [2, 36, Ho, Wo], got [2, 54, 3, 5]",
    ),
    "offset-modulated": (
        {"modulated": False},
        ValueError,
        "offset must have shape [N, 2*dg*kh*kw, Ho, Wo] = [2, 36, Ho, Wo], got [2, 54, 3, 5]",
    ),
    "input-rank": (
        {"input": torch.zeros(12, 6, 5)},
        ValueError,
        "input must have shape [N, C, H, W], got [12, 6, 5]",
    ),
    "weight-kind": (
        {"weight": [1.0]},
        TypeError,
        "weight must be a torch.Tensor, got list",
    ),
    "weight-dtype": (
        {"weight": torch.zeros(4, 6, 3, 2)},
        TypeError,
        "weight must have the dtype of input, float64, got float32",
    ),
    "weight-device": (
        {"weight": torch.zeros(4, 6, 3, 2, dtype=torch.float64, device="meta")},
        ValueError,
        "weight must be on the device of input, cpu, got meta",
    ),
    "bias": (
        {"bias": torch.zeros(3, dtype=torch.float64)},
        ValueError,
        "bias must have shape [Co] = [4], got [3]",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(change: dict[str, Any], error: type[Exception], message: str) -> None:
    names = ("input", "weight", "offset", "bias")
    args = {**dict(zip(names, tensors(), strict=True)), **change}
    with pytest.raises(error) as raised:
        convolve(**args)
    assert str(raised.value) == f"npu_deformable_conv2d: {message}"


BAD_BACKWARD: dict[str, tuple[dict[str, Any], str]] = {
    "columns": (
        {"columns": torch.zeros(2, 12, 9, 9, dtype=torch.float64)},
        "columns must have shape [N, C, Ho*kh, Wo*kw] = [2, 12, 9, 10], got [2, 12, 9, 9]",
    ),
    "grad-output": (
        {"grad_output": torch.zeros(2, 4, 3, 4, dtype=torch.float64)},
        "grad_output must have shape [N, Co, Ho, Wo] = [2, 4, 3, 5], got [2, 4, 3, 4]",
    ),
    "stride": (
        {"stride": [2, 1, 1, 1]},
        "stride must be [1, 1, height, width], got [2, 1, 1, 1]",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_BACKWARD.values(), ids=BAD_BACKWARD)
def test_bad_input_of_the_gradient(change: dict[str, Any], message: str) -> None:
    x, weight, offset, bias = tensors()
    output, columns = convolve(x, weight, offset, bias)
    args = {
        "input": x,
        "grad_output": output,
        "columns": columns,
        "weight": weight,
        "offset": offset,
    }
    with pytest.raises(ValueError) as raised:  # noqa: PT011  compared whole below
        torch_npu.npu_deformable_conv2dbk(
            **{**args, "kernel_size": [3, 2], **SETTINGS, **GROUPS, **change}
        )
    assert str(raised.value) == f"npu_deformable_conv2dbk: {message}"


def test_autocast_runs_the_convolution_in_its_dtype() -> None:
    x, weight, offset, bias = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output, columns = convolve(x, weight, offset, bias)
    assert (output.dtype, columns.dtype) == (torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="dtype of input"):
        convolve(x, weight.double(), offset, bias)


def test_compiles() -> None:
    args = tensors()
    compiled = torch.compile(convolve, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*args), convolve(*args), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


# The layer


def test_layer_starts_as_half_a_convolution() -> None:
    """Zero offsets, and a mask of sigmoid(0)."""
    layer = DCNv2(6, 4, 3, 2, 1, 1, 2, 3).double()
    x = torch.randn(2, 6, 7, 8, dtype=torch.float64)
    expected = torch.conv2d(x, layer.weight / 2, layer.bias, stride=2, padding=1, groups=2)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_layer_predicts_offsets_then_mask() -> None:
    layer = ModulatedDeformConv(6, 4, (3, 2), (2, 1), (1, 0), (2, 1), deform_groups=3).double()
    torch.nn.init.normal_(layer.conv_offset.weight)
    torch.nn.init.normal_(layer.conv_offset.bias)
    x = torch.randn(2, 6, 9, 8, dtype=torch.float64)
    predicted = torch.conv2d(
        x, layer.conv_offset.weight, layer.conv_offset.bias, (2, 1), (1, 0), (2, 1)
    )
    offset, mask = predicted[:, :36], predicted[:, 36:].sigmoid()
    expected = pliant.deform_conv2d(
        x, offset, layer.weight, layer.bias, (2, 1), (1, 0), (2, 1), mask
    )
    assert torch.equal(layer(x), expected)
    bare = ModulatedDeformConv(
        6, 4, (3, 2), (2, 1), (1, 0), (2, 1), deformable_groups=3, pack=False
    ).double()
    bare.load_state_dict({k: v for k, v in layer.state_dict().items() if "offset" not in k})
    assert torch.equal(bare((x, offset, mask)), expected)


def test_layer_state() -> None:
    assert DCNv2 is ModulatedDeformConv
    assert contrib.DCNv2 is DCNv2
    names = {"weight", "bias", "conv_offset.weight", "conv_offset.bias"}
    layer = DCNv2(8, 4, 3, deformable_groups=2)
    assert set(layer.state_dict()) == names
    assert layer.conv_offset.weight.shape == (54, 8, 3, 3)
    assert set(DCNv2(8, 4, 3, bias=False, pack=False).state_dict()) == {"weight"}
    bound = (8 * 9) ** -0.5
    assert bound * 0.8 < layer.weight.abs().max() <= bound
    assert not any(p.any() for n, p in layer.named_parameters() if n != "weight")


def test_layer_groups_must_divide() -> None:
    with pytest.raises(
        ValueError, match=r"^ModulatedDeformConv: groups must divide in_channels = 8, got 3$"
    ):
        DCNv2(8, 4, 3, groups=3)


# The device


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU stands in")
def test_the_cpu_answers_as_npu() -> None:
    assert npu.is_available()
    assert (npu.device_count(), npu.current_device(), npu.get_device_name()) == (1, 0, "CPU")
    npu.set_device(0)
    npu.set_device("npu:0")
    npu.synchronize()
    for spelling in (None, 0, "npu", "npu:1", torch.device("cpu")):
        assert npu.standin(spelling) == torch.device("cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the GPU stands in")
def test_the_gpu_answers_as_npu() -> None:
    assert npu.is_available()
    assert npu.device_count() == torch.cuda.device_count()
    assert npu.current_device() == torch.cuda.current_device()
    assert npu.get_device_name("npu:0") == npu.get_device_name(0) == torch.cuda.get_device_name(0)
    npu.set_device("npu:0")
    npu.synchronize()
    assert npu.standin() == npu.standin("npu") == torch.device("cuda")
    assert npu.standin(0) == npu.standin("npu:0") == torch.device("cuda:0")


@pytest.mark.parametrize("count", [0, 2])
def test_the_gpus_are_asked(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers come from torch.cuda wherever it has a device."""
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU at {device}")
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(
            torch.cuda, name, lambda device, name=name: asked.append((name, str(device)))
        )
    npu.set_device("npu:1")
    npu.synchronize()
    answers = (npu.device_count(), npu.current_device(), npu.get_device_name(1))
    assert answers == ((2, 1, "GPU at cuda:1") if count else (1, 0, "CPU"))
    assert asked == ([("set_device", "cuda:1"), ("synchronize", "cuda")] if count else [])
    assert str(npu.standin(torch.device("cuda:1"))) == ("cuda:1" if count else "cpu")
