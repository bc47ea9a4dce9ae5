"""Segments that live on another tier than the device: what moves, when, into which buffers, and what that takes."""
