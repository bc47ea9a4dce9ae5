"""Allocators that give tokens to layers and heads by what one more of them is worth there."""
