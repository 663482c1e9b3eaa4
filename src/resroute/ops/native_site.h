// What is done to one row of a site, forward and backward: passes over float32 rows in L1 and the
// numbers between them.
//
// D width, K bases of Z streams; bases of equal coefficients are scored once, U <= K of them.
#pragma once

#include <array>

#include "native.h"

namespace resroute {

constexpr int kMost = 3;

struct Form {
  int bases = 0, streams = 0, distinct = 0, matching = 0;
  // the distinct basis that each basis is
  int which[kMost] = {};
  // of the streams in each distinct basis
  float weight[kMost][kMost] = {};
  float eps = 0, rho_max = 0, norm_eps = 0;
};

// What a row keeps for its backward pass, in this order; four of them per basis.
struct Saved {
  float prior, inverse_norm, p[kMost], scale[kMost], inverse[kMost], logit[kMost];
  static int64_t size(int bases) { return 2 + 4 * bases; }

  void write(float* to, int bases) const {
    *to++ = prior;
    *to++ = inverse_norm;
    for (const float* from : {p, scale, inverse, logit}) to = std::copy(from, from + bases, to);
  }
  void read(const float* from, int bases) {
    prior = *from++;
    inverse_norm = *from++;
    for (float* to : {p, scale, inverse, logit}) {
      std::copy(from, from + bases, to);
      from += bases;
    }
  }
};

inline void check_target(int64_t target, int64_t streams, bool has_update) {
  TORCH_CHECK(target >= -1 && target < streams, "resroute: target ", target, " is no stream: with ",
              streams, " of them it is -1 to ", streams - 1, ".");
  TORCH_CHECK((target >= 0) == has_update, "resroute: an update and its target come together.");
}

inline Form form_of(int64_t streams, at::ArrayRef<double> coefficients, int64_t bases, double eps,
                    int64_t matching, double rho_max, double norm_eps) {
  TORCH_CHECK(bases <= kMost && streams <= kMost, "resroute's native ops take up to ", kMost,
              " streams and bases, not ", streams, " and ", bases, ".");
  TORCH_CHECK(static_cast<int64_t>(coefficients.size()) == bases * streams && (streams || !bases),
              "resroute: a site of ", bases, " bases and ", streams, " streams has ",
              bases * streams, " coefficients, not ", coefficients.size(), ".");
  Form form;
  form.bases = static_cast<int>(bases);
  form.streams = static_cast<int>(streams);
  form.matching = static_cast<int>(matching);
  form.eps = static_cast<float>(eps);
  form.rho_max = static_cast<float>(rho_max);
  form.norm_eps = static_cast<float>(norm_eps);
  for (int k = 0; k < bases; ++k) {
    float row[kMost] = {};
    for (int i = 0; i < streams; ++i) row[i] = static_cast<float>(coefficients[k * streams + i]);
    int u = 0;
    while (u < form.distinct && !std::equal(row, row + kMost, form.weight[u])) ++u;
    if (u == form.distinct) std::copy(row, row + kMost, form.weight[form.distinct++]);
    form.which[k] = u;
  }
  return form;
}

using RowPointers = std::array<const float*, kMost>;

// out[u] = |B_u|^2, out[U + u] = <key, B_u>
template <int U, int Z>
void score(const Form& form, const RowPointers& streams, const float* key, int64_t width,
           float* out) {
  Vec weight[U][Z], total[2 * U] = {};
  for (int u = 0; u < U; ++u)
    for (int i = 0; i < Z; ++i) weight[u][i] = splat(form.weight[u][i]);
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec k = load(key + d);
    Vec z[Z];
    for (int i = 0; i < Z; ++i) z[i] = load(streams[i] + d);
    for (int u = 0; u < U; ++u) {
      Vec basis = weight[u][0] * z[0];
      for (int i = 1; i < Z; ++i) basis += weight[u][i] * z[i];
      total[u] += basis * basis;
      total[U + u] += basis * k;
    }
  }
  store(out, sums(total));
}

// The mix p_o prior + sum_i c_i Z_i of a row, written to `out`; returns its squared norm.
template <int Z>
float mix(const RowPointers& streams, const float* c, const float* prior, float p, int64_t width,
          float* out) {
  Vec square = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    Vec h = prior ? load(prior + d) * p : Vec{};
    for (int i = 0; i < Z; ++i) h += load(streams[i] + d) * c[i];
    square += h * h;
    store(out + d, h);
  }
  return sum(square);
}

// out[i] = <grad, Z_i>, out[Z] = <grad, prior>
template <int Z>
void project(const RowPointers& streams, const float* prior, const float* grad, int64_t width,
             float* out) {
  Vec total[Z + 1] = {};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec g = load(grad + d);
    for (int i = 0; i < Z; ++i) total[i] += g * load(streams[i] + d);
    if (prior) total[Z] += g * load(prior + d);
  }
  store(out, sums(total));
}

// Factors of a row's gradient: grad Z_i = c_i grad_mix + keyed_i key + sum_j own_ij Z_j.
struct Spread {
  float c[kMost] = {}, keyed[kMost] = {}, own[kMost][kMost] = {};
};

template <int Z>
void spread(const Spread& by, const RowPointers& streams, const RowPointers& arriving,
            const float* grad, const float* key, float* grad_key, int64_t width,
            const std::array<float*, kMost>& out) {
  for (int64_t d = 0; d < width; d += kLanes) {
    const Vec g = load(grad + d);
    Vec z[Z], total[Z];
    for (int i = 0; i < Z; ++i) {
      z[i] = load(streams[i] + d);
      total[i] = g * by.c[i];
      if (arriving[i]) total[i] += load(arriving[i] + d);
    }
    if (key) {
      const Vec k = load(key + d);
      Vec to_key = load(grad_key + d);
      for (int i = 0; i < Z; ++i) {
        total[i] += k * by.keyed[i];
        to_key += z[i] * by.keyed[i];
        for (int j = 0; j < Z; ++j) total[i] += z[j] * by.own[i][j];
      }
      store(grad_key + d, to_key);
    }
    for (int i = 0; i < Z; ++i) store(out[i] + d, total[i]);
  }
}

using Score = void (*)(const Form&, const RowPointers&, const float*, int64_t, float*);
constexpr Score kScore[kMost][kMost] = {{score<1, 1>, score<1, 2>, score<1, 3>},
                                        {score<2, 1>, score<2, 2>, score<2, 3>},
                                        {score<3, 1>, score<3, 2>, score<3, 3>}};
constexpr decltype(&mix<0>) kMix[] = {mix<0>, mix<1>, mix<2>, mix<3>};
constexpr decltype(&project<1>) kProject[] = {project<0>, project<1>, project<2>, project<3>};
constexpr decltype(&spread<1>) kSpread[] = {nullptr, spread<1>, spread<2>, spread<3>};

// p, scale, 1 / rms and logit of each basis, and the prior's weight
inline void weigh(const Form& form, const float* scored, int64_t width, const float* lse,
           const float* bias, Saved& row) {
  alignas(64) float logits[kLanes];
  std::fill(logits, logits + kLanes, -1e30f);
  for (int k = 0; k < form.bases; ++k) {
    const int u = form.which[k];
    row.inverse[k] = 1.0f / std::sqrt(scored[u] / static_cast<float>(width) + form.eps);
    row.logit[k] = row.inverse[k] * scored[form.distinct + u];
    logits[k] = row.logit[k] + (bias && k > 0 ? bias[k - 1] : 0.0f);
    row.scale[k] = k > 0 && form.matching
                       ? std::min(row.inverse[k] / row.inverse[0], form.rho_max)
                       : 1.0f;
  }
  if (lse) logits[form.bases] = *lse;
  const int count = form.bases + (lse != nullptr);
  float most = logits[0];
  for (int k = 1; k < count; ++k) most = std::max(most, logits[k]);
  store(logits, exp(load(logits) - splat(most)));
  float total = 0;
  for (int k = 0; k < count; ++k) total += logits[k];
  for (int k = 0; k < form.bases; ++k) row.p[k] = logits[k] / total;
  row.prior = lse ? logits[form.bases] / total : 0.0f;
}

// The mix's factor on each stream.
inline void share(const Form& form, const Saved& row, float* c) {
  std::fill(c, c + kMost, 0.0f);
  for (int k = 0; k < form.bases; ++k)
    for (int i = 0; i < form.streams; ++i)
      c[i] += row.p[k] * row.scale[k] * form.weight[form.which[k]][i];
}

// How many streams the mix is of: without bases it is the prior, or else stream 0.
inline int mixed_streams(const Form& form, bool has_prior) {
  return form.bases ? form.streams : has_prior ? 0 : 1;
}

// From <grad_mix, Z_i> (then <grad_mix, prior>) to the factors of all gradients of a row.
struct RowGradient {
  Spread by;
  // of each basis' logit
  float bias[kMost] = {};
  float lse = 0;
};

inline RowGradient row_gradient(const Form& form, const Saved& row, const float* products,
                                bool has_prior, int64_t width) {
  RowGradient out;
  share(form, row, out.by.c);
  const float prior_product = has_prior ? products[form.streams] : 0.0f;
  float delta = row.prior * prior_product;
  for (int i = 0; i < form.streams; ++i) delta += out.by.c[i] * products[i];
  out.lse = row.prior * (prior_product - delta);
  // of each distinct basis beside the mix's share: grad B = keyed key + own B
  float keyed[kMost] = {}, own[kMost] = {};
  const auto turn = [&](int k, float grad_inverse) {
    const float r = row.inverse[k];
    own[form.which[k]] -= grad_inverse * r * r * r / static_cast<float>(width);
  };
  for (int k = 0; k < form.bases; ++k) {
    float product = 0;
    for (int i = 0; i < form.streams; ++i)
      product += form.weight[form.which[k]][i] * products[i];
    const float r = row.inverse[k], grad_logit = row.p[k] * (row.scale[k] * product - delta);
    out.bias[k] = grad_logit;
    keyed[form.which[k]] += grad_logit * r;
    own[form.which[k]] -= grad_logit * r * r * row.logit[k] / static_cast<float>(width);
    if (form.matching == 2 && k > 0 && r / row.inverse[0] < form.rho_max) {
      const float grad_scale = row.p[k] * product;
      turn(k, grad_scale / row.inverse[0]);
      turn(0, -grad_scale * r / (row.inverse[0] * row.inverse[0]));
    }
  }
  for (int u = 0; u < form.distinct; ++u)
    for (int i = 0; i < form.streams; ++i) {
      const float weight = form.weight[u][i];
      out.by.keyed[i] += weight * keyed[u];
      for (int j = 0; j < form.streams; ++j)
        out.by.own[i][j] += weight * form.weight[u][j] * own[u];
    }
  return out;
}

}  // namespace resroute
