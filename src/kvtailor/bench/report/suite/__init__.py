"""The filled tables of a suite."""
