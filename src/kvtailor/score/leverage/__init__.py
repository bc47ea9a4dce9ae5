"""Scorers by statistical leverage of keys or values, and the attention that is blended with it."""
