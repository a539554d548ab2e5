"""Geometric kernel attention: 6 images, 9680 queries, 8 heads, 4 points on 4 levels of 60x40."""

import time

import torch
import torch_npu
from mx_driving import geometric_kernel_attention

torch.manual_seed(0)
batch, queries, heads, channels, levels, points = 6, 9680, 8, 32, 4, 4
shapes = torch.tensor([[60, 40]] * levels, dtype=torch.int32)
starts = torch.arange(levels, dtype=torch.int32) * 60 * 40

value = torch.rand(batch, levels * 60 * 40, heads, channels).npu().requires_grad_()
locations = (torch.rand(batch, queries, heads, levels, points, 2) * 40).npu()
weights = torch.rand(batch, queries, heads, levels, points).npu().requires_grad_()
incoming = torch.rand(batch, queries, heads * channels).npu()

torch_npu.npu.synchronize()
start = time.perf_counter()
output = geometric_kernel_attention(value, shapes.npu(), starts.npu(), locations, weights)
output.backward(incoming)
torch_npu.npu.synchronize()
seconds = time.perf_counter() - start

assert output.shape == (batch, queries, heads * channels)
expected = (output * incoming).sum()
for x in (value, weights):
    torch.testing.assert_close((x * x.grad).sum(), expected, rtol=1e-3, atol=0)
print(
    f"geometric_kernel_attention: {list(output.shape)} on {output.device} in {seconds:.2f} s, "
    "gradients agree"
)
