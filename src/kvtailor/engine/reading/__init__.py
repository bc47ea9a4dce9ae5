"""How what a layer holds is read where a plain attention over keys and values is not the whole of it."""
