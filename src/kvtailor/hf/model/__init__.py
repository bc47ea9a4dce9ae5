"""What kvtailor reads from a model: where it is found, its sizes, its modules, its fingerprint; and what is refused."""
