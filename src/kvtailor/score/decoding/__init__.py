"""Scorers made for long answers: they cut while a model decodes, and some keep the whole prompt."""
