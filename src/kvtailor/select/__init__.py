"""The stage `select`: scores and integers -> which tokens stay. One file is one method; see `contract.py`."""
