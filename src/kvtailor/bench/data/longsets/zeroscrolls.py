"""The 10 sets of ZeroSCROLLS with their official lengths and metrics.

Source: github.com/tau-nlp/zero_scrolls at c994676234c6, experiments/hf/run_hf_model.py (truncation),
experiments/api/api.py (lengths of the answers, chat models) and openai_api.py, MIT licence. The examples of its data
set come as whole prompts; the indices beside them give where document and query stand in one.

A prompt that is too long loses the end of its document: the separator of its set (a note that the rest is left out)
and the query follow what stays. A chat model gets the prompt up to the end of the query, without the line that opens
the answer, and except for summaries a request to explain nothing.

The answers of the test split are not public, so that the examples are those of the validation split, about 20 a set.
"""

from __future__ import annotations

from kvtailor.bench.data.longsets.sets import LongSet

__all__ = ["SUMMARIES", "ZEROSCROLLS"]

SUMMARIES = ("gov_report", "summ_screen_fd", "qmsum", "squality")
_SETS = (
    LongSet("gov_report", "rouge_geometric_mean", 1024),
    LongSet("summ_screen_fd", "rouge_geometric_mean", 512),
    LongSet("qmsum", "rouge_geometric_mean", 512),
    LongSet("squality", "rouge_geometric_mean", 512),
    LongSet("qasper", "f1", 128),
    LongSet("narrative_qa", "f1", 64),
    LongSet("quality", "accuracy", 10),
    LongSet("musique", "f1", 32),
    LongSet("space_digest", "exponential_similarity", 36),
    LongSet("book_sum_sort", "concordance_index", 256),
)
ZEROSCROLLS = {each.name: each for each in _SETS}
