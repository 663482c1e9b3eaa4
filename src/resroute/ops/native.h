// Shared by the native kernels: sixteen floats at a time, rows of float32 or bfloat16, chunks of
// rows.
//
// Every kernel works on float32 rows whose length is a multiple of 16. A row that is neither is
// copied to scratch memory in L1 first, padded with zeros, so no kernel has a tail or a type.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace resroute {

using at::Tensor;
using OptionalTensors = c10::List<std::optional<Tensor>>;

constexpr int64_t kLanes = 16;

inline int64_t round_up(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

#if defined(__GNUC__) && !defined(RESROUTE_PLAIN_VECTORS)

#define RESROUTE_INLINE inline __attribute__((always_inline))
#define RESROUTE_PREFETCH(address, write) __builtin_prefetch(address, write)

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

RESROUTE_INLINE Vec splat(float x) { return x - Vec{}; }

RESROUTE_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

RESROUTE_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

RESROUTE_INLINE Vec load_half(const uint16_t* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return (Vec)(__builtin_convertvector(h, Ints) << 16);
}

RESROUTE_INLINE void store_half(uint16_t* p, Vec v) {
#if defined(__AVX512BF16__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  // nearest, ties to even; a NaN stays one
  Ints bits = (Ints)v;
  Ints rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Ints nan = v != v;
  Halves h = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
#endif
  std::memcpy(p, &h, sizeof h);
}

// a NaN in b is kept
RESROUTE_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// The first `count` lanes of p, zeros after them. Reads sixteen floats whatever the count.
RESROUTE_INLINE Vec load_part(const float* p, int64_t count) {
  static const int32_t mask[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                   -1, -1, -1, -1, -1, -1, -1, -1};
  if (count >= kLanes) return load(p);
  Ints keep;
  std::memcpy(&keep, mask + kLanes - count, sizeof keep);
  return (Vec)((Ints)load(p) & keep);
}

// exp as 2^k times a polynomial (Cephes); below -87 it stays at e^-87. For x up to 88.
RESROUTE_INLINE Vec exp(Vec x) {
  const Vec lowest = splat(-87.0f), magic = splat(12582912.0f);
  x = x < lowest ? lowest : x;
  Vec shifted = x * 1.44269504f + magic;
  Vec k = shifted - magic;
  Vec f = x - k * 0.693359375f + k * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * (f * f) + f + 1.0f;
  return p * (Vec)(((Ints)shifted + (127 - 0x4b400000)) << 23);
}

// log of a normal number, by two Halley steps on exp from the exponent's bits
RESROUTE_INLINE Vec log(Vec x) {
  Vec y = (__builtin_convertvector((Ints)x - 0x3f800000, Vec)) * 8.26295829e-8f;
  for (int step = 0; step < 2; ++step) {
    Vec e = exp(y);
    y = y + 2.0f * (x - e) / (x + e);
  }
  return y;
}

#if defined(__clang__)
#define RESROUTE_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RESROUTE_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif
RESROUTE_INLINE Vec fold8(Vec a, Vec b) {
  return RESROUTE_SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         RESROUTE_SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
RESROUTE_INLINE Vec fold4(Vec a, Vec b) {
  return RESROUTE_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         RESROUTE_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
RESROUTE_INLINE Vec fold2(Vec a, Vec b) {
  return RESROUTE_SHUFFLE(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
         RESROUTE_SHUFFLE(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
RESROUTE_INLINE Vec fold1(Vec a, Vec b) {
  return RESROUTE_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
         RESROUTE_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

// Lane i of the result is the sum over the lanes of v[i]; C up to 16.
template <int C>
RESROUTE_INLINE Vec sums(const Vec (&v)[C]) {
  constexpr int C8 = (C + 1) / 2, C4 = (C8 + 1) / 2, C2 = (C4 + 1) / 2;
  Vec a[C8], b[C4], c[C2];
  const Vec zero = {};
  // the remainders only keep in range the indices of what is not taken
  for (int i = 0; i < C8; ++i) a[i] = fold8(v[2 * i], 2 * i + 1 < C ? v[(2 * i + 1) % C] : zero);
  for (int i = 0; i < C4; ++i) b[i] = fold4(a[2 * i], 2 * i + 1 < C8 ? a[(2 * i + 1) % C8] : zero);
  for (int i = 0; i < C2; ++i) c[i] = fold2(b[2 * i], 2 * i + 1 < C4 ? b[(2 * i + 1) % C4] : zero);
  return fold1(c[0], C2 > 1 ? c[C2 - 1] : zero);
}

#else

#define RESROUTE_INLINE inline
#define RESROUTE_PREFETCH(address, write) ((void)(address))

// the same for compilers without vector extensions; the loops are theirs to vectorise
struct Vec {
  float lane[kLanes] = {};
};

template <class F>
inline Vec lanes(F f) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v.lane[i] = f(i);
  return v;
}

inline Vec splat(float x) {
  return lanes([&](int) { return x; });
}
inline Vec operator+(const Vec& a, const Vec& b) {
  return lanes([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec operator-(const Vec& a, const Vec& b) {
  return lanes([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec operator*(const Vec& a, const Vec& b) {
  return lanes([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec operator/(const Vec& a, const Vec& b) {
  return lanes([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec operator*(const Vec& a, float b) { return a * splat(b); }
inline Vec& operator+=(Vec& a, const Vec& b) { return a = a + b; }
inline Vec larger(const Vec& a, const Vec& b) {
  return lanes([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec exp(const Vec& x) {
  return lanes([&](int i) { return std::exp(x.lane[i]); });
}
inline Vec log(const Vec& x) {
  return lanes([&](int i) { return std::log(x.lane[i]); });
}
inline Vec load(const float* p) {
  return lanes([&](int i) { return p[i]; });
}
inline Vec load_part(const float* p, int64_t count) {
  return lanes([&](int i) { return i < count ? p[i] : 0.0f; });
}
inline void store(float* p, const Vec& v) { std::memcpy(p, v.lane, sizeof v.lane); }
inline Vec load_half(const uint16_t* p) {
  return lanes([&](int i) { return c10::detail::f32_from_bits(p[i]); });
}
inline void store_half(uint16_t* p, const Vec& v) {
  for (int i = 0; i < kLanes; ++i) p[i] = c10::detail::round_to_nearest_even(v.lane[i]);
}

template <int C>
inline Vec sums(const Vec (&v)[C]) {
  Vec out;
  for (int c = 0; c < C; ++c)
    for (int i = 0; i < kLanes; ++i) out.lane[c] += v[c].lane[i];
  return out;
}

#endif

RESROUTE_INLINE float sum(Vec v) {
  const Vec one[1] = {v};
  float out[kLanes];
  store(out, sums(one));
  return out[0];
}

// The rows of a tensor, read and written as padded float32 rows.
struct Rows {
  char* data = nullptr;
  int64_t width = 0;
  bool half = false;

  explicit operator bool() const { return data != nullptr; }
  bool whole() const { return width % kLanes == 0; }
  bool direct() const { return !half && whole(); }
  char* at(int64_t row) const { return data + row * width * (half ? 2 : 4); }
  uint16_t* halves(int64_t row) const { return reinterpret_cast<uint16_t*>(at(row)); }
  float* floats(int64_t row) const { return reinterpret_cast<float*>(at(row)); }

  // the row itself where it can be used as it is, else its copy in `scratch`
  const float* read(int64_t row, float* scratch) const {
    if (direct()) return floats(row);
    const int64_t whole_part = width / kLanes * kLanes;
    for (int64_t d = 0; d < whole_part; d += kLanes)
      store(scratch + d, half ? load_half(halves(row) + d) : load(floats(row) + d));
    if (whole_part < width) {
      alignas(64) float tail[kLanes] = {};
      alignas(64) uint16_t half_tail[kLanes] = {};
      const int64_t rest = width - whole_part;
      if (half) {
        std::memcpy(half_tail, halves(row) + whole_part, rest * 2);
        store(scratch + whole_part, load_half(half_tail));
      } else {
        std::memcpy(tail, floats(row) + whole_part, rest * 4);
        store(scratch + whole_part, load(tail));
      }
    }
    return scratch;
  }

  // where to write a row before `commit`
  float* target(int64_t row, float* scratch) const { return direct() ? floats(row) : scratch; }

  void commit(int64_t row, const float* from) const {
    if (direct()) return;
    const int64_t whole_part = width / kLanes * kLanes;
    for (int64_t d = 0; d < whole_part; d += kLanes)
      half ? store_half(halves(row) + d, load(from + d)) : store(floats(row) + d, load(from + d));
    if (whole_part < width) {
      const int64_t rest = width - whole_part;
      uint16_t half_tail[kLanes];
      store_half(half_tail, load(from + whole_part));
      if (half)
        std::memcpy(halves(row) + whole_part, half_tail, rest * 2);
      else
        std::memcpy(floats(row) + whole_part, from + whole_part, rest * 4);
    }
  }

  void prefetch(int64_t row, bool write) const {
    const char *begin = at(row), *end = at(row + 1);
    for (const char* p = begin; p < end; p += 64) {
      if (write)
        RESROUTE_PREFETCH(p, 1);
      else
        RESROUTE_PREFETCH(p, 0);
    }
  }
};

// `what` names the argument in the message.
inline Rows rows_of(const Tensor& tensor, int64_t rows, int64_t width, const char* what) {
  const auto type = tensor.scalar_type();
  TORCH_CHECK(tensor.device().is_cpu(), "resroute's native ops are for the CPU: ", what, " is on ",
              tensor.device(), ".");
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16,
              "resroute's native ops take float32 and bfloat16 tensors: ", what, " is ", type, ".");
  TORCH_CHECK(tensor.is_contiguous(), "resroute's native ops take contiguous tensors: ", what,
              " is not.");
  TORCH_CHECK(tensor.numel() == rows * width, "resroute: the shape of ", what, " is ",
              tensor.sizes(), ", which is not ", rows, " rows of ", width, ".");
  return {static_cast<char*>(tensor.data_ptr()), width, type == at::kBFloat16};
}

inline Rows rows_of(const std::optional<Tensor>& tensor, int64_t rows, int64_t width,
                    const char* what) {
  return tensor.has_value() ? rows_of(*tensor, rows, width, what) : Rows{};
}

// Float32 numbers; null where absent.
inline float* numbers_of(const std::optional<Tensor>& tensor, int64_t count, const char* what) {
  if (!tensor.has_value()) return nullptr;
  TORCH_CHECK(tensor->scalar_type() == at::kFloat, "resroute's native ops take ", what,
              " in float32, not ", tensor->scalar_type(), ".");
  return rows_of(*tensor, count, 1, what).floats(0);
}

inline int64_t num_rows(const Tensor& tensor) {
  const int64_t width = tensor.size(-1);
  return width == 0 ? 0 : tensor.numel() / width;
}

inline Tensor empty_float(at::IntArrayRef sizes) { return at::empty(sizes, at::kFloat); }

inline void check_output_type(at::ScalarType type) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16,
              "resroute's native ops write float32 and bfloat16, not ", type, ".");
}

// Scratch memory of this thread, kept between calls; one user at a time.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    thread_local std::vector<float> memory;
    if (static_cast<int64_t>(memory.size()) < floats + kLanes) memory.resize(floats + kLanes);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    next_ = reinterpret_cast<float*>((address + 63) / 64 * 64);
    last_ = next_ + floats;
  }

  float* take(int64_t floats) {
    float* p = next_;
    next_ += round_up(floats);
    TORCH_INTERNAL_ASSERT(next_ <= last_);
    return p;
  }

  float* zeros(int64_t floats) {
    float* p = take(floats);
    std::fill(p, p + round_up(floats), 0.0f);
    return p;
  }

 private:
  float* next_;
  float* last_;
};

// How many chunks `rows` are cut into. It depends on their size and the number of threads alone, so
// sums over chunks in order are equal bit for bit from call to call.
inline int64_t num_chunks(int64_t rows, int64_t work_per_row) {
  constexpr int64_t least_work = 1 << 15;
  const int64_t wanted = rows * work_per_row / least_work;
  return std::max<int64_t>(1, std::min<int64_t>({wanted, at::get_num_threads(), rows}));
}

// f(chunk, first row, last row + 1)
template <class F>
void for_chunks(int64_t rows, int64_t chunks, const F& f) {
  if (chunks == 1) return f(int64_t{0}, int64_t{0}, rows);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) f(c, rows * c / chunks, rows * (c + 1) / chunks);
  });
}

}  // namespace resroute
