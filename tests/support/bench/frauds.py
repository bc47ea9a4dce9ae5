"""The classic frauds, each with its honest counterpart: FRAUDS[name](True) and FRAUDS[name](False)."""

import math
import random
from dataclasses import replace

import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, contestant, subject
from tests.support.bench.shared_prefill import Louder
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.bench.checks import check_records
from kvtailor.bench.data.overlap import Calibrated
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure.kept_prompts import KeptPrompts
from kvtailor.bench.runner import run
from kvtailor.bench.schema import Record
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.ledger import Entry, Ledger
from kvtailor.plan import Plan

ALL = generated_text(40_000)
TEXT, OTHER = ALL[:14_000], ALL[20_000:]
PANGRAM = "The quick brown fox jumps over the lazy dog. " * 10_000


def task(**changes):
    given = {"text": TEXT, "source": "wikitext", "context": 200, "continuation": 40, "windows": 8}
    return Perplexity(**given | changes)


def bench(caches=None, tasks=None, model=None, plans=None, whole=None, **options):
    given = subject(model or CountingModel(), **(caches or {}))
    if whole is not None:
        object.__setattr__(given, "whole_budget", whole)
    labels = [contestant(name.replace("_", " ")) for name in caches or {}]
    return run(given, [FULL, *(plans or labels)], tasks or [task()], bandwidth=False, **options)


def replaced_full(cache):
    given = subject(CountingModel())
    object.__setattr__(given, "make_cache", lambda model, plan: cache())
    return run(given, [FULL], [task()], bandwidth=False)


def identity(fraud):
    replaced_full(lambda: DummyCache(keep=199 if fraud else None))


def whole_budget(fraud):
    caches = {"one": DummyCache(keep=20), "one_whole": DummyCache(keep=150 if fraud else None)}
    whole = {"full": (), "one": ("one whole",)}
    return bench(caches, plans=[contestant("one")], whole=whole.__getitem__)


def repeated_data(fraud):
    bench(tasks=[task(text=TEXT[:240] * 8 if fraud else TEXT, least_distinct=0.0)])


def repeated_text(fraud):
    bench(tasks=[task(text=PANGRAM if fraud else TEXT)])


def calibration(fraud):
    made = Calibrated.on(TEXT if fraud else OTHER, name="ranks.safetensors", model="dummy", text_name="wikitext:test")
    return bench({"one": DummyCache(keep=20)}, plans=[replace(contestant("one"), calibration=(made,))])


def two_names(fraud):
    # The fallback of the CS3602 report: PG-19 is WikiText, five times.
    tasks = [task(windows=3), task(text=TEXT * 5 if fraud else OTHER, source="pg19", windows=3)]
    bench(tasks=tasks)


def different_data(fraud):
    records = bench({"one": DummyCache(keep=20)})
    given = {"text_hash": "of other tokens"} if fraud else {}
    check_records([*records[:-1], replace(records[-1], **given)])


def other_data(fraud):
    [one] = bench()
    values = one.values if fraud else {"nll": tuple(x + 0.01 for x in one.values["nll"])}
    check_records([one, replace(one, text="pg19", text_hash="another", values=values)])


def untouched(fraud):
    bench({"liar": DummyCache(claims=20) if fraud else DummyCache(keep=20)})


def equal(fraud):
    bench({"one": DummyCache(keep=20), "other": DummyCache(keep=20, claims=21) if fraud else DummyCache(keep=21)})


def letters(size, alphabet, state):
    return "".join(random.Random(state).choices(alphabet, k=size))


def better(fraud):
    # Nothing of the context comes back, so that forgetting it helps a model that counts.
    windows = [letters(200, "abcdefgh", i) + letters(40, "uvwxyz" if fraud else "abcdefgh", 100 + i) for i in range(8)]
    bench({"one": DummyCache(keep=5)}, [task(text="".join(windows))])


def full_holds_less(fraud):
    replaced_full(lambda: DummyCache(claims=100 if fraud else None))


class Masked(DummyCache):
    """Predicts from what it keeps, and keeps everything."""

    frees = False

    def ledger(self):
        return type(self).books(self, self.seen)

    @staticmethod
    def books(cache, size):
        kept = torch.empty(size, dtype=torch.int64)
        entry = Entry(layer=0, stage="encode", tensors={"all": kept}, closed_form=8 * size)
        return Ledger.of([entry], layers=1, full=8 * cache.seen, seen=cache.seen, held=float(cache.held()))


def with_books(books, *keeps):
    """A run in which the ledgers of plans `method @ tokens=N` are what `books(cache, keep)` says."""

    class Cooked(DummyCache):
        def ledger(self):
            return books(self, self.keep) if self.keep else super().ledger()

    def make(model, plan):
        return DummyCache() if plan == "full" else Cooked(keep=int(plan.split("=")[1]))

    given = Subject(name="dummy", model=CountingModel(), tokenizer=subject(None).tokenizer, make_cache=make)
    plans = [FULL, *(contestant(f"method @ tokens={keep}") for keep in keeps)]
    return run(given, plans, [task()], bandwidth=False)


def nothing_freed(fraud):
    with_books(lambda cache, keep: Masked.books(cache, cache.seen if fraud else keep), 20)


def hidden_bytes(fraud):
    resident = 8_000_000 if fraud else 2_100_000
    check_records([record("one", "memory", bytes_held=2_000_000, bytes_full=8_000_000, bytes_resident=resident)])


def nominal_bytes(fraud):
    # R0: 80.00 MB at every budget, since a module's constant was printed.
    with_books(lambda cache, keep: Masked.books(cache, 80 if fraud else keep), 20, 60)


def impossible_bytes(fraud):
    [full] = bench()
    device = {"device": "cuda:0", "weight_bytes": 5000, "machine": {"accelerator_bytes": 6000 if fraud else 7000}}
    check_records([replace(full, bytes_by_tier=None, **device)])


def impossible_peak(fraud):
    check_records([record("one", "memory", bytes_held=2**24, bytes_full=2**24, bytes_peak=2**20 if fraud else 2**25)])


def peak_not_reset(fraud):
    # R0: 9328.09 MB in every row.
    peak = 9328 * 2**20
    later = peak if fraud else 2 * peak
    of = {"bytes_held": 2**30, "bytes_full": 2**30, "bytes_peak": peak}
    check_records(
        [
            record("full", "memory", point={"context": 512}, **of),
            record(
                "full",
                "memory",
                point={"context": 1024},
                **of | {"bytes_full": 2**31, "bytes_held": 2**31, "bytes_peak": later},
            ),
        ]
    )


def cold(fraud):
    check_records(timed(one=[3.0 if fraud else 1.0] * 6 + [1.0] * 6))


def throttled(fraud):
    check_records(timed(one=[1.0] * 7 + [1.5 if fraud else 1.0] * 6))


def shared_prefill(fraud):
    model, plan = build("llama"), Plan.parse("snapkv(window=4) @ tokens=20")
    plan = replace(plan, attend=Louder()) if fraud else plan
    kept = KeptPrompts()
    kept.begin([plan])
    with torch.inference_mode():
        kept.filled(model, prompts((60,))[0], kvtailor.cache_for(model, plan), last_only=True)


FRAUDS = {
    "shared prefill": shared_prefill,
    "identity": identity,
    "whole budget": whole_budget,
    "repeated data": repeated_data,
    "repeated text": repeated_text,
    "calibration on the evaluated text": calibration,
    "one text under two names": two_names,
    "different data": different_data,
    "same results on other data": other_data,
    "untouched cache": untouched,
    "equal results": equal,
    "better than full": better,
    "full that holds less": full_holds_less,
    "nothing freed": nothing_freed,
    "hidden bytes": hidden_bytes,
    "nominal bytes": nominal_bytes,
    "impossible bytes": impossible_bytes,
    "impossible peak": impossible_peak,
    "peak not reset": peak_not_reset,
    "cold side": cold,
    "throttled side": throttled,
}


def record(label, task_name, **fields):
    common = {"run": "r", "started": "now", "model": "m", "plan": label, "plan_hash": f"#{label}", "task_version": 1}
    return Record(**common | {"label": label, "task": task_name} | fields)


def timed(sides=4, state=0, noise=0.04, **factors):
    """Speed records of some sides whose times are 0.1 s, with noise, times the factors by round of those named."""
    draw = random.Random(state)
    rounds = max(map(len, factors.values()), default=12)
    names = [*factors, *(f"side {i}" for i in range(sides - len(factors)))]
    found = []
    for name in names:
        of = factors.get(name, [1.0] * rounds)
        times = {what: tuple(0.1 * f * math.exp(draw.gauss(0, noise)) for f in of) for what in ("ttft", "tpot")}
        found.append(record(name, "speed", values={**times, "disturbed": (0.0,) * rounds}, timings={"ttft": {}}))
    return found


def answers(full, ours, name="hit", task_name="needle"):
    """Records of a plan that holds a quarter."""
    held = {"tokens_seen": 100, "bytes_full": 1000, "text_hash": "h"}
    return [
        record("full", task_name, values={name: tuple(full)}, tokens_held=100.0, bytes_held=1000, **held),
        record("one", task_name, values={name: tuple(ours)}, tokens_held=25.0, bytes_held=250, **held),
    ]


class Numbers:
    """A tokenizer that gives the same ids for every text."""

    is_fast = False
    eos_token_id = bos_token_id = None

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, text, **options):
        return {"input_ids": self.ids if text else []}
