"""A model run under a plan: prefill, generation, sessions, questions to one context, caches that see the same text."""
