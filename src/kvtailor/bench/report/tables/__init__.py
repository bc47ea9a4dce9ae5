"""The tables of a report, and the sentences below them."""
