"""Multi-scale deformable attention: 16 queries, 4 heads, 8 points on a level of 100x100."""

import torch
import torch_npu  # noqa: F401  the npu device
from mx_driving import multi_scale_deformable_attn

torch.manual_seed(0)
batch, queries, heads, channels, points = 1, 16, 4, 32, 8
shapes = torch.tensor([[100, 100]])
starts = torch.cat((shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]))

value = torch.rand(batch, int(shapes.prod(1).sum()), heads, channels).npu().requires_grad_()
locations = torch.rand(batch, queries, heads, len(shapes), points, 2).npu().requires_grad_()
weights = torch.rand(batch, queries, heads, len(shapes), points).npu().requires_grad_()

output = multi_scale_deformable_attn(value, shapes.npu(), starts.npu(), locations, weights)
incoming = torch.rand(output.shape).npu()
output.backward(incoming)

assert output.shape == (batch, queries, heads * channels)
assert locations.grad.shape == locations.shape
assert locations.grad.abs().sum() > 0
expected = (output * incoming).sum()
for x in (value, weights):
    torch.testing.assert_close((x * x.grad).sum(), expected, rtol=1e-3, atol=0)
print(f"multi_scale_deformable_attn: {list(output.shape)} on {output.device}, gradients agree")
