"""Every classic fraud is fed to the bench and caught by name, and its honest twin passes."""

import math
import random
from dataclasses import replace

import pytest
import torch
from tests.bench.dummy import FULL, CountingModel, DummyCache, UniformModel, contestant, subject

from kvtailor.bench import machine, runner
from kvtailor.bench.overlap import Calibrated
from kvtailor.bench.runner import run
from kvtailor.bench.schema import Record, latest, read_records
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.bench.texts import generated_text
from kvtailor.bench.tripwires import MAY_BE_ALLOWED, TRIPWIRES, Fraud, check_records, findings, warnings_of
from kvtailor.errors import KvtailorError, UnknownName
from kvtailor.ledger import Entry, Ledger

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
    bench(caches, plans=[contestant("one")], whole=whole.__getitem__)


def repeated_data(fraud):
    bench(tasks=[task(text=TEXT[:240] * 8 if fraud else TEXT, least_distinct=0.0)])


def repeated_text(fraud):
    bench(tasks=[task(text=PANGRAM if fraud else TEXT)])


def calibration(fraud):
    made = Calibrated.on(TEXT if fraud else OTHER, name="ranks.safetensors", model="dummy", text_name="wikitext:test")
    bench({"one": DummyCache(keep=20)}, plans=[replace(contestant("one"), calibration=(made,))])


def two_names(fraud):
    # The fallback of the CS3602 report: PG-19 is WikiText, five times.
    tasks = [task(windows=3), task(text=TEXT * 5 if fraud else OTHER, source="pg19", windows=3)]
    bench(tasks=tasks)


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
        entry = Entry(layer=0, room="encode", tensors={"all": kept}, closed_form=8 * size)
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
    check_records([record("full", "memory", point={"context": 512}, **of),
                   record("full", "memory", point={"context": 1024}, **of | {"bytes_full": 2**31, "bytes_held": 2**31,
                                                                            "bytes_peak": later})])  # fmt: skip


def cold(fraud):
    check_records(timed(one=[3.0 if fraud else 1.0] * 6 + [1.0] * 6))


def throttled(fraud):
    check_records(timed(one=[1.0] * 7 + [1.5 if fraud else 1.0] * 6))


FRAUDS = {
    "identity": identity,
    "whole budget": whole_budget,
    "repeated data": repeated_data,
    "repeated text": repeated_text,
    "calibration on the evaluated text": calibration,
    "one text under two names": two_names,
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


def test_every_tripwire_has_its_fraud():
    assert set(FRAUDS) == set(TRIPWIRES) and len(set(TRIPWIRES)) == len(TRIPWIRES)


@pytest.mark.parametrize("name", TRIPWIRES)
def test_a_fraud_is_caught_by_name(name):
    with pytest.raises(Fraud) as caught:
        FRAUDS[name](True)
    assert caught.value.name == name and str(caught.value).startswith(f"{name}: ")


@pytest.mark.parametrize("name", TRIPWIRES)
def test_its_honest_twin_passes(name):
    FRAUDS[name](False)


def test_a_fraud_of_no_name_is_none():
    with pytest.raises(UnknownName, match="did you mean 'untouched cache'"):
        Fraud("untouched cash", "x")


@pytest.mark.parametrize(
    ("name", "records"),
    [
        ("untouched cache", lambda: bench({"liar": DummyCache(claims=20)}, [Fidelity(text=TEXT, source="t", context=200,
                                                                                    continuation=40, windows=5)])),
        ("one text under two names", lambda: check_records([record("a", "x", text="one", text_hash="h"),
                                                            record("a", "y", text="two", text_hash="h")])),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_by_room={"encode": 9})])),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_by_layer=(5, 6))])),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_closed_form=11)])),
        ("impossible peak", lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**25,
                                                          bytes_peak_decode=2**20)])),
        ("impossible peak", lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**24,
                                                          bytes_resident=2**24 + 2**22)])),
        ("peak not reset", lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**26,
                                                         bytes_peak_decode=2**26)])),
        ("impossible bytes", lambda: check_records([record("a", "x", device="cpu", bytes_held=101,
                                                           machine={"memory_bytes": 100})])),
        ("better than full", lambda: check_records(answers([0.0] * 20 + [1.0] * 10, [1.0] * 30))),
        ("cold side", lambda: check_records(timed(one=[10.0] + [1.0] * 4, noise=0.01))),
        ("cold side", lambda: check_records(timed(one=[2.0] * 8 + [1.0] * 8, sides=2))),
    ],
)  # fmt: skip
def test_other_faces_of_the_same_frauds(name, records):
    with pytest.raises(Fraud) as caught:
        records()
    assert caught.value.name == name


def answers(full, ours, name="hit", task_name="needle"):
    """Records of a plan that holds a quarter."""
    held = {"tokens_seen": 100, "bytes_full": 1000, "text_hash": "h"}
    return [record("full", task_name, values={name: tuple(full)}, tokens_held=100.0, bytes_held=1000, **held),
            record("one", task_name, values={name: tuple(ours)}, tokens_held=25.0, bytes_held=250, **held)]  # fmt: skip


def test_a_mask_over_a_real_cache_frees_nothing():
    """A kvtailor cache that keeps all, attends only to the newest, and says that it holds those alone."""
    from tests.seam.zoo import build

    from kvtailor import cache_for

    model, newest = build("llama"), 12

    def masked(model, plan):
        cache = cache_for(model, "full")
        if plan == "full":
            return cache
        honest = cache.held
        cache.held = lambda: honest().clamp(max=newest)
        for layer in cache.layers:
            hide(layer)
        return cache

    def hide(layer):
        whole = layer.attend

        def attend(query, mask, scaling):
            output = whole(query, mask, scaling)
            new, seen = query.shape[2], layer.state.seen
            if new == seen:
                return output
            tail = layer.state.tail.as_segment()
            keys, values = (
                x.unflatten(0, (-1, layer.state.heads)) if x.dim() == 3 else x for x in (tail.keys, tail.values)
            )
            group = query.shape[1] // keys.shape[1]
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            columns, rows = torch.arange(seen), torch.arange(seen - new, seen)[:, None]
            shown = (columns <= rows) & (columns >= seen - new - newest)
            weights = (query @ keys.mT * scaling).masked_fill(~shown, -torch.inf).softmax(-1)
            return (weights @ values).to(output.dtype)

        layer.attend = attend

    ids = torch.randint(3, model.config.vocab_size, (6 * 80,), generator=torch.Generator().manual_seed(0))
    given = Subject(name="tiny", model=model, tokenizer=Numbers(ids.tolist()), make_cache=masked)
    asked = [Perplexity(text="n " * 480, source="numbers", context=64, continuation=16, windows=6, least_distinct=0.0)]
    with pytest.raises(Fraud, match="nothing freed: plan 'mask' says that it holds 12 of 64 tokens"):
        run(given, [FULL, contestant("mask")], asked, bandwidth=False)
    honest = Subject(name="tiny", model=model, tokenizer=Numbers(ids.tolist()))
    plans = [FULL, contestant("sliding_window @ tokens=12")]
    assert len(run(honest, plans, asked, bandwidth=False)) == 2


class Numbers:
    """A tokenizer that gives the same ids for every text."""

    is_fast = False
    eos_token_id = bos_token_id = None

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, text, **options):
        return {"input_ids": self.ids if text else []}


@pytest.mark.parametrize("commit", ["abc", "abc-dirty"])
def test_what_was_allowed_passes_and_is_said(tmp_path, monkeypatch, commit):
    """Also where the records of the refused run are there, and are not measured again."""
    monkeypatch.setattr(machine, "versions", lambda: dict.fromkeys(runner._VERSIONS, "1") | {"commit": commit})
    names = iter(["aaaa", "bbbb", "cccc"])
    monkeypatch.setattr(runner.secrets, "token_hex", lambda size: next(names))
    windows = [letters(200, "abcdefgh", i) + letters(40, "uvwxyz", 100 + i) for i in range(8)]
    asked = {"caches": {"one": DummyCache(keep=5)}, "tasks": [task(text="".join(windows))], "out": tmp_path}
    with pytest.raises(Fraud, match="better than full"):
        bench(**asked)
    records = bench(**asked, allow=["better than full"])
    assert all(r.notes == ("Allowed by the user: better than full.",) for r in records)
    [said] = warnings_of(records)
    assert said.startswith("Allowed, and found: better than full: plan 'one' holds less")
    assert {r.run[-4:] for r in records} == ({"bbbb"} if "dirty" in commit else {"aaaa"})
    check_records(latest(read_records(tmp_path)))
    with pytest.raises(Fraud, match="better than full"):
        bench(**asked)


def test_only_known_and_harmless_names_are_allowed():
    with pytest.raises(UnknownName, match="did you mean 'better than full'"):
        bench(allow=["better then full"])
    with pytest.raises(KvtailorError, match="asked to allow the tripwire 'identity'"):
        bench(allow=["identity"])
    assert TRIPWIRES[6:] == MAY_BE_ALLOWED and MAY_BE_ALLOWED[0] == "same results on other data"


def test_two_plans_that_did_the_same_are_named_and_not_accused():
    records = bench({"one": DummyCache(keep=20), "other": DummyCache(keep=20), "third": DummyCache(keep=9)})
    [said] = warnings_of(records)
    assert said.startswith("one and other did exactly the same in perplexity")


def test_equal_peaks_of_unequal_plans_are_said():
    def held(label, size, peak=100):
        return record(label, "memory", bytes_held=size, bytes_full=50, bytes_peak=peak)

    assert warnings_of([held("a", 50), held("b", 20)]) == []
    [said] = warnings_of([held("a", 50), held("b", 20), held("c", 30)])
    assert said.startswith("a, b, c peak at the same 100 bytes")
    assert warnings_of([held("a", 50), held("b", 20), held("c", 30, 101)]) == []


def test_what_slows_every_side_is_said_and_not_called_a_fraud():
    slower = [1.0] * 7 + [1.6] * 7
    records = timed(sides=3, a=slower, b=slower, c=slower)
    check_records(records)
    said = warnings_of(records)
    assert len(said) == 2 and all("of all sides rose by a factor of 1." in each for each in said)
    [said] = warnings_of(timed(a=[1.0] * 9))
    assert said.startswith("Times of 9 undisturbed rounds")


def test_disturbed_rounds_and_one_slow_round_accuse_nobody():
    late = timed(one=[1.0] * 6 + [2.0] * 6)
    disturbed = (0.0,) * 6 + (1.0,) * 6
    check_records([replace(r, values={**r.values, "disturbed": disturbed}) if r.label == "one" else r for r in late])
    check_records(timed(one=[1.0] * 11 + [5.0]))
    check_records(timed(one=[2.0] + [1.0] * 11))
    with pytest.raises(Fraud, match="throttled side.*'one'"):
        check_records(late)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_noise_is_hardly_ever_called_a_cold_or_throttled_side(noise):
    accused = sum(any(True for _ in findings(timed(sides=6, state=i, noise=noise, side=[1.0] * 10))) for i in range(60))
    assert accused == 0


def test_chance_is_hardly_ever_called_better_than_full():
    """300 runs of 12 plans that do not differ from full: 0.3 alarms are expected at the stated level."""
    draw, alarms = random.Random(3), 0
    for _ in range(300):
        base = [draw.gauss(3, 0.4) for _ in range(12)]
        records = answers(base, base, "nll", "perplexity")[:1]
        for plan in range(12):
            one = answers(base, [x + draw.gauss(0, 0.05) for x in base], "nll", "perplexity")[1]
            records.append(replace(one, label=f"{plan}", plan=f"{plan}", plan_hash=f"{plan}"))
        alarms += any(True for _ in findings(records))
    assert alarms <= 2


def test_a_gain_too_small_to_matter_is_no_fraud():
    base = [3.0 + 0.1 * i for i in range(12)]
    check_records(answers(base, [x - 0.004 - 1e-5 * i for i, x in enumerate(base)], "nll", "perplexity"))
    with pytest.raises(Fraud, match="better than full.*by 0.010 nats"):
        check_records(answers(base, [x - 0.010 - 1e-5 * i for i, x in enumerate(base)], "nll", "perplexity"))
    check_records(answers(base, [x - 9 for x in base], "nll", "needle"))
    check_records(answers([0.0] * 9 + [1.0] * 9, [1.0] * 9 + [1.0] * 9))
    check_records(answers(base[:4], [x - 1 - 0.01 * i for i, x in enumerate(base[:4])], "nll", "perplexity"))


def test_uniform_logits_hide_nothing_from_the_tripwires():
    with pytest.raises(Fraud, match="untouched cache"):
        bench({"one": DummyCache(keep=20)}, model=UniformModel())
