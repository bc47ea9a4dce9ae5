"""Attention of few queries, and of a prompt with its mass, in Triton for NVIDIA GPUs.

Importing this package imports nothing; each of its modules needs triton. `ops.triton_launch.missing` gives the reason
why one cannot be used.
"""
