// What the Python side passes for a deformable convolution, or for its columns alone.
#pragma once

#include "problem.h"

namespace pliant {

// A tensor of four axes with its strides. Null: there is none, or nobody asked.
struct View { int64_t at, n, c, h, w; };

// The order of the fields is the order in which convolution.py packs them.
struct ConvolutionCall {
  int64_t isa, threads, value_dtype, loc_dtype, backward;
  int64_t N, C, H, W, out_channels, out_h, out_w;
  int64_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w;
  int64_t groups, offset_groups;  // groups 0: there is no product, the columns are the result
  View input;   // forward: channels are adjacent
  View offset;  // in the type loc_dtype
  View mask;    // in the accumulator's type, as all that follows except `out` and `grad_input`
  View weight;  // [out_channels, C / groups, kernel_h, kernel_w]
  int64_t bias;
  View out;     // forward: the result, backward: its gradient; both in the input's type
  View grad_input, grad_offset, grad_mask, grad_weight;  // grad_weight is added to
  int64_t grad_bias;
};

#define PLIANT_CONVOLUTION(isa)                       \
  namespace isa {                                     \
  int64_t convolution(const ConvolutionCall& call);   \
  }
PLIANT_CONVOLUTION(baseline)
PLIANT_CONVOLUTION(avx2)
PLIANT_CONVOLUTION(avx512)
#undef PLIANT_CONVOLUTION

}  // namespace pliant
