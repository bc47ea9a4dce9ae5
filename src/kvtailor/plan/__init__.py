"""Plans: which method does the work in each stage, under which budget; read from Python, TOML or one line."""

from kvtailor.plan.plan import Plan, parse

__all__ = ["Plan", "parse"]
