"""Every classic fraud is fed to the bench and caught by name, and its honest counterpart passes."""

import pytest
import torch
from tests.support.bench.dummy import FULL, DummyCache, contestant
from tests.support.bench.frauds import FRAUDS, TEXT, Numbers, answers, bench, record, timed

from kvtailor.bench.checks import CHECKS, OF_ONE_PLAN, Fraud, check_records
from kvtailor.bench.runner import run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import UnknownName


def test_every_sanity_check_has_its_fraud():
    assert set(FRAUDS) == set(CHECKS) and len(set(CHECKS)) == len(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_fraud_is_caught_by_name(name):
    try:
        full, one = FRAUDS[name](True)
    except Fraud as caught:
        assert caught.name == name and str(caught).startswith(f"{name}: ")
    else:
        assert name in OF_ONE_PLAN and full.error is None and one.error.startswith(f"{name}: ")


@pytest.mark.parametrize("name", CHECKS)
def test_its_honest_twin_passes(name):
    assert not any(record.error for record in FRAUDS[name](False) or [])


def test_a_fraud_of_no_name_is_none():
    with pytest.raises(UnknownName, match="did you mean 'untouched cache'"):
        Fraud("untouched cash", "x")


@pytest.mark.parametrize(
    ("name", "records"),
    [
        (
            "untouched cache",
            lambda: bench(
                {"liar": DummyCache(claims=20)},
                [Fidelity(text=TEXT, source="t", context=200, continuation=40, windows=5)],
            ),
        ),
        (
            "one text under two names",
            lambda: check_records(
                [record("a", "x", text="one", text_hash="h"), record("a", "y", text="two", text_hash="h")]
            ),
        ),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_by_stage={"encode": 9})])),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_by_layer=(5, 6))])),
        ("nominal bytes", lambda: check_records([record("a", "x", bytes_held=10, bytes_closed_form=11)])),
        (
            "impossible peak",
            lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**25, bytes_peak_decode=2**20)]),
        ),
        (
            "impossible peak",
            lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**24, bytes_resident=2**24 + 2**22)]),
        ),
        (
            "peak not reset",
            lambda: check_records([record("a", "x", bytes_held=2**24, bytes_peak=2**26, bytes_peak_decode=2**26)]),
        ),
        (
            "impossible bytes",
            lambda: check_records([record("a", "x", device="cpu", bytes_held=101, machine={"memory_bytes": 100})]),
        ),
        ("better than full", lambda: check_records(answers([0.0] * 20 + [1.0] * 10, [1.0] * 30))),
        ("cold side", lambda: check_records(timed(one=[10.0] + [1.0] * 4, noise=0.01))),
        ("cold side", lambda: check_records(timed(one=[2.0] * 8 + [1.0] * 8, sides=2))),
    ],
)
def test_other_faces_of_the_same_frauds(name, records):
    with pytest.raises(Fraud) as caught:
        records()
    assert caught.value.name == name


def test_a_mask_over_a_real_cache_frees_nothing():
    """A kvtailor cache that keeps all, attends only to the newest, and says that it holds those alone."""
    from tests.support.seam.zoo import build

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

        def attend(query, mask, scaling, *module):
            output = whole(query, mask, scaling)
            new, seen = query.shape[2], layer.state.stored.seen
            if new == seen:
                return output
            tail = layer.state.stored.tail.as_segment()
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
    with pytest.raises(Fraud, match="nothing freed: plan 'mask' claims to hold 12 of 64 tokens"):
        run(given, [FULL, contestant("mask")], asked, bandwidth=False)
    honest = Subject(name="tiny", model=model, tokenizer=Numbers(ids.tolist()))
    plans = [FULL, contestant("sliding_window @ tokens=12")]
    assert len(run(honest, plans, asked, bandwidth=False)) == 2
