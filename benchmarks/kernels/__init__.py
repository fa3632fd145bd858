"""Kernels against the bandwidth of the same machine: `python -m benchmarks.kernels`."""
