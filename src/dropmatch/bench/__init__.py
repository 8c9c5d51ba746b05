"""Benchmarks: evaluation sets, side-by-side measurement and results files."""
