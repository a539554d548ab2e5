"""Deformable aggregation: 10 anchors of 2000 points, 256 channels in 8 groups, one 32x88 map."""

import torch
import torch_npu  # noqa: F401  the npu device
from mx_driving import deformable_aggregation

torch.manual_seed(0)
batch, anchors, points, cameras, scales, groups, channels = 1, 10, 2000, 1, 1, 8, 256
height, width = 32, 88
spatial_shape = torch.tensor([[[height, width]]], dtype=torch.int32).npu()
scale_start_index = torch.tensor([[0]], dtype=torch.int32).npu()

features = torch.rand(batch, height * width, channels).npu().requires_grad_()
locations = torch.rand(batch, anchors, points, cameras, 2).npu().requires_grad_()
weights = torch.rand(batch, anchors, points, cameras, scales, groups).npu().requires_grad_()

output = deformable_aggregation(features, spatial_shape, scale_start_index, locations, weights)
incoming = torch.rand(output.shape).npu()
output.backward(incoming)

assert output.shape == (batch, anchors, channels)
assert locations.grad.shape == locations.shape
assert locations.grad.abs().sum() > 0
expected = (output * incoming).sum()
for x in (features, weights):
    torch.testing.assert_close((x * x.grad).sum(), expected, rtol=1e-3, atol=0)
print(f"deformable_aggregation: {list(output.shape)} on {output.device}, gradients agree")
