// The site operation for CPUs: an update joins a running stream, the bases are scored and mixed
// with the prior, and the norm that follows is applied, in one pass over a row that stays in L1.
//
// What is computed and its gradient are derived in docs/engine.md.
#include <torch/library.h>

#include "native_site.h"

namespace resroute {
namespace {

struct Operands {
  std::vector<Rows> streams;
  Rows prior, key, gain;
  const float *lse, *bias;
  int64_t rows, width;
};

Operands operands_of(at::TensorList streams, const std::optional<Tensor>& prior,
                     const std::optional<Tensor>& lse, const std::optional<Tensor>& key,
                     const std::optional<Tensor>& bias, const std::optional<Tensor>& gain,
                     const Tensor& like, int64_t bases) {
  const int64_t width = like.size(-1);
  const int64_t rows = num_rows(like);
  Operands in{{}, rows_of(prior, rows, width, "the prior"), rows_of(key, 1, width, "the key"),
              rows_of(gain, 1, width, "the gain"), numbers_of(lse, rows, "the log-sum-exp"),
              numbers_of(bias, bases - 1, "the bias"), rows, width};
  for (const Tensor& stream : streams)
    in.streams.push_back(rows_of(stream, rows, width, "a stream"));
  TORCH_CHECK(!bases || in.key, "resroute: bases need a key.");
  TORCH_CHECK(!bases || in.prior.operator bool() == (in.lse != nullptr),
              "resroute: a prior comes with its log-sum-exp.");
  return in;
}

std::vector<Tensor> site_forward(
    const std::optional<Tensor>& update, at::TensorList streams, const std::optional<Tensor>& prior,
    const std::optional<Tensor>& lse, const std::optional<Tensor>& key,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& gain,
    at::ArrayRef<double> coefficients, int64_t bases, int64_t target, double eps, int64_t matching,
    double rho_max, double norm_eps, at::ScalarType read_dtype) {
  const int64_t given = static_cast<int64_t>(streams.size());
  const bool writes = update.has_value();
  check_target(target, given, writes);
  TORCH_CHECK(given || prior.has_value(), "resroute: a site without streams and prior.");
  const Tensor& like = given ? streams[0] : *prior;
  const Form form = form_of(given, coefficients, bases, eps, matching, rho_max, norm_eps);
  const Operands in = operands_of(streams, prior, lse, key, bias, gain, like, bases);
  check_output_type(read_dtype);
  const Rows added = rows_of(update, in.rows, in.width, "the update");
  Tensor read = at::empty(like.sizes(), like.options().dtype(read_dtype));
  Tensor written =
      writes ? at::empty(like.sizes(), like.options()) : at::empty({0}, like.options());
  const int64_t kept = Saved::size(form.bases);
  Tensor saved = empty_float({in.rows, kept});
  const Rows read_rows = rows_of(read, in.rows, in.width, "the read");
  const Rows written_rows =
      writes ? rows_of(written, in.rows, in.width, "the new stream") : Rows{};
  float* const saved_data = saved.mutable_data_ptr<float>();
  const int mixed = mixed_streams(form, prior.has_value());
  const int64_t padded = round_up(in.width);

  for_chunks(in.rows, num_chunks(in.rows, in.width), [&](int64_t, int64_t begin, int64_t end) {
    Scratch scratch((kMost + 6) * padded);
    float *z_at = scratch.take(kMost * padded), *u_at = scratch.take(padded),
          *prior_at = scratch.take(padded), *h_at = scratch.take(padded),
          *new_at = scratch.take(padded);
    const float* key_row = in.key ? in.key.read(0, scratch.take(padded)) : nullptr;
    const float* gain_row = in.gain ? in.gain.read(0, scratch.take(padded)) : nullptr;
    for (int64_t r = begin; r < end; ++r) {
      RowPointers z{};
      for (int i = 0; i < given; ++i) z[i] = in.streams[i].read(r, z_at + i * padded);
      if (writes) {
        const float* u = added.read(r, u_at);
        float* to = written_rows.target(r, new_at);
        for (int64_t d = 0; d < padded; d += kLanes)
          store(to + d, load(z[target] + d) + load(u + d));
        written_rows.commit(r, to);
        // as later readers see it, rounded
        z[target] = written_rows.half ? written_rows.read(r, new_at) : to;
      }
      Saved row{};
      float c[kMost] = {1.0f};
      row.prior = 1.0f;
      if (form.bases) {
        alignas(64) float scored[kLanes];
        kScore[form.distinct - 1][form.streams - 1](form, z, key_row, padded, scored);
        weigh(form, scored, in.width, in.lse ? in.lse + r : nullptr, in.bias, row);
        share(form, row, c);
      }
      const float* o = in.prior ? in.prior.read(r, prior_at) : nullptr;
      float* h = gain_row ? h_at : read_rows.target(r, h_at);
      const float square = kMix[mixed](z, c, o, row.prior, padded, h);
      if (gain_row) {
        row.inverse_norm = 1.0f / std::sqrt(square / static_cast<float>(in.width) + form.norm_eps);
        float* to = read_rows.target(r, h_at);
        for (int64_t d = 0; d < padded; d += kLanes)
          store(to + d, load(h + d) * row.inverse_norm * load(gain_row + d));
        h = to;
      }
      read_rows.commit(r, h);
      row.write(saved_data + r * kept, form.bases);
    }
  });
  return {read, written, saved};
}

std::vector<Tensor> site_backward(
    const std::optional<Tensor>& grad_read, const OptionalTensors& grad_streams,
    std::optional<at::ScalarType> update_dtype, at::TensorList streams,
    const std::optional<Tensor>& prior, const std::optional<Tensor>& lse,
    const std::optional<Tensor>& key, const std::optional<Tensor>& bias,
    const std::optional<Tensor>& gain, const Tensor& saved, at::ArrayRef<double> coefficients,
    int64_t bases, int64_t target, double eps, int64_t matching, double rho_max, double norm_eps,
    const c10::List<bool>& wants) {
  const int64_t given = static_cast<int64_t>(streams.size());
  TORCH_CHECK(given || prior.has_value(), "resroute: a site without streams and prior.");
  TORCH_CHECK(static_cast<int64_t>(grad_streams.size()) == given && wants.size() == 4,
              "resroute: a gradient for each stream and four wants are needed.");
  const Tensor& like = given ? streams[0] : *prior;
  const Form form = form_of(given, coefficients, bases, eps, matching, rho_max, norm_eps);
  const Operands in = operands_of(streams, prior, lse, key, bias, gain, like, bases);
  const bool reads = grad_read.has_value(), writes = update_dtype.has_value();
  const int mixed = mixed_streams(form, prior.has_value());
  const bool keyed = reads && form.bases, normed = reads && in.gain, priored = reads && in.prior;
  const Rows grad_rows = rows_of(grad_read, in.rows, in.width, "the read's gradient");
  check_target(target, given, writes);
  if (writes) check_output_type(*update_dtype);

  const auto made = [&](bool wanted, const Tensor& shape, at::ScalarType type) {
    return wanted ? at::empty(shape.sizes(), shape.options().dtype(type))
                  : at::empty({0}, like.options());
  };
  Tensor grad_update = made(writes, like, update_dtype.value_or(at::kFloat));
  Tensor grad_prior = made(priored && wants[0], prior.value_or(like),
                           prior.has_value() ? prior->scalar_type() : at::kFloat);
  Tensor grad_lse = made(reads && in.lse, lse.value_or(like), at::kFloat);
  Tensor grad_key = made(reads && in.key && wants[1], key.value_or(like), at::kFloat);
  Tensor grad_bias = made(reads && in.bias && wants[2], bias.value_or(like), at::kFloat);
  Tensor grad_gain = made(normed && wants[3], gain.value_or(like), at::kFloat);
  std::vector<Tensor> out{grad_update, grad_prior, grad_lse, grad_key, grad_bias, grad_gain};
  std::array<Rows, kMost> arriving, leaving;
  for (int i = 0; i < given; ++i) {
    arriving[i] = rows_of(grad_streams.get(i), in.rows, in.width, "a stream's gradient");
    out.push_back(at::empty(streams[i].sizes(), streams[i].options()));
    leaving[i] = rows_of(out.back(), in.rows, in.width, "a stream's gradient");
  }
  const Rows update_rows = writes ? rows_of(grad_update, in.rows, in.width, "the update") : Rows{};
  const Rows prior_rows =
      grad_prior.numel() ? rows_of(grad_prior, in.rows, in.width, "the prior") : Rows{};
  float* const lse_out = grad_lse.numel() ? grad_lse.mutable_data_ptr<float>() : nullptr;
  const float* const saved_data = saved.const_data_ptr<float>();
  const int64_t kept = Saved::size(form.bases), padded = round_up(in.width);
  TORCH_CHECK(!reads || saved.numel() == in.rows * kept, "resroute: saved is of another site.");

  // a chunk's sums over its rows: grad of the key, of the gain, of the logits
  const int64_t chunks = num_chunks(in.rows, in.width), partial_size = 2 * padded + kLanes;
  std::vector<float> partials(chunks * partial_size);
  for_chunks(in.rows, chunks, [&](int64_t chunk, int64_t begin, int64_t end) {
    Scratch scratch((3 * kMost + 6) * padded);
    float *z_at = scratch.take(kMost * padded), *arriving_at = scratch.take(kMost * padded),
          *leaving_at = scratch.take(kMost * padded), *prior_at = scratch.take(padded),
          *grad_at = scratch.take(padded), *mix_at = scratch.take(padded),
          *new_at = scratch.take(padded);
    const float* key_row = keyed ? in.key.read(0, scratch.take(padded)) : nullptr;
    const float* gain_row = normed ? in.gain.read(0, scratch.take(padded)) : nullptr;
    float* to_key = partials.data() + chunk * partial_size;
    float *to_gain = to_key + padded, *to_bias = to_gain + padded;
    for (int64_t r = begin; r < end; ++r) {
      RowPointers z{}, from{};
      std::array<float*, kMost> to{};
      for (int i = 0; i < given; ++i) {
        if (reads) z[i] = in.streams[i].read(r, z_at + i * padded);
        if (arriving[i]) from[i] = arriving[i].read(r, arriving_at + i * padded);
        to[i] = leaving[i].target(r, leaving_at + i * padded);
      }
      if (reads) {
        Saved row{};
        row.read(saved_data + r * kept, form.bases);
        const float* o = priored ? in.prior.read(r, prior_at) : nullptr;
        const float* g = grad_rows.read(r, grad_at);
        float c[kMost] = {1.0f};
        if (form.bases) share(form, row, c);
        if (gain_row) {
          kMix[mixed](z, c, o, row.prior, padded, mix_at);
          Vec along = {};
          for (int64_t d = 0; d < padded; d += kLanes)
            along += load(g + d) * load(gain_row + d) * load(mix_at + d);
          const float rn = row.inverse_norm;
          const float back = rn * rn * rn * sum(along) / static_cast<float>(in.width);
          for (int64_t d = 0; d < padded; d += kLanes) {
            const Vec h = load(mix_at + d), gr = load(g + d) * rn;
            store(to_gain + d, load(to_gain + d) + gr * h);
            store(mix_at + d, gr * load(gain_row + d) - h * back);
          }
          g = mix_at;
        }
        RowGradient grad;
        if (form.bases) {
          alignas(64) float products[kLanes];
          kProject[given](z, o, g, padded, products);
          grad = row_gradient(form, row, products, o != nullptr, in.width);
          for (int k = 1; k < form.bases; ++k) to_bias[k - 1] += grad.bias[k];
        } else {
          grad.by.c[0] = o ? 0.0f : 1.0f;
        }
        if (lse_out) lse_out[r] = grad.lse;
        if (given) kSpread[given](grad.by, z, from, g, key_row, to_key, padded, to);
        if (prior_rows) {
          float* p = prior_rows.target(r, new_at);
          for (int64_t d = 0; d < padded; d += kLanes) store(p + d, load(g + d) * row.prior);
          prior_rows.commit(r, p);
        }
      } else {
        for (int i = 0; i < given; ++i)
          for (int64_t d = 0; d < padded; d += kLanes)
            store(to[i] + d, from[i] ? load(from[i] + d) : Vec{});
      }
      if (writes) {
        const float* total = to[target];
        if (update_rows.direct()) std::copy(total, total + in.width, update_rows.floats(r));
        update_rows.commit(r, total);
      }
      for (int i = 0; i < given; ++i) leaving[i].commit(r, to[i]);
    }
  });

  const auto add_up = [&](const Tensor& grad, int64_t offset) {
    if (grad.numel() == 0) return;
    float* to = grad.mutable_data_ptr<float>();
    for (int64_t d = 0; d < grad.numel(); ++d) {
      float total = 0;
      for (int64_t c = 0; c < chunks; ++c) total += partials[c * partial_size + offset + d];
      to[d] = total;
    }
  };
  add_up(grad_key, 0);
  add_up(grad_gain, padded);
  add_up(grad_bias, 2 * padded);
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(resroute_native, CPU, m) {
  m.impl("site_forward", site_forward);
  m.impl("site_backward", site_backward);
}

}  // namespace resroute
