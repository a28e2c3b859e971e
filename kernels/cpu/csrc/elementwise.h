// What is done to single rows: RMSNorm, addition, the gates of gated MLPs, rotary embedding.
#pragma once

#include <cmath>

#include "api.h"
#include "cache_codes.h"
#include "parallel.h"

namespace pagewire {

template <class T>
float sum_of_squares(const T* x, int64_t n) {
  vf total[2] = {};
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    vf a = load(x + i), b = load(x + i + W);
    total[0] += a * a;
    total[1] += b * b;
  }
  for (; i < n; i += W) {
    vf a = n - i >= W ? load(x + i) : load_first(x + i, n - i);
    total[0] += a * a;
  }
  return sum(total[0] + total[1]);
}

template <class T>
void normalize(const T* x, const T* weight, T* out, int64_t n, float eps) {
  vf inverse_rms = splat(1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps));
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, load(x + i) * inverse_rms * load(weight + i));
  if (i < n) {
    vf tail = load_first(x + i, n - i) * inverse_rms * load_first(weight + i, n - i);
    store_first(out + i, tail, n - i);
  }
}

template <class T>
void add(const T* x, T* residual, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(residual + i, load(residual + i) + load(x + i));
  if (i < n)
    store_first(residual + i, load_first(residual + i, n - i) + load_first(x + i, n - i), n - i);
}

inline vf silu(vf x) { return x / (1.0f + exp(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
inline vf gelu_tanh(vf x) {
  vf twice_u = x * (1.5957691216057308f + 0.07135481627159606f * (x * x));
  return x / (1.0f + exp(-twice_u));
}

// The codes of kernels/cpu/library.py.
enum Activation : int64_t { SILU = 0, GELU_TANH = 1 };

inline vf activate(int64_t activation, vf x) {
  return activation == SILU ? silu(x) : gelu_tanh(x);
}

template <class T>
void activation_mul_row(int64_t activation, const T* gate, const T* up, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(out + i, activate(activation, load(gate + i)) * load(up + i));
  if (i < n) {
    vf tail = activate(activation, load_first(gate + i, n - i)) * load_first(up + i, n - i);
    store_first(out + i, tail, n - i);
  }
}

// One head: element i turns with element i + half; the rest is copied. from may be to. half may
// be 0, which copies all.
template <class T>
void rotate_head(const T* from, T* to, const float* cos, const float* sin, int64_t half, int64_t dim) {
  int64_t i = 0;
  for (; i + W <= half; i += W) {
    vf a = load(from + i), b = load(from + half + i), c = load(cos + i), s = load(sin + i);
    store(to + i, a * c - b * s);
    store(to + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    float a = to_float(from[i]), b = to_float(from[half + i]);
    from_float(a * cos[i] - b * sin[i], to + i);
    from_float(b * cos[i] + a * sin[i], to + half + i);
  }
  if (from != to) std::memcpy(to + 2 * half, from + 2 * half, size_t(dim - 2 * half) * sizeof(T));
}

struct RopeSizes {
  int64_t tokens, heads, kv_heads, head_dim, rotary_dim, max_positions, num_blocks, block_size;
  int64_t q_token, q_head, k_token, k_head, v_token, v_head;  // strides
  int64_t k_block, k_slot, k_cache_head, v_block, v_slot, v_cache_head;
};

// The first token whose position or slot is out of range, or -1.
inline int64_t find_stray(const RopeSizes& n, const int64_t* positions, const int64_t* slots) {
  for (int64_t t = 0; t < n.tokens; t++)
    if (positions[t] < 0 || positions[t] >= n.max_positions || slots[t] < -1 ||
        slots[t] >= n.num_blocks * n.block_size)
      return t;
  return -1;
}

// RMS norms of single heads, [D] each; null norms nothing.
struct HeadNorms {
  const void *q, *k;
  float eps;
};

template <class T, class C>
void round_row(const T* from, C* to, int64_t dim) {
  int64_t i = 0;
  for (; i + W <= dim; i += W) store(to + i, load(from + i));
  if (i < dim) store_first(to + i, load_first(from + i, dim - i), dim - i);
}

// Writes a head's row as the cache holds it.
template <class T, class C>
void write_row(const T* from, C* to, int64_t dim, float* scale) {
  if constexpr (std::is_same_v<C, T>)
    std::memcpy(to, from, size_t(dim) * sizeof(T));
  else if constexpr (!IS_CODE<C>)
    round_row(from, to, dim);
  else if constexpr (std::is_same_v<C, e4m3>)
    encode_row(from, *scale, dim, to);
  else
    *scale = encode_row(from, dim, to);
}

// cos_sin is dense float32 [max_positions, rotary_dim], or null where rotary_dim is 0. C is the
// element type of a cache of codes.format.
template <class T, class C>
void rope_and_cache(const RopeSizes& n, const HeadNorms& norms, T* q, const T* k, const T* v,
                    const int64_t* positions, const float* cos_sin, C* k_cache, C* v_cache,
                    const CacheCodes& codes, const int64_t* slots, int threads) {
  int64_t half = n.rotary_dim / 2;
  const T *q_norm = static_cast<const T*>(norms.q), *k_norm = static_cast<const T*>(norms.k);
  for_rows(n.tokens, (n.heads + 2 * n.kv_heads) * n.head_dim, threads, [&](int64_t t) {
    struct NormedKey;
    struct RotatedKey;
    const float* cos = half > 0 ? cos_sin + positions[t] * n.rotary_dim : nullptr;
    const float* sin = half > 0 ? cos + half : nullptr;
    for (int64_t h = 0; h < n.heads; h++) {
      T* head = q + t * n.q_token + h * n.q_head;
      if (q_norm != nullptr) normalize(head, q_norm, head, n.head_dim, norms.eps);
      rotate_head(head, head, cos, sin, half, n.head_dim);
    }
    if (slots[t] < 0) return;
    int64_t block = slots[t] / n.block_size, offset = slots[t] % n.block_size;
    for (int64_t h = 0; h < n.kv_heads; h++) {
      C* k_to = k_cache + block * n.k_block + offset * n.k_slot + h * n.k_cache_head;
      C* v_to = v_cache + block * n.v_block + offset * n.v_slot + h * n.v_cache_head;
      float *k_scale = nullptr, *v_scale = nullptr;
      if constexpr (IS_CODE<C>) {
        bool is_paged = std::is_same_v<C, int8>;
        k_scale = codes.k_scale + (is_paged ? block * codes.k_block + h * codes.k_head + offset : h);
        v_scale = codes.v_scale + (is_paged ? block * codes.v_block + h * codes.v_head + offset : h);
      }
      const T* k_from = k + t * n.k_token + h * n.k_head;
      if (k_norm != nullptr) {
        T* normed = scratch<NormedKey, T>(size_t(n.head_dim));
        normalize(k_from, k_norm, normed, n.head_dim, norms.eps);
        k_from = normed;
      }
      if constexpr (std::is_same_v<C, T>) {
        rotate_head(k_from, k_to, cos, sin, half, n.head_dim);
      } else {
        T* rotated = scratch<RotatedKey, T>(size_t(n.head_dim));
        rotate_head(k_from, rotated, cos, sin, half, n.head_dim);
        write_row(rotated, k_to, n.head_dim, k_scale);
      }
      write_row(v + t * n.v_token + h * n.v_head, v_to, n.head_dim, v_scale);
    }
  });
}

}  // namespace pagewire
