"""Codecs whose codes are points of a grid for several channels together."""
