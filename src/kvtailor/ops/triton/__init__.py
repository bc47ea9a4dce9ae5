"""The implementations of `ops` for NVIDIA GPUs, in Triton: attention over the compressed bytes, sums over queries,
packing.

Importing this package imports nothing; each of its modules needs triton. `installed.missing()` gives the reason why one
cannot be used.
"""
