"""The lm-evaluation-harness over the compressed cache."""
