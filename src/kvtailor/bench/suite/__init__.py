"""Suites: the tables of a published report, as TOML, and what fills them."""
