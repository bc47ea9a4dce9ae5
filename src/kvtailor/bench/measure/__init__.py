"""What is read from the machine and from samples: memory, arithmetic, versions, intervals and tests."""
