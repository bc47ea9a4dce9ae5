"""The stage `attend`: query + segments -> output. One file is one way to read the cache; see `contract.py`."""
