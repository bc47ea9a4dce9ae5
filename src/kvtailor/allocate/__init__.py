"""The stage `allocate`: a total budget -> integers that sum exactly. One file is one method; see `contract.py`."""
