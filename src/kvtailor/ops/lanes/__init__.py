"""Choosing and moving tokens: which of them are kept, in which lanes they come to lie, and how many each head gets."""
