"""What is measured, and the results; run from the repository's root, not part of the library.

Here: benchmarks of kernels, of the engine on a CPU, and of others beside us. Not here: whatever a
user of the installed package runs (`kvjax throughput`, `kvjax evaluate`).
"""
