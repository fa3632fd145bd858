"""The engine on a CPU, beside transformers: `python -m benchmarks.cpu`."""
