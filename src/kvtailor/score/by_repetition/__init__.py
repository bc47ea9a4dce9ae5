"""Scorers that follow a repetition of the context: KVzip weighed otherwise, networks that predict it."""
