"""Generated documents whose end needs their beginning."""
