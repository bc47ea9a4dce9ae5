"""Attention over lanes: the definition, and the faster forms that are tested against it."""
