"""Numbers of fewer bits or fewer directions in place of states: quantisers, fitted levels, rotations and subspaces."""
