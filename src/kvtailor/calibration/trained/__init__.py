"""Kinds of calibration that train networks on what a repetition of the context finds."""
