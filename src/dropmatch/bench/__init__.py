"""Benchmarks: workloads, side-by-side measurement and results files."""
