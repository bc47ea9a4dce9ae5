"""Texts and questions to measure on: corpora, public sets, long-context benchmarks, generated documents."""
