"""Codecs of small floats whose neighbouring channels share a scale, in formats that hardware reads."""
