"""The stage `encode`: kept keys and values of some lanes -> an immutable segment. One file is one codec."""
