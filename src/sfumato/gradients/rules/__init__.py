"""Rules for per-example gradients, one short file per family of layers; `fallback` covers whatever has none."""
