# ruff: noqa: E501  (messages stand here whole)
"""Bad input: each message by its whole text, and nothing is computed before it."""

import os
import subprocess
import sys
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

import pliant
from pliant.sampling import maps, ops

ATTN, GEO = "multi_scale_deformable_attn", "geometric_kernel_attention"
AGG, CONV, COLS = "deformable_aggregation", "deform_conv2d", "deform_columns"
DTYPES = "float32, float64, float16, bfloat16"


def attention(**changes: object) -> Callable[[], Tensor]:
    arguments = {
        "value": torch.rand(2, 26, 3, 4),
        "spatial_shapes": [(4, 5), (2, 3)],
        "level_start_index": [0, 20],
        "sampling_locations": torch.rand(2, 7, 3, 2, 5, 2),
        "attention_weights": torch.rand(2, 7, 3, 2, 5),
    }
    return lambda: pliant.multi_scale_deformable_attn(**{**arguments, **changes})


def geometric(**changes: object) -> Callable[[], Tensor]:
    arguments = {
        "value": torch.rand(2, 26, 3, 4),
        "spatial_shapes": [(4, 5), (2, 3)],
        "level_start_index": [0, 20],
        "sampling_locations": torch.rand(2, 7, 3, 2, 5, 2),
        "attention_weights": torch.rand(2, 7, 3, 2, 5),
    }
    return lambda: pliant.geometric_kernel_attention(**{**arguments, **changes})


def aggregation(**changes: object) -> Callable[[], Tensor]:
    arguments = {
        "feature_maps": torch.rand(2, 26, 12),
        "spatial_shape": [[(4, 5), (2, 3)]],
        "scale_start_index": [[0, 20]],
        "sample_locations": torch.rand(2, 7, 5, 1, 2),
        "weight": torch.rand(2, 7, 5, 1, 2, 4),
    }
    return lambda: pliant.deformable_aggregation(**{**arguments, **changes})


def convolution(**changes: object) -> Callable[[], Tensor]:
    arguments = {
        "input": torch.rand(2, 6, 5, 4),
        "offset": torch.rand(2, 36, 5, 5),
        "weight": torch.rand(4, 3, 3, 2),
        "bias": torch.rand(4),
        "padding": 1,
        "mask": torch.rand(2, 18, 5, 5),
    }
    return lambda: pliant.deform_conv2d(**{**arguments, **changes})


def columns(**changes: object) -> Callable[[], Tensor]:
    arguments = {
        "input": torch.rand(2, 6, 5, 4),
        "offset": torch.rand(2, 36, 5, 5),
        "kernel_size": (3, 2),
        "mask": torch.rand(2, 18, 5, 5),
    }
    return lambda: pliant.deform_columns(**{**arguments, **changes})


meta = {"device": "meta"}
CASES = {
    "rank": (
        attention(sampling_locations=torch.rand(2, 7, 3, 2, 2)),
        ValueError,
        f"{ATTN}: sampling_locations must have shape [B, Q, H, L, P, 2] = [2, 7, 3, 2, 5, 2] to fit value and attention_weights, got [2, 7, 3, 2, 2]",
    ),
    "value-rank": (
        attention(value=torch.rand(26, 3, 4)),
        ValueError,
        f"{ATTN}: value must have shape [B, S, H, D], got [26, 3, 4]",
    ),
    "heads-differ": (
        attention(attention_weights=torch.rand(2, 7, 4, 2, 5)),
        ValueError,
        f"{ATTN}: attention_weights must have shape [B, Q, H, L, P] = [2, Q, 3, L, P] to fit value, got [2, 7, 4, 2, 5]",
    ),
    "levels-differ": (
        attention(spatial_shapes=[(4, 5)], level_start_index=[0]),
        ValueError,
        f"{ATTN}: spatial_shapes must have L = 2 as sampling_locations has, got 1",
    ),
    "starts-differ": (
        attention(level_start_index=[0]),
        ValueError,
        f"{ATTN}: level_start_index must have shape [L] = [2], got [1]",
    ),
    "one-start": (
        attention(level_start_index=torch.tensor(0)),
        ValueError,
        f"{ATTN}: level_start_index must have shape [L] = [2], got []",
    ),
    "starts-nested": (
        attention(level_start_index=[[0, 20]]),
        ValueError,
        f"{ATTN}: level_start_index must have shape [L] = [2], got [1, 2]",
    ),
    "shapes-nested": (
        attention(spatial_shapes=numpy.array([[(4, 5), (2, 3)]])),
        ValueError,
        f"{ATTN}: spatial_shapes must have shape [L, 2], got [1, 2, 2]",
    ),
    "shapes-not-pairs": (
        attention(spatial_shapes=[(4, 5, 1), (2, 3, 1)]),
        ValueError,
        f"{ATTN}: spatial_shapes must have shape [L, 2], got [2, 3]",
    ),
    "shapes-ragged": (
        attention(spatial_shapes=[(4, 5), (2,)]),
        ValueError,
        f"{ATTN}: spatial_shapes must have rows of one length, got [(4, 5), (2,)]",
    ),
    "value-dtype": (
        attention(value=torch.ones(2, 26, 3, 4, dtype=torch.int64)),
        TypeError,
        f"{ATTN}: value must have one of the dtypes {DTYPES}, got int64",
    ),
    "locations-dtype": (
        attention(sampling_locations=torch.ones(2, 7, 3, 2, 5, 2, dtype=torch.int32)),
        TypeError,
        f"{ATTN}: sampling_locations must have one of the dtypes {DTYPES}, got int32",
    ),
    "weights-dtype": (
        attention(attention_weights=torch.ones(2, 7, 3, 2, 5, dtype=torch.bool)),
        TypeError,
        f"{ATTN}: attention_weights must have one of the dtypes {DTYPES}, got bool",
    ),
    "not-a-tensor": (
        attention(value=[1.0]),
        TypeError,
        f"{ATTN}: value must be a torch.Tensor, got list",
    ),
    "device": (
        attention(attention_weights=torch.rand(2, 7, 3, 2, 5, **meta)),
        ValueError,
        f"{ATTN}: attention_weights must be on the device of value, cpu, got meta",
    ),
    "shapes-float-tensor": (
        attention(spatial_shapes=torch.tensor([(4.0, 5.0), (2.0, 3.0)])),
        TypeError,
        f"{ATTN}: spatial_shapes must be int32 or int64, got float32",
    ),
    "shapes-float": (
        attention(spatial_shapes=[(4, 5), (2, 3.5)]),
        TypeError,
        f"{ATTN}: spatial_shapes must hold integers (an int32 or int64 tensor, or Python ints), got [(4, 5), (2, 3.5)]",
    ),
    "shapes-negative": (
        attention(spatial_shapes=torch.tensor([(4, 5), (-2, 3)])),
        ValueError,
        f"{ATTN}: spatial_shapes[1] must be (height, width) >= 0, got (-2, 3)",
    ),
    "starts-negative": (
        attention(level_start_index=torch.tensor([-1, 20])),
        ValueError,
        f"{ATTN}: level_start_index[0] must be >= 0, got -1",
    ),
    "overrun": (
        attention(level_start_index=torch.tensor([0, 21], dtype=torch.int32)),
        ValueError,
        f"{ATTN}: the map of spatial_shapes[1] = (2, 3) from row 21 on must end within the 26 rows of value, got 27",
    ),
    "overrun-without-starts": (
        attention(spatial_shapes=[(4, 5), (3, 3)], level_start_index=None),
        ValueError,
        f"{ATTN}: the map of spatial_shapes[1] = (3, 3) from row 20 on must end within the 26 rows of value, got 29",
    ),
    "impl": (
        attention(impl="cuda"),
        ValueError,
        f"{ATTN}: impl must be None, 'reference', 'cpu' or 'triton', got 'cuda'",
    ),
    "geometric-rank": (
        geometric(sampling_locations=torch.rand(2, 7, 3, 2, 5, 3)),
        ValueError,
        f"{GEO}: sampling_locations must have shape [B, Q, H, L, P, 2] = [2, 7, 3, 2, 5, 2] to fit value and attention_weights, got [2, 7, 3, 2, 5, 3]",
    ),
    "geometric-dtype": (
        geometric(sampling_locations=torch.ones(2, 7, 3, 2, 5, 2, dtype=torch.uint8)),
        TypeError,
        f"{GEO}: sampling_locations must have one of the dtypes {DTYPES}, int32, int64, got uint8",
    ),
    "aggregation-groups": (
        aggregation(weight=torch.rand(2, 7, 5, 1, 2, 5)),
        ValueError,
        f"{AGG}: the groups G of weight must divide the channels C of feature_maps = 12, got 5",
    ),
    "aggregation-no-groups": (
        aggregation(weight=torch.rand(2, 7, 5, 1, 2, 0)),
        ValueError,
        f"{AGG}: the groups G of weight must divide the channels C of feature_maps = 12, got 0",
    ),
    "aggregation-cameras": (
        aggregation(spatial_shape=[[(2, 3), (1, 1)]] * 2, scale_start_index=None),
        ValueError,
        f"{AGG}: spatial_shape must have cam = 1 as sample_locations has, got 2",
    ),
    "aggregation-scales": (
        aggregation(spatial_shape=[[(2, 3)]], scale_start_index=None),
        ValueError,
        f"{AGG}: spatial_shape must have scale = 2 as weight has, got 1",
    ),
    "aggregation-overrun": (
        aggregation(scale_start_index=[[0, 24]]),
        ValueError,
        f"{AGG}: the map of spatial_shape[0][1] = (2, 3) from row 24 on must end within the 26 rows of feature_maps, got 30",
    ),
    "aggregation-points": (
        aggregation(sample_locations=torch.rand(2, 7, 6, 1, 2)),
        ValueError,
        f"{AGG}: sample_locations must have shape [B, A, P, cam, 2] = [2, 7, 5, 1, 2] to fit feature_maps and weight, got [2, 7, 6, 1, 2]",
    ),
    "conv-offset-channels": (
        convolution(offset=torch.rand(2, 35, 5, 5)),
        ValueError,
        f"{CONV}: offset must have a multiple of 2 * kh * kw = 12 channels, got 35",
    ),
    "conv-offset-size": (
        convolution(offset=torch.rand(2, 36, 5, 4), mask=None),
        ValueError,
        f"{CONV}: offset must have the output's size [Ho, Wo] = [5, 5], got [5, 4]",
    ),
    "conv-mask": (
        convolution(mask=torch.rand(2, 12, 5, 5)),
        ValueError,
        f"{CONV}: mask must have shape [N, dg*kh*kw, Ho, Wo] = [2, 18, 5, 5], got [2, 12, 5, 5]",
    ),
    "conv-groups": (
        convolution(weight=torch.rand(4, 4, 3, 2)),
        ValueError,
        f"{CONV}: the channels C/groups of weight must divide the channels C of input = 6, got 4",
    ),
    "conv-output-groups": (
        convolution(weight=torch.rand(5, 3, 3, 2), bias=None),
        ValueError,
        f"{CONV}: the groups C / (C/groups) must divide the output channels Co of weight = 5, got 2",
    ),
    "conv-deformable-groups": (
        convolution(offset=torch.rand(2, 48, 5, 5), mask=None),
        ValueError,
        f"{CONV}: the deformable groups dg of offset must divide the channels C of input = 6, got 4",
    ),
    "conv-bias": (
        convolution(bias=torch.rand(3)),
        ValueError,
        f"{CONV}: bias must have shape [Co] = [4], got [3]",
    ),
    "conv-bias-number": (
        convolution(bias=1),
        TypeError,
        f"{CONV}: bias must be a torch.Tensor or None, got int",
    ),
    "columns-mask-number": (
        columns(mask=1.0),
        TypeError,
        f"{COLS}: mask must be a torch.Tensor or None, got float",
    ),
    "conv-weight-dtype": (
        convolution(weight=torch.rand(4, 3, 3, 2, dtype=torch.float64)),
        TypeError,
        f"{CONV}: weight must have the dtype of input, float32, got float64",
    ),
    "conv-stride": (
        convolution(stride=0),
        ValueError,
        f"{CONV}: stride must be at least 1, got 0",
    ),
    "conv-padding": (
        convolution(padding=(1, -1)),
        ValueError,
        f"{CONV}: padding must be at least 0, got (1, -1)",
    ),
    "conv-padding-large": (
        convolution(padding=2**63),
        ValueError,
        f"{CONV}: padding must be below 2**29, got {2**63}",
    ),
    "conv-dilation": (
        convolution(dilation=1.5),
        TypeError,
        f"{CONV}: dilation must be an int or two ints (height, width), got 1.5",
    ),
    "conv-rank": (
        convolution(input=torch.rand(6, 5, 4)),
        ValueError,
        f"{CONV}: input must have shape [N, C, H, W], got [6, 5, 4]",
    ),
    "columns-offset": (
        columns(offset=torch.rand(3, 36, 5, 5)),
        ValueError,
        f"{COLS}: offset must have shape [N, 2*dg*kh*kw, Ho, Wo] = [2, 2*dg*kh*kw, Ho, Wo], got [3, 36, 5, 5]",
    ),
    "columns-kernel-tensor": (
        columns(kernel_size=torch.rand(4, 3, 3, 2)),
        TypeError,
        f"{COLS}: kernel_size must be an int or two ints (height, width), got a tensor [4, 3, 3, 2]",
    ),
    "columns-kernel": (
        columns(kernel_size=(3, 2, 1)),
        TypeError,
        f"{COLS}: kernel_size must be an int or two ints (height, width), got (3, 2, 1)",
    ),
    "sparse-shapes": (
        attention(spatial_shapes=torch.tensor([[4, 5], [2, 3]]).to_sparse()),
        TypeError,
        f"{ATTN}: spatial_shapes must be a dense tensor, got torch.sparse_coo",
    ),
    "starts-without-numbers": (
        attention(level_start_index=torch.empty(2, dtype=torch.int64, device="meta")),
        ValueError,
        f"{ATTN}: level_start_index must hold numbers, got a meta tensor",
    ),
    "sparse": (
        attention(value=torch.rand(2, 26, 3, 4).to_sparse()),
        TypeError,
        f"{ATTN}: value must be a dense tensor, got torch.sparse_coo",
    ),
    "nested": (
        attention(sampling_locations=torch.nested.nested_tensor([torch.rand(7, 3, 2, 5, 2)] * 2)),
        TypeError,
        f"{ATTN}: sampling_locations must be a dense tensor, got a nested tensor",
    ),
    "jagged": (
        convolution(offset=torch.nested.nested_tensor([torch.rand(36, 5, 5)] * 2, layout=torch.jagged)),
        TypeError,
        f"{CONV}: offset must be a dense tensor, got a nested tensor",
    ),
    "image-smaller-than-kernel": (
        convolution(input=torch.rand(2, 6, 1, 4), dilation=(4, 1)),
        ValueError,
        f"{CONV}: input must be, with its padding, as large as the kernel with its dilation, [9, 2], got [3, 6]",
    ),
    "columns-impl": (
        columns(impl="numpy"),
        ValueError,
        f"{COLS}: impl must be None, 'reference', 'cpu' or 'triton', got 'numpy'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_says_what_is_wrong_before_anything_is_computed(case: str) -> None:
    call, kind, message = CASES[case]
    with ops.record() as calls, pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
    assert type(error.value) is kind
    assert calls == []


@pytest.mark.parametrize("name", ["input", "offset", "weight"])
def test_nothing_in_place_of_a_tensor_whose_plan_exists(name: str) -> None:
    convolution()()
    with pytest.raises(TypeError, match=f"^{CONV}: {name} must be a torch.Tensor, got NoneType$"):
        convolution(**{name: None})()


@pytest.mark.parametrize("good", [attention, geometric, aggregation, convolution, columns])
def test_the_cases_are_bad_only_by_their_change(good: Callable[..., Callable[[], Tensor]]) -> None:
    assert good()().isfinite().all()


def test_steps_may_be_numpys_integers_but_no_truth_values() -> None:
    one = numpy.int64(1)
    torch.manual_seed(0)
    expected = convolution(padding=(1, 1))()
    torch.manual_seed(0)
    assert torch.equal(convolution(padding=one, stride=(one, 1), dilation=(1, one))(), expected)
    for wrong in (True, numpy.True_, (1, False), 1.0, numpy.float32(1)):
        with pytest.raises(TypeError, match=f"^{CONV}: padding must be an int or two ints"):
            convolution(padding=wrong)()


@pytest.mark.parametrize("value", ["1", "0", "", None])
def test_the_check_of_device_metadata_is_asked_for_in_the_environment(value: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PLIANT_CHECK"}
    if value is not None:
        environment["PLIANT_CHECK"] = value
    code = "from pliant.sampling import maps; print(maps.CHECKED)"
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert told.stdout.split() == [str(value == "1").encode()]


def test_a_setting_in_the_environment_that_means_nothing() -> None:
    told = subprocess.run(
        [sys.executable, "-c", "import pliant"],
        env={**os.environ, "PLIANT_CHECK": "yes"}, capture_output=True, text=True,
    )  # fmt: skip
    assert told.returncode == 1
    assert told.stderr.endswith("ValueError: PLIANT_CHECK must be 0 or 1, got yes\n")


def test_device_metadata_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a device whose metadata are not read by default")
    shapes = torch.tensor([(4, 5), (20, 3)], device="cuda")
    tensors = {
        "value": torch.rand(2, 26, 3, 4).cuda(),
        "sampling_locations": torch.rand(2, 7, 3, 2, 5, 2).cuda(),
        "attention_weights": torch.rand(2, 7, 3, 2, 5).cuda(),
    }
    attention(spatial_shapes=shapes, level_start_index=None, **tensors)()
    monkeypatch.setattr(maps, "CHECKED", True)
    with pytest.raises(ValueError, match="must end within the 26 rows"):
        attention(spatial_shapes=shapes, level_start_index=None, **tensors)()
