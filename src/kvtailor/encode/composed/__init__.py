"""Codecs that are made of several others."""
