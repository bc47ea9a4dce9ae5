"""Long-context benchmarks: their sets, prompts, truncation and metrics as their authors publish them."""

from kvtailor.bench.data.longsets.loading import BENCHMARKS, long_set, read_examples
from kvtailor.bench.data.longsets.metrics import METRICS, overall, score_example
from kvtailor.bench.data.longsets.sets import Example, LongSet

__all__ = ["BENCHMARKS", "METRICS", "Example", "LongSet", "long_set", "overall", "read_examples", "score_example"]
