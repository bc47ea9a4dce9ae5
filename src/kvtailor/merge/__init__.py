"""The stage `merge`: what is not kept -> into what is kept. One file is one method; see `contract.py`."""
