"""Decoding steps that are recorded once and replayed, without work of the host for each kernel."""
