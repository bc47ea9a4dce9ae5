"""Its place beside `__init__.py` puts the repository on the path, so that tests can import `tests.held_rows`."""
