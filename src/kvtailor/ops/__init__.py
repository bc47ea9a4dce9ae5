"""Plain arithmetic on tensors that more than one stage needs. Knows torch and nothing of plans, caches or models."""
