from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject

from kvtailor.bench.checks import warnings_of
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.report import summarise
from kvtailor.bench.runner import run
from kvtailor.bench.tasks.perplexity import Perplexity


def test_warnings_of_the_checks_are_read_below_the_table():
    plans = {"one": DummyCache(keep=20), "other": DummyCache(keep=20)}
    task = Perplexity(text=generated_text(4000), source="text", context=100, continuation=20, windows=6)
    records = run(
        subject(CountingModel(), **plans), [FULL, contestant("one"), contestant("other")], [task], bandwidth=False
    )
    found = warnings_of(records)
    assert found and "one" in found[0] and "other" in found[0]
    assert set(found) <= set(summarise(records).footnotes)
