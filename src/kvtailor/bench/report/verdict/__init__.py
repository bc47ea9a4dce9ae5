"""The sentence above a table."""
