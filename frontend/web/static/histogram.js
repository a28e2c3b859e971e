// Histograms as /live tells them: counts[i] observations of at most bounds[i], one more count
// than bounds.

export function difference(now, before) {
  return { bounds: now.bounds, counts: now.counts.map((count, i) => count - (before.counts[i] ?? 0)) };
}

/** The value below which a share q of the observations is, as Prometheus' histogram_quantile
 *  reads it between two bounds; null of none. Infinity stands for "beyond all bounds". */
export function quantile({ bounds, counts }, q) {
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total <= 0) return null;
  const rank = q * total;
  let below = 0;
  for (const [i, count] of counts.entries()) {
    if (count > 0 && below + count >= rank) {
      if (i === bounds.length) return Infinity;
      const low = i ? bounds[i - 1] : 0;
      return low + (bounds[i] - low) * ((rank - below) / count);
    }
    below += count;
  }
  return Infinity;
}
