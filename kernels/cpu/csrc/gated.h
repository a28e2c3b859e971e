// The first half of a gated MLP: act(gate) * up, where gates and ups are one product.
#pragma once

#include "elementwise.h"
#include "product.h"

namespace pagewire {

// A panel of gates, and at once the panel of ups that it meets: whole panels of each.
template <class T>
void gate_and_up(const PackedWeight& w, const PreparedRows& x, int64_t activation, T* act,
                 int threads) {
  int64_t inter = w.out / 2, panels = inter / PANEL;
  for_panels(panels, x.count, 2 * w.in, threads, [&](int64_t panel, int64_t row, int64_t rows) {
    alignas(64) float gates[ROW_BLOCK * PANEL], ups[ROW_BLOCK * PANEL];
    const char* from = static_cast<const char*>(x.data) + row * x.row_bytes;
    multiply_panel(w, panel, from, x.row_bytes, rows, gates);
    multiply_panel(w, panels + panel, from, x.row_bytes, rows, ups);
    vf bias[4] = {};
    if (w.bias != nullptr)
      for (int i = 0; i < 4; i++)
        bias[i] = load(w.bias + (i / 2) * inter + panel * PANEL + (i % 2) * W);
    for (int64_t r = 0; r < rows; r++)
      for (int i = 0; i < 2; i++) {
        int64_t at = r * PANEL + i * W;
        store(act + (row + r) * inter + panel * PANEL + i * W,
              activate(activation, load(gates + at) + bias[i]) * (load(ups + at) + bias[2 + i]));
      }
  });
}

template <class T>
void gate_then_up(const PackedWeight& w, const PreparedRows& x, int64_t activation, T* act,
                  int threads) {
  struct GateUp;
  int64_t inter = w.out / 2;
  T* gate_up = scratch<GateUp, T>(size_t(x.count * w.out));
  product(w, x, threads, [&](int64_t row, int64_t column, int64_t columns, const float* sums) {
    store_columns(gate_up + row * w.out + column, sums, columns);
  });
  for_rows(x.count, inter, threads, [&](int64_t t) {
    activation_mul_row(activation, gate_up + t * w.out, gate_up + t * w.out + inter,
                       act + t * inter, inter);
  });
}

// x [rows, w.in], prepared for w [2 I, w.in] -> act [rows, I]
template <class T>
void gated_product(const PackedWeight& w, const PreparedRows& x, int64_t activation, T* act,
                   int threads) {
  if (w.out / 2 % PANEL == 0)
    gate_and_up(w, x, activation, act, threads);
  else
    gate_then_up(w, x, activation, act, threads);
}

}  // namespace pagewire
