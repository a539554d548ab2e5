"""Deformable convolution: 16 images of 32x32, 5x5 kernel; x offsets, y offsets, mask in blocks."""

import torch
import torch_npu

torch.manual_seed(0)
images, channels, size, kernel = 16, 32, 32, 5
taps = kernel * kernel

x = torch.rand(images, channels, size, size).npu().requires_grad_()
weight = torch.rand(channels, channels, kernel, kernel).npu().requires_grad_()
offset = torch.rand(images, 3 * taps, size, size).npu().requires_grad_()  # x, y, mask

output, columns = torch_npu.npu_deformable_conv2d(
    x,
    weight,
    offset,
    None,
    kernel_size=[kernel, kernel],
    stride=[1, 1, 1, 1],
    padding=[kernel // 2] * 4,
)
incoming = torch.rand(output.shape).npu()
output.backward(incoming)

assert output.shape == (images, channels, size, size)
assert columns.shape == (images, channels, size * kernel, size * kernel)
assert offset.grad.shape == offset.shape
assert offset.grad[:, : 2 * taps].abs().sum() > 0
expected = (output * incoming).sum()
for part, grad in ((x, x.grad), (weight, weight.grad), (offset[:, -taps:], offset.grad[:, -taps:])):
    torch.testing.assert_close((part * grad).sum(), expected, rtol=1e-3, atol=0)
print(f"npu_deformable_conv2d: {list(output.shape)} on {output.device}, gradients agree")
