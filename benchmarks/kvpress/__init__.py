"""kvpress's methods beside ours, at the same kept KVs: `python -m benchmarks.kvpress`."""
