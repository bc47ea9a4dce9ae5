"""How many bytes a cache will hold, before any run."""
