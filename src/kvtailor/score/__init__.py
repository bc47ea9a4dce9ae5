"""The stage `score`: evidence -> one number for each held token. One file is one method; see `contract.py`."""
