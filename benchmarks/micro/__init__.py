"""Benches of one operation: a decoded token, the kernels, the link to a tier, the caches that transformers has."""
