"""Attention of few queries by the C++ kernels of `ops/cpu`: what Python tells them, and calls."""
