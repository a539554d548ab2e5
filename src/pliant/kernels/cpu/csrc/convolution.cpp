// Deformable convolution: out[q, o] = sum over taps p and channels c of weight[o, c, p] * columns[q, p, c], where
// columns[q, p, :] = mask * sample. And the columns alone, and the adjoints of both.
//
// The columns exist for a tile of output positions at a time. Forward, an item of work is a tile, from the samples to
// the result. Backward, an item is a slab of channels of an image: it owns their part of the gradients of input and
// weight, and leaves its part of the gradients of offset and mask to be added up after. Every sum is run by one thread
// in a fixed order, so no result depends on the number of threads.
#include "columns.h"

#include <cstdlib>

#include "product.h"

namespace pliant {
namespace {

constexpr int64_t FORWARD_BYTES = 512 << 10;  // of a tile's columns: half of a second cache
constexpr int64_t FORWARD_ROWS = 168;         // positions of a tile, at most
constexpr int64_t BACKWARD_ROWS = 252;        // positions of a tile: a multiple of BLOCK_ROWS
constexpr int64_t SLAB = 32;                  // channels, at most
constexpr int64_t BACKWARD_WIDTH = 96;        // columns of a tile: the channels of as many taps as fit, but of one at least
constexpr int64_t SCRATCH_BYTES = 64 << 20;   // or a copy of the input: what the slabs of all workers may take
constexpr int64_t IMAGE_BYTES = 32 << 20;     // what the images that are worked on at once may take, if more than one

// Forward

// Item: PANEL output channels of a group. filters[group][panel][point, channel][output in the panel].
template <class T, class> void pack_filters(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const View& w = plan.call.weight;
  const int64_t panels = parts(plan.outputs, PANEL<Real>), group = item / panels;
  const Span outputs = part({group * plan.outputs, plan.outputs}, item % panels * PANEL<Real>, PANEL<Real>);
  Real* to = reals<Real>(plan.filters) + item * plan.points * plan.inputs * PANEL<Real>;
  for (int64_t channel = 0; channel < plan.inputs; ++channel)
    for (int64_t p = 0; p < plan.points; ++p) {
      const int64_t at = channel * w.c + p / plan.call.kernel_w * w.h + p % plan.call.kernel_w * w.w;
      const Real* from = pointer<const Real>(w.at) + outputs.first * w.n + at;
      Real* row = to + (p * plan.inputs + channel) * PANEL<Real>;
      for (int64_t o = 0; o < PANEL<Real>; ++o) row[o] = o < outputs.count ? from[o * w.n] : Real(0);
    }
}

// Item: a tile.
template <class T, class Loc> void forward(const Plan& plan, int64_t item, int64_t worker) {
  typedef Accumulator<T> Real;
  const ConvolutionCall& c = plan.call;
  const int64_t n = item / plan.tiles, count = c.C / c.offset_groups;
  const Span positions = part({0, plan.positions}, item % plan.tiles * plan.tile, plan.tile), points = {0, plan.points};
  Real* columns = reals<Real>(plan.scratch + worker * plan.worker_bytes);
  Slab<T> slab = {n, 0, count, {}, plan.row, c.C, columns, nullptr, nullptr, {}};
  for (slab.group = 0; slab.group < c.offset_groups; ++slab.group, slab.columns += count) {
    const T* first = pointer<const T>(c.input.at) + n * c.input.n + slab.group * count;
    slab.pixels = rows_of_pixels(first, c.input.h, c.input.w, plan.zeros);
    work_samples<T, Loc, COLUMNS>(plan, slab, positions, points);
  }
  if (!c.groups) {
    T* window = pointer<T>(c.out.at) + n * c.out.n;
    return for_each_column(plan, slab, c.C, positions, points, [&](int64_t to, int64_t from, int64_t some, int64_t channels) {
      copy<Real, T>({columns + from, plan.row, 1}, {window + to, c.kernel_w * c.out.w, c.out.c}, some, channels);
    });
  }
  Real* result = columns + plan.tile * plan.row;
  const int64_t depth = plan.points * plan.inputs, panels = parts(plan.outputs, PANEL<Real>);
  const Real* bias = pointer<const Real>(c.bias);
  for (int64_t r = 0; r < positions.count && bias; ++r)
    std::memcpy(result + r * c.out_channels, bias, static_cast<size_t>(c.out_channels) * sizeof(Real));
  for (int64_t group = 0; group < c.groups; ++group)
    for (int64_t p = 0; p < plan.points; p += plan.together) {
      const Real* filters = reals<Real>(plan.filters) + (group * panels * depth + p * plan.inputs) * PANEL<Real>;
      multiply<Real>({columns + p * c.C + group * plan.inputs, plan.row, 1, filters, PANEL<Real>, depth * PANEL<Real>,
                      result + group * plan.outputs, c.out_channels, plan.together * plan.inputs, p > 0 || bias},
                     positions.count, plan.outputs);
    }
  for_each_run(plan, positions, [&](int64_t r, const Position& q, int64_t count) {
    T* out = pointer<T>(c.out.at) + n * c.out.n + q.y * c.out.h + q.x * c.out.w;
    copy<Real, T>({result + r * c.out_channels, c.out_channels, 1}, {out, c.out.w, c.out.c}, count, c.out_channels);
  });
}

// Backward

// An item of work: a slab of channels of one image.
struct Share {
  int64_t image, place;  // in the batch, among the images that are worked on at once
  int64_t slab, group;   // the group is the offset group
  Span channels;
};

PLIANT_INLINE Share share_of(const Plan& plan, int64_t item) {
  const int64_t all = plan.call.offset_groups * plan.slabs, slab = item % all, group = slab / plan.slabs;
  const int64_t in_group = plan.call.C / plan.call.offset_groups;
  const Span channels = part({group * in_group, in_group}, slab % plan.slabs * plan.slab, plan.slab);
  return {plan.image + item / all, item / all, slab, group, channels};
}

// The pieces of a slab.
struct Pieces {
  const Piece *first, *last;
  const Piece* begin() const { return first; }
  const Piece* end() const { return last; }
};
PLIANT_INLINE Pieces pieces_of(const Plan& plan, int64_t slab) {
  return {plan.pieces + plan.first_piece[slab], plan.pieces + plan.first_piece[slab + 1]};
}

// The weights [outputs, channels, points] of a piece.
template <class Real> PLIANT_INLINE Real* weights_of(const Plan& plan, const View& weight, const Piece& piece) {
  const int64_t output = piece.group * plan.outputs, channel = piece.channel - piece.group * plan.inputs;
  return pointer<Real>(weight.at) + output * weight.n + channel * weight.c;
}

// Item: a slab. filters[piece][point / together][panel of (point, channel)][output][column in the panel].
template <class T, class> void pack_filters_backward(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const View& w = plan.call.weight;
  for (const Piece& piece : pieces_of(plan, item)) {
    const int64_t size = padded(plan.together * piece.count, PANEL<Real>) * plan.outputs;
    for (int64_t o = 0; o < plan.outputs; ++o)
      for (int64_t p = 0; p < plan.points; ++p) {
        const int64_t at = o * w.n + p / plan.call.kernel_w * w.h + p % plan.call.kernel_w * w.w;
        const Real* from = weights_of<const Real>(plan, w, piece) + at;
        Real* to = reals<Real>(plan.filters) + piece.filters + p / plan.together * size + o * PANEL<Real>;
        for (int64_t d = 0; d < piece.count; ++d) {
          const int64_t column = p % plan.together * piece.count + d;
          to[column / PANEL<Real> * plan.outputs * PANEL<Real> + column % PANEL<Real>] = from[d * w.c];
        }
      }
  }
}

// Item: a tile of an image. grad_out[image][tile][output][position in the tile], and wild[image][tile]: whether there are
// infinities or NaN among them.
template <class T, class> void pack_grad_out(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const ConvolutionCall& c = plan.call;
  const Span positions = part({0, plan.positions}, item % plan.tiles * plan.tile, plan.tile);
  const T* from = pointer<const T>(c.out.at) + (plan.image + item / plan.tiles) * c.out.n;
  Real* to = reals<Real>(plan.grad_out) + item * c.out_channels * plan.tile;
  for_each_run(plan, positions, [&](int64_t r, const Position& q, int64_t count) {
    const T* out = from + q.y * c.out.h + q.x * c.out.w;
    copy<T, Real>({out, c.out.w, c.out.c}, {to + r, 1, plan.tile}, count, c.out_channels);
  });
  Real zero = 0;
  for (int64_t o = 0; o < c.out_channels; ++o) zero += sum_of_zeros(to + o * plan.tile, positions.count);
  plan.wild[item] = zero != 0;  // as NaN is
}

template <class Real> PLIANT_INLINE const Real* grad_out_of(const Plan& plan, const Share& share, Span positions) {
  return reals<Real>(plan.grad_out) + (share.place * plan.tiles * plan.tile + positions.first) * plan.call.out_channels;
}

// Calls work(in the image, in the slab) for each row of the pixels [H, W, slab].
template <class Work> PLIANT_INLINE void for_each_row(const Plan& plan, const Share& share, const View& images, Work work) {
  const int64_t start = share.image * images.n + share.channels.first * images.c;
  for (int64_t y = 0; y < plan.call.H; ++y) work(start + y * images.h, y * plan.call.W * plan.slab);
}

// The gradients of the columns of a tile.
template <class T>
inline void grad_of_columns(const Plan& plan, const Share& share, const Slab<T>& slab, Span positions, Span points,
                            Accumulator<T>* grads) {
  typedef Accumulator<T> Real;
  const ConvolutionCall& c = plan.call;
  if (!c.groups) {
    const T* window = pointer<const T>(c.out.at) + share.image * c.out.n + share.channels.first * c.out.c;
    const auto read = [&](int64_t from, int64_t to, int64_t some, int64_t channels) {
      const Matrix<const T> stretch = {window + from, c.kernel_w * c.out.w, c.out.c};
      copy<T, Real>(stretch, {grads + to, slab.by_position, 1}, some, channels);
    };
    return for_each_column(plan, slab, slab.count, positions, points, read);
  }
  for (const Piece& piece : pieces_of(plan, share.slab)) {
    const int64_t size = padded(plan.together * piece.count, PANEL<Real>) * plan.outputs;
    const Real* grad_out = grad_out_of<Real>(plan, share, positions) + piece.group * plan.outputs * plan.tile;
    const Real* filters = reals<Real>(plan.filters) + piece.filters + points.first / plan.together * size;
    multiply<Real>({grad_out, 1, plan.tile, filters, PANEL<Real>, plan.outputs * PANEL<Real>,
                    grads + piece.channel - share.channels.first, slab.by_position, plan.outputs, false},
                   positions.count, points.count * piece.count);
  }
}

// The gradients of the weights, from the columns of a tile.
// grad_filters[image][piece][point / together][output][point, channel].
template <class T, class Loc>
inline void grad_of_filters(const Plan& plan, const Share& share, const Slab<T>& slab, Span positions, Span points) {
  typedef Accumulator<T> Real;
  for (const Piece& piece : pieces_of(plan, share.slab)) {
    const int64_t width = plan.together * piece.count;
    const Real* grad_out = grad_out_of<Real>(plan, share, positions) + piece.group * plan.outputs * plan.tile;
    Real* to = reals<Real>(plan.grad_filters) + share.place * plan.filter_count + piece.grad_filters +
               points.first / plan.together * plan.outputs * width;
    const Product<Real> whole = {grad_out, plan.tile, 1, slab.columns + piece.channel - share.channels.first, slab.by_position,
                                 PANEL<Real>, to, width, positions.count, positions.first > 0};
    if (!plan.wild[share.place * plan.tiles + positions.first / plan.tile]) {
      multiply(whole, plan.outputs, points.count * piece.count);
      continue;
    }
    // Zero times infinity is NaN: samples that do not count are passed over, tap by tap.
    if (!whole.add) std::memset(to, 0, static_cast<size_t>(plan.outputs * width) * sizeof(Real));
    for (int64_t p = 0; p < points.count; ++p) {
      const auto add = [&](int64_t first, int64_t count) {
        multiply<Real>({whole.a + first, whole.a_row, 1, whole.b + first * whole.b_depth + p * piece.count, whole.b_depth,
                        whole.b_panel, to + p * piece.count, width, count, true},
                       plan.outputs, piece.count);
      };
      for_each_counting<Real, Loc>(plan, share.image, share.group, positions, points.first + p, add);
    }
  }
}

// Item: a slab of an image. The worker's scratch holds its pixels and their gradients, a tile's columns and theirs, and
// a row that takes what is added outside the map.
template <class T, class Loc> void backward(const Plan& plan, int64_t number, int64_t worker) {
  typedef Accumulator<T> Real;
  const ConvolutionCall& c = plan.call;
  const Share share = share_of(plan, number);
  const bool dots = c.grad_offset.at || c.grad_mask.at, scatter = c.grad_input.at, column = c.grad_weight.at;
  const int64_t size = c.H * c.W * plan.slab, tile = plan.tile * plan.together * plan.slab;
  Real* grad_pixels = reals<Real>(plan.scratch + worker * plan.worker_bytes);
  Real* outside = grad_pixels + size;
  Real* columns = outside + padded(plan.slab, 16);
  Real* grads = columns + tile;
  T* stored = reinterpret_cast<T*>(grads + tile);
  const Slab<T> slab = {
      share.image, share.group, share.channels.count, rows_of_pixels(stored, c.W * plan.slab, plan.slab, plan.zeros),
      plan.together * share.channels.count, share.channels.count, column ? columns : nullptr, grads,
      dots ? reals<Real>(plan.slopes) + number * plan.positions * plan.points * 3 : nullptr,
      scatter ? rows_of_pixels(grad_pixels, c.W * plan.slab, plan.slab, outside) : Rows{}};

  const T* input = pointer<const T>(c.input.at);
  const auto pack = [&](int64_t from, int64_t to) {
    copy<T, T>({input + from, c.input.w, c.input.c}, {stored + to, plan.slab, 1}, c.W, share.channels.count);
  };
  if (dots || column) for_each_row(plan, share, c.input, pack);
  if (scatter) std::memset(grad_pixels, 0, static_cast<size_t>(size + plan.slab) * sizeof(Real));
  for (int64_t first = 0; first < plan.positions; first += plan.tile)
    for (int64_t point = 0; point < plan.points; point += plan.together) {
      const Span positions = part({0, plan.positions}, first, plan.tile), points = part({0, plan.points}, point, plan.together);
      if (dots || scatter) {
        grad_of_columns(plan, share, slab, positions, points, grads);
        dots && scatter && column ? work_samples<T, Loc, EVERYTHING>(plan, slab, positions, points)
                                  : work_samples<T, Loc, SOME>(plan, slab, positions, points);
      } else {
        work_samples<T, Loc, COLUMNS>(plan, slab, positions, points);
      }
      if (column) grad_of_filters<T, Loc>(plan, share, slab, positions, points);
    }
  T* grad_input = pointer<T>(c.grad_input.at);
  const auto unpack = [&](int64_t to, int64_t from) {
    const Matrix<T> image = {grad_input + to, c.grad_input.w, c.grad_input.c};
    copy<Real, T>({grad_pixels + from, plan.slab, 1}, image, c.W, share.channels.count);
  };
  if (scatter) for_each_row(plan, share, c.grad_input, unpack);
}

// Item: a tile of an image. Adds up what its slabs have left.
template <class T, class> void add_slopes(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const ConvolutionCall& c = plan.call;
  const View &offset = c.grad_offset, &mask = c.grad_mask;
  const int64_t image = plan.image + item / plan.tiles, size = plan.positions * plan.points * 3;
  const Span positions = part({0, plan.positions}, item % plan.tiles * plan.tile, plan.tile);
  for (int64_t g = 0; g < c.offset_groups; ++g)
    for (int64_t p = 0; p < plan.points; ++p) {
      const int64_t first = (item / plan.tiles * c.offset_groups + g) * plan.slabs, channel = g * plan.points + p;
      const Real* slopes = reals<Real>(plan.slopes) + first * size + (positions.first * plan.points + p) * 3;
      Real* to_offset = pointer<Real>(offset.at) + image * offset.n + 2 * channel * offset.c;
      Real* to_mask = pointer<Real>(mask.at) + image * mask.n + channel * mask.c;
      Position q(plan, positions.first);
      for (int64_t r = 0; r < positions.count; ++r, ++q, slopes += plan.points * 3) {
        Real sums[3] = {};
        for (int64_t slab = 0; slab < plan.slabs; ++slab)
          for (int k = 0; k < 3; ++k) sums[k] += slopes[slab * size + k];
        const int64_t at = q.y * offset.h + q.x * offset.w;
        if (offset.at) to_offset[at] = sums[0], to_offset[at + offset.c] = sums[1];
        if (mask.at) to_mask[q.y * mask.h + q.x * mask.w] = sums[2];
      }
    }
}

// Item: a slab. Adds the gradients of the weights by the images that were worked on at once.
template <class T, class> void add_filters(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const View& w = plan.call.grad_weight;
  for (const Piece& piece : pieces_of(plan, item))
    for (int64_t o = 0; o < plan.outputs; ++o)
      for (int64_t p = 0; p < plan.points; ++p) {
        const int64_t row = (p / plan.together * plan.outputs + o) * plan.together + p % plan.together;
        const Real* from = reals<Real>(plan.grad_filters) + piece.grad_filters + row * piece.count;
        Real* to = weights_of<Real>(plan, w, piece) + o * w.n + p / plan.call.kernel_w * w.h + p % plan.call.kernel_w * w.w;
        for (int64_t d = 0; d < piece.count; ++d) {
          Real sum = to[d * w.c];
          for (int64_t place = 0; place < plan.images; ++place) sum += from[place * plan.filter_count + d];
          to[d * w.c] = sum;
        }
      }
}

// Item: an output channel.
template <class T, class> void grad_of_bias(const Plan& plan, int64_t item, int64_t) {
  typedef Accumulator<T> Real;
  const View& out = plan.call.out;
  Real sum = 0;
  for (int64_t n = 0; n < plan.call.N; ++n)
    for (int64_t y = 0; y < plan.call.out_h; ++y) {
      const T* row = pointer<const T>(out.at) + n * out.n + item * out.c + y * out.h;
      Real sums[8] = {};
      for (int64_t x = 0; x < plan.call.out_w; ++x) sums[x % 8] += widen(row[x * out.w]);
      sum += ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
    }
  pointer<Real>(plan.call.grad_bias)[item] = sum;
}

// The steps as bodies of `parallel`

#define PLIANT_STEP(step)                                               \
  void run_##step(const void* context, int64_t item, int64_t worker) {  \
    const Plan& plan = *static_cast<const Plan*>(context);              \
    PLIANT_DISPATCH(plan.call, step, plan, item, worker);               \
  }
PLIANT_STEP(pack_filters)
PLIANT_STEP(forward)
PLIANT_STEP(pack_grad_out)
PLIANT_STEP(pack_filters_backward)
PLIANT_STEP(backward)
PLIANT_STEP(add_slopes)
PLIANT_STEP(add_filters)
PLIANT_STEP(grad_of_bias)
#undef PLIANT_STEP

// Memory in parts that begin with a line of the cache each, given back at the end of the scope.
class Memory {
 public:
  ~Memory() { std::free(bytes); }
  void add(char*& part, int64_t size) {
    parts[count] = &part;
    starts[count++] = total;
    total += padded(size, 64);
  }
  bool reserve() {
    bytes = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(total + 64)));
    for (int i = 0; i < count; ++i) *parts[i] = bytes + starts[i];
    return bytes != nullptr;
  }

 private:
  char* bytes = nullptr;
  char** parts[16];
  int64_t starts[16], total = 0;
  int count = 0;
};

// An odd number of lines of the cache: rows one below the other fall into different sets of it.
int64_t row_of(int64_t count, int64_t real) { return (parts(count * real, 64) | 1) * (64 / real); }

int64_t convolve(Plan& plan, int64_t real) {
  const ConvolutionCall& c = plan.call;
  if (c.N * plan.positions == 0) return OK;
  const int64_t threads = c.threads, panel = 2 * VECTOR_BYTES / real, panels = c.groups * parts(plan.outputs, panel);
  plan.together = c.groups > 1 ? 1 : plan.points;
  plan.row = row_of(plan.points * c.C, real);
  const int64_t fair = parts(c.N * plan.positions, 4 * threads);
  plan.tile = padded(least(least(FORWARD_ROWS, fair), most(1, FORWARD_BYTES / (plan.row * real))), BLOCK_ROWS);
  plan.tiles = parts(plan.positions, plan.tile);
  plan.worker_bytes = padded(plan.tile * (plan.row + (c.groups ? c.out_channels : 0)) * real, 64);
  Memory memory;
  memory.add(plan.zeros, c.C * 8);
  memory.add(plan.scratch, threads * plan.worker_bytes);
  memory.add(plan.filters, panels * panel * plan.points * plan.inputs * real);
  if (!memory.reserve()) return NO_MEMORY;
  std::memset(plan.zeros, 0, static_cast<size_t>(c.C * 8));
  if (c.groups) parallel(threads, panels, run_pack_filters, &plan);
  parallel(threads, c.N * plan.tiles, run_forward, &plan);
  return OK;
}

// Cuts the slabs into pieces and counts them and the numbers of their filters. Without `pieces` it only counts.
struct Count { int64_t pieces, filters, grad_filters; };
Count cut_pieces(const Plan& plan, int64_t panel, Piece* pieces, int64_t* first_piece) {
  const ConvolutionCall& c = plan.call;
  const int64_t in_group = c.C / c.offset_groups, chunks = parts(plan.points, plan.together);
  const int64_t slabs = c.offset_groups * plan.slabs;
  Count count = {};
  for (int64_t slab = 0; slab < slabs; ++slab) {
    const int64_t group = slab / plan.slabs * in_group, first = group + slab % plan.slabs * plan.slab;
    const int64_t end = least(first + plan.slab, group + in_group);
    if (pieces) first_piece[slab] = count.pieces;
    for (int64_t channel = first, stop; channel < end; channel = stop, ++count.pieces) {
      const int64_t of = channel / plan.inputs;
      stop = least(end, (of + 1) * plan.inputs);
      if (pieces) pieces[count.pieces] = {channel, stop - channel, of, count.filters, count.grad_filters};
      count.filters += chunks * padded(plan.together * (stop - channel), panel) * plan.outputs;
      count.grad_filters += chunks * plan.together * (stop - channel) * plan.outputs;
    }
  }
  if (pieces) first_piece[slabs] = count.pieces;
  return count;
}

int64_t convolve_backward(Plan& plan, int64_t real) {
  const ConvolutionCall& c = plan.call;
  const bool dots = c.grad_offset.at || c.grad_mask.at, sampled = dots || c.grad_input.at || c.grad_weight.at;
  const int64_t in_group = c.C / c.offset_groups, panel = 2 * VECTOR_BYTES / real;
  plan.tile = BACKWARD_ROWS;
  plan.tiles = parts(plan.positions, plan.tile);
  plan.slab = most(1, least(SLAB, in_group));
  plan.slabs = parts(in_group, plan.slab);
  plan.together = c.groups > 1 ? 1 : least(plan.points, most(1, BACKWARD_WIDTH / plan.slab));
  const int64_t slabs = c.offset_groups * plan.slabs, tile = plan.tile * plan.together * plan.slab;
  const Count count = cut_pieces(plan, panel, nullptr, nullptr);
  plan.filter_count = count.grad_filters;

  // What an image needs while it is worked on, and how many are at once: enough for all threads, if there is room.
  const int64_t grad_out = c.groups ? plan.tiles * c.out_channels * plan.tile * real : 0;
  const int64_t slopes = dots ? slabs * plan.positions * plan.points * 3 * real : 0;
  const int64_t grad_filters = c.grad_weight.at ? count.grad_filters * real : 0;
  const int64_t enough = c.threads > 1 ? parts(4 * c.threads, most(1, slabs)) : 1;
  const int64_t room = IMAGE_BYTES / most(1, grad_out + slopes + grad_filters);
  const int64_t at_once = most(1, least(c.N, least(enough, room)));

  const int64_t size = c.H * c.W * plan.slab, feature = c.value_dtype == FLOAT16 || c.value_dtype == BFLOAT16 ? 2 : real;
  plan.worker_bytes = padded((size + padded(plan.slab, 16) + 2 * tile) * real + size * feature, 64);
  const int64_t most_bytes = most(SCRATCH_BYTES, c.N * c.C * c.H * c.W * feature);
  const int64_t threads = most(1, least(least(c.threads, at_once * slabs), most_bytes / plan.worker_bytes));

  char *pieces, *first_piece;
  Memory memory;
  memory.add(pieces, count.pieces * static_cast<int64_t>(sizeof(Piece)));
  memory.add(first_piece, (slabs + 1) * 8);
  memory.add(plan.zeros, plan.slab * 8);
  memory.add(plan.scratch, threads * plan.worker_bytes);
  memory.add(plan.filters, count.filters * real);
  memory.add(plan.grad_out, at_once * grad_out);
  memory.add(plan.wild, at_once * plan.tiles);
  memory.add(plan.slopes, at_once * slopes);
  memory.add(plan.grad_filters, at_once * grad_filters);
  if (!memory.reserve()) return NO_MEMORY;
  std::memset(plan.zeros, 0, static_cast<size_t>(plan.slab * 8));
  plan.pieces = reinterpret_cast<Piece*>(pieces);
  plan.first_piece = reinterpret_cast<int64_t*>(first_piece);
  cut_pieces(plan, panel, reinterpret_cast<Piece*>(pieces), reinterpret_cast<int64_t*>(first_piece));

  if (c.groups && sampled) parallel(c.threads, slabs, run_pack_filters_backward, &plan);
  for (plan.image = 0; plan.image < c.N && sampled; plan.image += plan.images) {
    plan.images = least(at_once, c.N - plan.image);
    if (c.groups) parallel(c.threads, plan.images * plan.tiles, run_pack_grad_out, &plan);
    parallel(threads, plan.images * slabs, run_backward, &plan);
    if (dots) parallel(c.threads, plan.images * plan.tiles, run_add_slopes, &plan);
    if (c.grad_weight.at && plan.positions) parallel(c.threads, slabs, run_add_filters, &plan);
  }
  if (c.grad_bias) parallel(c.threads, c.out_channels, run_grad_of_bias, &plan);
  return OK;
}

}  // namespace

int64_t PLIANT_ISA::convolution(const ConvolutionCall& call) {
  Plan plan = {};
  plan.call = call;
  plan.points = call.kernel_h * call.kernel_w;
  plan.positions = call.out_h * call.out_w;
  plan.inputs = call.groups ? call.C / call.groups : call.C;
  plan.outputs = call.groups ? call.out_channels / call.groups : 0;
  const int64_t real = call.value_dtype == FLOAT64 ? 8 : 4;
  return call.backward ? convolve_backward(plan, real) : convolve(plan, real);
}

}  // namespace pliant
