// The two small products of a block read, `dots` (rows times rows) and `mix` (weights times rows),
// in tiles of up to 4 by 4 vectors that stay in registers.
#pragma once

#include <utility>

#include "native.h"

namespace resroute {

// Fetches the next row of many tensors into the cache, a few lines between every two tiles: all at
// once they would fill the processor's buffers and hold up the loads that are needed now.
class Ahead {
 public:
  void watch(const std::vector<Rows>& tensors, bool write) {
    for (const Rows& rows : tensors)
      if (rows) watched_.push_back({rows, write});
  }
  void start(int64_t row, int64_t tiles) {
    row_ = row;
    next_ = 0;
    pace_ = (watched_.size() + tiles - 1) / tiles;
  }
  void stop() { next_ = watched_.size(); }
  void step() {
    for (size_t i = 0; i < pace_ && next_ < watched_.size(); ++i, ++next_)
      watched_[next_].first.prefetch(row_, watched_[next_].second);
  }

 private:
  std::vector<std::pair<Rows, bool>> watched_;
  int64_t row_ = 0;
  size_t next_ = 0, pace_ = 0;
};

inline int64_t tiles_of(int64_t count) { return (count + 3) / 4; }

// out[n * stride + j] = <a_j, b_n>
template <int J, int N>
RESROUTE_INLINE void dots_tile(const float* const* a, const float* const* b, int64_t width,
                               float* out, int64_t stride) {
  Vec total[J * N] = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec x[J];
    for (int j = 0; j < J; ++j) x[j] = load(a[j] + d);
    for (int n = 0; n < N; ++n) {
      const Vec y = load(b[n] + d);
      for (int j = 0; j < J; ++j) total[n * J + j] += x[j] * y;
    }
  }
  alignas(64) float numbers[kLanes];
  store(numbers, sums(total));
  for (int n = 0; n < N; ++n)
    for (int j = 0; j < J; ++j) out[n * stride + j] = numbers[n * J + j];
}

template <int J>
void dots_of(const float* const* a, const float* const* b, int64_t num_b, int64_t width, float* out,
             int64_t stride, Ahead& ahead) {
  int64_t n = 0;
  for (; n + 4 <= num_b; n += 4) {
    dots_tile<J, 4>(a, b + n, width, out + n * stride, stride);
    ahead.step();
  }
  ahead.step();
  switch (num_b - n) {
    case 3: return dots_tile<J, 3>(a, b + n, width, out + n * stride, stride);
    case 2: return dots_tile<J, 2>(a, b + n, width, out + n * stride, stride);
    case 1: return dots_tile<J, 1>(a, b + n, width, out + n * stride, stride);
  }
}

inline void dots(const float* const* a, int64_t num_a, const float* const* b, int64_t num_b,
          int64_t width, float* out, int64_t stride, Ahead& ahead) {
  int64_t j = 0;
  for (; j + 4 <= num_a; j += 4) dots_of<4>(a + j, b, num_b, width, out + j, stride, ahead);
  switch (num_a - j) {
    case 3: return dots_of<3>(a + j, b, num_b, width, out + j, stride, ahead);
    case 2: return dots_of<2>(a + j, b, num_b, width, out + j, stride, ahead);
    case 1: return dots_of<1>(a + j, b, num_b, width, out + j, stride, ahead);
  }
}

// One output of `mix`: begins as `add` (null: zeros) plus own_weight times `own` (null: none).
struct Output {
  const float* add = nullptr;
  const float* own = nullptr;
  float own_weight = 0;
  float* to = nullptr;
  // instead of `to`
  uint16_t* half = nullptr;
};

// How the weight of input i in output o is found: data[i * input + o * output].
struct Weights {
  const float* data;
  int64_t input, output;
};

template <int O, int C>
RESROUTE_INLINE void mix_tile(const Output* outputs, const float* const* rows, int64_t num_rows,
                              const float* weights, int64_t input, int64_t output, int64_t d) {
  Vec total[O][C];
  for (int o = 0; o < O; ++o)
    for (int c = 0; c < C; ++c) {
      total[o][c] = outputs[o].add ? load(outputs[o].add + d + c * kLanes) : Vec{};
      if (outputs[o].own)
        total[o][c] += load(outputs[o].own + d + c * kLanes) * splat(outputs[o].own_weight);
    }
  for (int64_t i = 0; i < num_rows; ++i) {
    Vec x[C];
    for (int c = 0; c < C; ++c) x[c] = load(rows[i] + d + c * kLanes);
    for (int o = 0; o < O; ++o) {
      const Vec w = splat(weights[i * input + o * output]);
      for (int c = 0; c < C; ++c) total[o][c] += w * x[c];
    }
  }
  for (int o = 0; o < O; ++o)
    for (int c = 0; c < C; ++c) {
      if (outputs[o].half)
        store_half(outputs[o].half + d + c * kLanes, total[o][c]);
      else
        store(outputs[o].to + d + c * kLanes, total[o][c]);
    }
}

template <int C>
void mix_columns(const Output* outputs, int64_t num_outputs, const float* const* rows,
                 int64_t num_rows, const Weights& by, int64_t d, Ahead& ahead) {
  int64_t o = 0;
  const float* w = by.data;
  for (; o + 4 <= num_outputs; o += 4, w += 4 * by.output) {
    mix_tile<4, C>(outputs + o, rows, num_rows, w, by.input, by.output, d);
    ahead.step();
  }
  ahead.step();
  switch (num_outputs - o) {
    case 3: return mix_tile<3, C>(outputs + o, rows, num_rows, w, by.input, by.output, d);
    case 2: return mix_tile<2, C>(outputs + o, rows, num_rows, w, by.input, by.output, d);
    case 1: return mix_tile<1, C>(outputs + o, rows, num_rows, w, by.input, by.output, d);
  }
}

// Columns outside, so that the slices of many rows stay in L1 for all outputs.
inline void mix(const std::vector<Output>& outputs, const std::vector<const float*>& rows,
                int64_t width, const Weights& by, Ahead& ahead) {
  const auto num_outputs = static_cast<int64_t>(outputs.size());
  const auto num_rows = static_cast<int64_t>(rows.size());
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes)
    mix_columns<4>(outputs.data(), num_outputs, rows.data(), num_rows, by, d, ahead);
  for (; d < width; d += kLanes)
    mix_columns<1>(outputs.data(), num_outputs, rows.data(), num_rows, by, d, ahead);
}

}  // namespace resroute
