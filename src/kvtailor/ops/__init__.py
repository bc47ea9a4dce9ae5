"""Plain arithmetic on tensors that more than one room needs. Knows torch and nothing of plans, caches or models."""
