"""Attention over lanes: the definition, and the faster forms in torch, C++ and Triton that are tested against it."""
