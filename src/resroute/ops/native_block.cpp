// The block read for CPUs: m queries against N finished sources, each read once, a row at a time.
//
// Numbers of a row lie as (N, m), so that the softmax runs over lanes. What is computed and its
// gradient are derived in docs/engine.md.
#include <torch/library.h>

#include "native_tiles.h"

namespace resroute {
namespace {

// A tensor or nothing per source or query, as rows of D and as numbers per row.
std::vector<Rows> all_rows(at::TensorList tensors, int64_t rows, int64_t width,
                           const char* what) {
  std::vector<Rows> out;
  for (const Tensor& tensor : tensors) out.push_back(rows_of(tensor, rows, width, what));
  return out;
}

std::vector<Rows> all_rows(const OptionalTensors& tensors, int64_t rows, int64_t width,
                           const char* what) {
  std::vector<Rows> out;
  for (size_t i = 0; i < tensors.size(); ++i)
    out.push_back(rows_of(tensors.get(i), rows, width, what));
  return out;
}

std::vector<float*> all_numbers(at::TensorList tensors, int64_t count, const char* what) {
  std::vector<float*> out;
  for (const Tensor& tensor : tensors) out.push_back(numbers_of(tensor, count, what));
  return out;
}

std::vector<float*> all_numbers(const OptionalTensors& tensors, int64_t count, const char* what) {
  std::vector<float*> out;
  for (size_t i = 0; i < tensors.size(); ++i)
    out.push_back(numbers_of(tensors.get(i), count, what));
  return out;
}

struct Operands {
  std::vector<Rows> values, priors;
  std::vector<float*> inverse, scales, prior_lses;
  Rows keys;
  // (N, lanes), zeros beyond m
  std::vector<float> biases;
  int64_t rows, width, padded, sources, queries, lanes;
};

Operands operands_of(at::TensorList values, at::TensorList inverse_rms,
                     const OptionalTensors& scales, const Tensor& keys,
                     const std::optional<Tensor>& biases, at::TensorList priors,
                     at::TensorList prior_lses) {
  TORCH_CHECK(!values.empty() && values.size() == inverse_rms.size() &&
                  values.size() == scales.size() && keys.dim() == 2 && keys.size(0) > 0,
              "resroute: a block read needs sources, each with its 1 / rms, and keys (m, D).");
  Operands in;
  in.rows = num_rows(values[0]);
  in.width = values[0].size(-1);
  in.padded = round_up(in.width);
  in.sources = static_cast<int64_t>(values.size());
  in.queries = keys.size(0);
  in.lanes = round_up(in.queries);
  TORCH_CHECK(keys.size(1) == in.width, "resroute: keys and sources differ in width.");
  TORCH_CHECK(priors.size() == prior_lses.size() &&
                  (priors.empty() || static_cast<int64_t>(priors.size()) == in.queries),
              "resroute: a prior and its log-sum-exp per query are needed, or none.");
  in.values = all_rows(values, in.rows, in.width, "a source");
  in.priors = all_rows(priors, in.rows, in.width, "a prior");
  in.inverse = all_numbers(inverse_rms, in.rows, "1 / rms");
  in.scales = all_numbers(scales, in.rows, "scales");
  in.prior_lses = all_numbers(prior_lses, in.rows, "log-sum-exps");
  in.keys = rows_of(keys, in.queries, in.width, "the keys");
  in.biases.resize(in.sources * in.lanes);
  if (const float* bias = numbers_of(biases, in.queries * in.sources, "the biases")) {
    for (int64_t j = 0; j < in.queries; ++j)
      for (int64_t n = 0; n < in.sources; ++n)
        in.biases[n * in.lanes + j] = bias[j * in.sources + n];
  }
  return in;
}

std::vector<const float*> read_all(const std::vector<Rows>& rows, int64_t r, float* scratch,
                                   int64_t padded) {
  std::vector<const float*> out;
  for (const Rows& one : rows) {
    out.push_back(one.read(r, scratch));
    scratch += padded;
  }
  return out;
}

// An output's row: written directly as bfloat16 or float32, or to scratch where it has a tail.
void aim(Output& output, const Rows& rows, int64_t r, float* scratch) {
  output.half = rows.half && rows.whole() ? rows.halves(r) : nullptr;
  output.to = rows.target(r, scratch);
}

void finish(const Output& output, const Rows& rows, int64_t r) {
  if (!output.half) rows.commit(r, output.to);
}

std::vector<Tensor> block_read_forward(
    at::TensorList values, at::TensorList inverse_rms, const OptionalTensors& scales,
    const Tensor& keys, const std::optional<Tensor>& biases, at::TensorList priors,
    at::TensorList prior_lses, at::ScalarType read_dtype) {
  const Operands in = operands_of(values, inverse_rms, scales, keys, biases, priors, prior_lses);
  check_output_type(read_dtype);
  const int64_t m = in.queries, N = in.sources, padded = in.padded, lanes = in.lanes;
  std::vector<Tensor> out;
  std::vector<Rows> reads;
  std::vector<float*> lses;
  for (int64_t j = 0; j < m; ++j) {
    out.push_back(at::empty(values[0].sizes(), values[0].options().dtype(read_dtype)));
    reads.push_back(rows_of(out.back(), in.rows, in.width, "a read"));
  }
  for (int64_t j = 0; j < m; ++j) {
    out.push_back(at::empty(inverse_rms[0].sizes(), inverse_rms[0].options()));
    lses.push_back(out.back().mutable_data_ptr<float>());
  }
  // rows of (N, m); the backward pass reads whole vectors, up to 15 floats beyond the last
  out.push_back(empty_float({in.rows * N * m + kLanes}));
  float* const saved = out.back().mutable_data_ptr<float>();

  const int64_t chunks = num_chunks(in.rows, in.width * (N + m));
  for_chunks(in.rows, chunks, [&](int64_t, int64_t begin, int64_t end) {
    Scratch scratch((3 * m + N) * padded + (N + 4) * lanes);
    float *key_at = scratch.take(m * padded), *value_at = scratch.take(N * padded),
          *prior_at = scratch.take(m * padded), *read_at = scratch.take(m * padded);
    // weights begin as products; what is in lanes beyond m stays there
    float *weights = scratch.zeros(N * lanes), *most = scratch.zeros(lanes),
          *prior_lse = scratch.zeros(lanes), *prior_weight = scratch.zeros(lanes),
          *lse = scratch.zeros(lanes);
    std::vector<const float*> key_rows;
    for (int64_t j = 0; j < m; ++j) key_rows.push_back(in.keys.read(j, key_at + j * padded));
    std::vector<Output> outputs(m);
    Ahead ahead;
    ahead.watch(in.values, false);
    ahead.watch(reads, true);
    const int64_t tiles = tiles_of(m) * (tiles_of(N) + padded / (4 * kLanes) + 1);
    for (int64_t r = begin; r < end; ++r) {
      r + 1 < end ? ahead.start(r + 1, tiles) : ahead.stop();
      const auto value_rows = read_all(in.values, r, value_at, padded);
      dots(key_rows.data(), m, value_rows.data(), N, padded, weights, lanes, ahead);
      for (size_t j = 0; j < in.priors.size(); ++j) prior_lse[j] = in.prior_lses[j][r];
      std::fill(most, most + lanes, -std::numeric_limits<float>::max());
      if (!in.priors.empty()) std::copy(prior_lse, prior_lse + lanes, most);
      float* const kept = saved + r * N * m;
      for (int64_t n = 0; n < N; ++n) {
        const Vec inverse = splat(in.inverse[n][r]);
        for (int64_t j = 0; j < lanes; j += kLanes) {
          float* const w = weights + n * lanes + j;
          const Vec logit = load(w) * inverse + load(in.biases.data() + n * lanes + j);
          store(w, logit);
          store(most + j, larger(load(most + j), logit));
          // a whole vector where it ends within this row: what is too much is overwritten later
          if (n * m + j + kLanes <= N * m)
            store(kept + n * m + j, logit);
          else
            std::copy(w, w + std::min(kLanes, m - j), kept + n * m + j);
        }
      }
      for (int64_t j = 0; j < lanes; j += kLanes) {
        const Vec top = load(most + j);
        const Vec prior = in.priors.empty() ? Vec{} : exp(load(prior_lse + j) - top);
        Vec total = prior;
        for (int64_t n = 0; n < N; ++n) {
          const Vec e = exp(load(weights + n * lanes + j) - top);
          store(weights + n * lanes + j, e);
          total += e;
        }
        store(lse + j, top + log(total));
        const Vec part = splat(1.0f) / total;
        store(prior_weight + j, prior * part);
        for (int64_t n = 0; n < N; ++n) {
          const float scale = in.scales[n] ? in.scales[n][r] : 1.0f;
          float* const w = weights + n * lanes + j;
          store(w, load(w) * (part * scale));
        }
      }
      for (int64_t j = 0; j < m; ++j) {
        lses[j][r] = lse[j];
        aim(outputs[j], reads[j], r, read_at + j * padded);
        if (in.priors.empty()) continue;
        outputs[j].own = in.priors[j].read(r, prior_at + j * padded);
        outputs[j].own_weight = prior_weight[j];
      }
      mix(outputs, value_rows, padded, {weights, lanes, 1}, ahead);
      for (int64_t j = 0; j < m; ++j) finish(outputs[j], reads[j], r);
    }
  });
  return out;
}

std::vector<Tensor> block_read_backward(
    const OptionalTensors& grad_reads, const OptionalTensors& grad_lses,
    const OptionalTensors& grad_values, at::TensorList values, at::TensorList inverse_rms,
    const OptionalTensors& scales, const Tensor& keys, const std::optional<Tensor>& biases,
    at::TensorList priors, at::TensorList prior_lses, at::TensorList lses, const Tensor& logits,
    const c10::List<bool>& wants) {
  const Operands in = operands_of(values, inverse_rms, scales, keys, biases, priors, prior_lses);
  const int64_t m = in.queries, N = in.sources, padded = in.padded, lanes = in.lanes;
  TORCH_CHECK(static_cast<int64_t>(grad_reads.size()) == m &&
                  static_cast<int64_t>(grad_lses.size()) == m &&
                  static_cast<int64_t>(lses.size()) == m &&
                  static_cast<int64_t>(grad_values.size()) == N && wants.size() == 4,
              "resroute: a gradient for each read, log-sum-exp and source is needed.");
  TORCH_CHECK(logits.numel() == in.rows * N * m + kLanes, "resroute: logits are of another read.");
  const auto from_reads = all_rows(grad_reads, in.rows, in.width, "a read's gradient");
  const auto from_values = all_rows(grad_values, in.rows, in.width, "a source's gradient");
  const auto from_lses = all_numbers(grad_lses, in.rows, "gradients of log-sum-exps");
  const auto read_lses = all_numbers(lses, in.rows, "log-sum-exps");
  const bool wants_keys = wants[0], wants_biases = wants[1], wants_scales = wants[2],
             wants_priors = wants[3];

  const auto made = [&](bool wanted, const Tensor& like) {
    return wanted ? at::empty(like.sizes(), like.options()) : empty_float({0});
  };
  Tensor grad_keys = wants_keys ? empty_float({m, in.width}) : empty_float({0});
  Tensor grad_biases = wants_biases ? empty_float({m, N}) : empty_float({0});
  std::vector<Tensor> out{grad_keys, grad_biases};
  std::vector<Rows> to_values, to_priors;
  std::vector<float*> to_scales(N), to_prior_lses;
  for (const Tensor& value : values) {
    out.push_back(made(true, value));
    to_values.push_back(rows_of(out.back(), in.rows, in.width, "a source"));
  }
  for (int64_t n = 0; n < N; ++n) {
    out.push_back(made(wants_scales && in.scales[n], inverse_rms[n]));
    if (wants_scales && in.scales[n]) to_scales[n] = out.back().mutable_data_ptr<float>();
  }
  for (const Tensor& prior : priors) {
    out.push_back(made(wants_priors, prior));
    if (wants_priors) to_priors.push_back(rows_of(out.back(), in.rows, in.width, "a prior"));
  }
  for (const Tensor& prior_lse : prior_lses) {
    out.push_back(made(wants_priors, prior_lse));
    if (wants_priors) to_prior_lses.push_back(out.back().mutable_data_ptr<float>());
  }
  const float* const saved = logits.const_data_ptr<float>();

  // a chunk's sums over its rows: grad of the keys (m, padded), then of the logits (N, lanes)
  const int64_t chunks = num_chunks(in.rows, in.width * (N + m));
  const int64_t partial_size = (wants_keys ? m * padded : 0) + N * lanes;
  std::vector<float> partials(chunks * partial_size + kLanes);
  for_chunks(in.rows, chunks, [&](int64_t chunk, int64_t begin, int64_t end) {
    Scratch scratch((3 * m + 3 * N + 2) * padded + (2 * N + 4) * lanes + 2 * N * m + 4 * kLanes);
    float *key_at = scratch.take(m * padded), *value_at = scratch.take(N * padded),
          *read_at = scratch.take(m * padded), *prior_at = scratch.take(m * padded),
          *from_at = scratch.take(N * padded), *to_at = scratch.take(N * padded),
          *new_at = scratch.take(padded), *none = scratch.zeros(padded);
    float *p = scratch.take(N * lanes), *q = scratch.zeros(N * lanes), *lse = scratch.zeros(lanes),
          *pull = scratch.zeros(lanes), *prior_p = scratch.zeros(lanes),
          *prior_q = scratch.zeros(lanes);
    // (N, 2 m): weights of the reads' gradients and of the keys in the sources' gradients; vectors
    // are written in ascending order, what is too much is overwritten
    float* const weights = scratch.take(2 * N * m + 2 * kLanes);
    float* const to_keys = partials.data() + chunk * partial_size;
    float* const to_biases = to_keys + (wants_keys ? m * padded : 0);
    std::vector<const float*> rows(2 * m);
    for (int64_t j = 0; j < m; ++j) rows[m + j] = in.keys.read(j, key_at + j * padded);
    std::vector<Output> outputs(N), key_outputs(wants_keys ? m : 0);
    Ahead ahead;
    for (const auto* tensors : {&in.values, &from_reads, &from_values})
      ahead.watch(*tensors, false);
    ahead.watch(to_values, true);
    const int64_t columns = padded / (4 * kLanes) + 1,
                  tiles = tiles_of(m) * tiles_of(N) + (tiles_of(m) + tiles_of(N)) * columns;
    for (size_t j = 0; j < key_outputs.size(); ++j)
      key_outputs[j].add = key_outputs[j].to = to_keys + j * padded;
    for (int64_t r = begin; r < end; ++r) {
      r + 1 < end ? ahead.start(r + 1, tiles) : ahead.stop();
      const auto value_rows = read_all(in.values, r, value_at, padded);
      for (int64_t j = 0; j < m; ++j) {
        rows[j] = from_reads[j] ? from_reads[j].read(r, read_at + j * padded) : none;
        lse[j] = read_lses[j][r];
        pull[j] = from_lses[j] ? from_lses[j][r] : 0.0f;
      }
      // lanes beyond m: a row that is not finite must not reach the next
      std::fill(pull + m, pull + lanes, 0.0f);
      dots(rows.data(), m, value_rows.data(), N, padded, q, lanes, ahead);
      for (size_t j = 0; j < in.priors.size(); ++j) {
        const float* prior = in.priors[j].read(r, prior_at + j * padded);
        dots_tile<1, 1>(&rows[j], &prior, padded, prior_q + j, 1);
        prior_p[j] = in.prior_lses[j][r];
      }
      for (int64_t j = 0; j < lanes; j += kLanes) {
        const Vec top = load(lse + j);
        // lanes beyond m would grow from row to row
        Vec total = in.priors.empty() ? Vec{} : exp(load_part(prior_p + j, m - j) - top);
        store(prior_p + j, total);
        for (int64_t n = 0; n < N; ++n) {
          const Vec e = exp(load_part(saved + (r * N + n) * m + j, m - j) - top);
          store(p + n * lanes + j, e);
          total += e;
        }
        // the log-sum-exp was rounded: weights must sum to one for their gradients to cancel
        const Vec part = splat(1.0f) / total;
        store(prior_p + j, load(prior_p + j) * part);
        Vec centre = load(prior_p + j) * load(prior_q + j);
        for (int64_t n = 0; n < N; ++n) {
          const float scale = in.scales[n] ? in.scales[n][r] : 1.0f;
          const Vec weight = load(p + n * lanes + j) * part;
          store(p + n * lanes + j, weight);
          centre += weight * load(q + n * lanes + j) * scale;
        }
        // what each weight's gradient is compared with
        store(pull + j, load(pull + j) - centre);
      }
      for (int64_t n = 0; n < N; ++n) {
        const float scale = in.scales[n] ? in.scales[n][r] : 1.0f, inverse = in.inverse[n][r];
        float* const w = weights + n * 2 * m;
        Vec back = {}, to_scale = {};
        for (int64_t j = 0; j < lanes; j += kLanes) {
          const int64_t at = n * lanes + j;
          const Vec weight = load(p + at), product = load(q + at);
          const Vec grad = weight * (product * scale + load(pull + j));
          const Vec logit = load_part(saved + (r * N + n) * m + j, m - j);
          back += grad * (logit - load(in.biases.data() + at));
          to_scale += weight * product;
          store(to_biases + at, load(to_biases + at) + grad);
          store(p + at, grad);
          store(w + j, weight * scale);
        }
        for (int64_t j = 0; j < lanes; j += kLanes)
          store(w + m + j, load(p + n * lanes + j) * inverse);
        if (to_scales[n]) to_scales[n][r] = sum(to_scale);
        Output& output = outputs[n];
        output.own = value_rows[n];
        output.own_weight = -sum(back) * inverse * inverse / static_cast<float>(in.width);
        output.add = from_values[n] ? from_values[n].read(r, from_at + n * padded) : nullptr;
        aim(output, to_values[n], r, to_at + n * padded);
      }
      mix(outputs, rows, padded, {weights, 1, 2 * m}, ahead);
      if (wants_keys) mix(key_outputs, value_rows, padded, {weights + m, 2 * m, 1}, ahead);
      for (int64_t n = 0; n < N; ++n) finish(outputs[n], to_values[n], r);
      for (size_t j = 0; j < to_priors.size(); ++j) {
        float* const to = to_priors[j].target(r, new_at);
        for (int64_t d = 0; d < padded; d += kLanes) store(to + d, load(rows[j] + d) * prior_p[j]);
        to_priors[j].commit(r, to);
        to_prior_lses[j][r] = prior_p[j] * (prior_q[j] + pull[j]);
      }
    }
  });

  const auto total = [&](int64_t offset) {
    float sum = 0;
    for (int64_t c = 0; c < chunks; ++c) sum += partials[c * partial_size + offset];
    return sum;
  };
  for (int64_t j = 0; j < m; ++j) {
    if (wants_keys)
      for (int64_t d = 0; d < in.width; ++d)
        grad_keys.mutable_data_ptr<float>()[j * in.width + d] = total(j * padded + d);
    if (wants_biases)
      for (int64_t n = 0; n < N; ++n)
        grad_biases.mutable_data_ptr<float>()[j * N + n] =
            total((wants_keys ? m * padded : 0) + n * lanes + j);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(resroute_native, m) {
  m.def(
      "site_forward(Tensor? update, Tensor[] streams, Tensor? prior, Tensor? lse, Tensor? key, "
      "Tensor? bias, Tensor? gain, float[] coefficients, int num_bases, int target, float eps, "
      "int matching, float rho_max, float norm_eps, ScalarType read_dtype) -> Tensor[]");
  m.def(
      "site_backward(Tensor? grad_read, Tensor?[] grad_streams, ScalarType? update_dtype, "
      "Tensor[] streams, Tensor? prior, Tensor? lse, Tensor? key, Tensor? bias, Tensor? gain, "
      "Tensor saved, float[] coefficients, int num_bases, int target, float eps, int matching, "
      "float rho_max, float norm_eps, bool[] wants) -> Tensor[]");
  m.def(
      "block_read_forward(Tensor[] values, Tensor[] inverse_rms, Tensor?[] scales, Tensor keys, "
      "Tensor? biases, Tensor[] priors, Tensor[] prior_lses, ScalarType read_dtype) -> Tensor[]");
  m.def(
      "block_read_backward(Tensor?[] grad_reads, Tensor?[] grad_lses, Tensor?[] grad_values, "
      "Tensor[] values, Tensor[] inverse_rms, Tensor?[] scales, Tensor keys, Tensor? biases, "
      "Tensor[] priors, Tensor[] prior_lses, Tensor[] lses, Tensor logits, bool[] wants) "
      "-> Tensor[]");
}

TORCH_LIBRARY_IMPL(resroute_native, CPU, m) {
  m.impl("block_read_forward", block_read_forward);
  m.impl("block_read_backward", block_read_backward);
}

}  // namespace resroute
