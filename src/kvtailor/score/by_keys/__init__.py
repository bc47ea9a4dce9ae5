"""Scorers that need nothing but the keys and values that are held: no queries and no attention."""
