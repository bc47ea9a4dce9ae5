"""Allocators that look at what the newest queries attend to."""
