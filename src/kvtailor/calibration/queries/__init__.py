"""Kinds of calibration that are statistics of queries."""
