"""Codecs that store coordinates in a subspace of fewer directions than a head has channels."""
