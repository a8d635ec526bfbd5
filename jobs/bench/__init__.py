"""Benchmarks: each prints one table with the alternative beside ours in the same run."""
