"""Fidelity: by hand on the dummy, against transformers' own attention weights on a real model."""

import math

import pytest
import torch
from tests.support.bench.dummy import FULL, CountingModel, DummyCache, UniformModel, contestant, subject
from tests.support.seam.zoo import build

from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.measure.inside import LAYERWISE, compare_layers, contents, queries_of
from kvtailor.bench.measure.statistics import calibration_error
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import RUINED, Fidelity, repetition
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache

TEXT = generated_text(4000)


def task(**changes):
    return Fidelity(**{"text": TEXT, "source": "t", "context": 100, "continuation": 20, "windows": 5} | changes)


def test_kl_and_top1_meet_a_count_by_hand():
    model, the_task = CountingModel(), task()
    records = run(subject(model, cut=DummyCache(keep=9)), [FULL, contestant("cut")], [the_task], bandwidth=False)
    full, cut = (record.metrics for record in records)
    assert (full["kl"], full["kl_p99"], full["top1"]) == (0.0, 0.0, 1.0)
    kl, same = [], []
    for window in the_task._windows_task().cut(subject(model)):
        context, targets = window.context.tolist(), window.targets.tolist()
        for place in range(len(targets)):
            memories = [context + targets[:place], (context if place == 0 else context[-9:]) + targets[:place]]
            p, q = ([(m.count(v) + 1) / (len(m) + 256) for v in range(256)] for m in memories)
            kl.append(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
            same.append(p.index(max(p)) == q.index(max(q)))
    assert cut["kl"] == pytest.approx(sum(kl) / len(kl), abs=1e-6)
    assert cut["top1"] == sum(same) / len(same) < 1
    assert records[1].values["kl"] == pytest.approx([sum(kl[i : i + 20]) / 20 for i in range(0, 100, 20)], abs=1e-6)
    assert max(kl) * 0.5 < cut["kl_p99"] <= cut["kl_p999"] <= cut["kl_max"] == pytest.approx(max(kl), abs=1e-6)
    assert records[1].values["kl_max"] == pytest.approx([max(kl[i : i + 20]) for i in range(0, 100, 20)], abs=1e-6)
    assert all(cut[name] is None for name in LAYERWISE)
    assert records[1].tokens_held == 9 and records[1].tokens_scored == 100


def test_tails_meet_a_count_by_hand():
    """Loss of each window over 'full', where two greedy texts part, and what the plan's own text repeats."""
    # Of two letters that were as frequent the first in the alphabet comes: the space must not be it.
    model, the_task = CountingModel(), task(text=TEXT.replace(" ", " ~~"))
    records = run(subject(model, cut=DummyCache(keep=9)), [FULL, contestant("cut")], [the_task], bandwidth=False)
    over, agreed, repeated = [], [], []
    for window in the_task._windows_task().cut(subject(model)):
        context, targets = window.context.tolist(), window.targets.tolist()

        def losses(short, context=context, targets=targets):
            for place, target in enumerate(targets):
                memory = (context[-9:] if short and place else context) + targets[:place]
                yield -math.log((memory.count(target) + 1) / (len(memory) + 256))

        over.append((sum(losses(True)) - sum(losses(False))) / 20)
        texts = []
        for short in (False, True):
            made = []
            while len(made) < 20:
                memory = context + made if not (short and made) else [*(context + made[:-1])[-9:], made[-1]]
                counts = [memory.count(v) for v in range(256)]
                made.append(counts.index(max(counts)))
            texts.append(made)
        agreed.append(next((i for i, (a, b) in enumerate(zip(*texts, strict=True)) if a != b), 20))
        runs = [tuple(texts[1][i : i + 4]) for i in range(17)]
        repeated.append(1 - len(set(runs)) / 17)
    found = records[1].values
    assert found["nll_over_full"] == pytest.approx(over, abs=1e-6)
    assert found["divergence"] == tuple(agreed) and min(agreed) < 20
    assert found["same_text"] == tuple(float(each == 20) for each in agreed)
    assert found["repetition"] == pytest.approx(repeated)
    assert found["ruined"] == tuple(float(each > RUINED) for each in over)
    assert records[1].metrics["divergence"] == pytest.approx(sum(agreed) / 5)
    full = records[0].metrics
    assert (full["ruined"], full["same_text"], full["divergence"]) == (0, 1, 20)


def test_a_text_that_goes_in_circles_is_repetition():
    assert repetition([1, 2, 3, 4, 5, 6, 7]) == 0 and repetition([1, 2, 3]) == 0
    assert repetition([7] * 20) == 1 - 1 / 17
    assert repetition([1, 2, 3, 4] * 2) == pytest.approx(1 / 5)


def test_calibration_error_by_hand():
    assert calibration_error([0.95, 0.95, 0.95, 0.95], [True, True, True, False]) == pytest.approx(0.2)
    assert calibration_error([0.5, 0.9, 1.0], [True, True, False]) == pytest.approx((0.5 + 0.1 + 1.0) / 3)
    # Both ends of a bin: 1/15 belongs to the first, a little more to the second.
    assert calibration_error([1 / 15, 1 / 15 + 1e-6], [True, False]) == pytest.approx((14 / 15 + 1 / 15) / 2, abs=1e-5)
    assert calibration_error([0.2, 0.2], [True, False]) == pytest.approx(0.3)
    for bad in ([], [0.5, 0.5]):
        with pytest.raises(ValueError, match="as many of both"):
            calibration_error(bad, [True])
    # A model for which every token is as likely is right as often as it thinks, but for the luck of its one guess.
    [record] = run(subject(UniformModel()), [FULL], [task()], bandwidth=False)
    assert record.metrics["ece"] == pytest.approx(1 / 256, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("plan", ["streaming @ tokens=24", "snapkv(window=8) + adakv @ keep=0.4"])
def test_attention_numbers_meet_those_of_transformers_own_weights(family, plan):
    """Retained mass, cosine and output error again, from the weights that eager attention returns."""
    from kvtailor import cache_for

    model = build(family)
    ids = torch.randint(3, model.config.vocab_size, (1, 70), generator=torch.Generator().manual_seed(5))
    caches = [cache_for(model, each) for each in ("full", plan)]
    with torch.inference_mode():
        for cache in caches:
            model(ids[:, :63], **hand_cache(cache))
        full, ours = (contents(cache) for cache in caches)
        with queries_of(caches[0]) as queries:
            model(ids[:, 63:], **hand_cache(caches[0]))
        found = compare_layers(full, ours, queries)
        model.set_attn_implementation("eager")
        weights = model(ids, output_attentions=True, use_cache=False).attentions
    counts = caches[1].held()[0]
    for layer, (each, mine) in enumerate(zip(weights, ours, strict=True)):
        assert mine.held.sum(-1).tolist() == counts[layer].tolist() and not bool(mine.held.all())
        a = each[0, :, 63:, :63]
        a = a / a.sum(-1, keepdim=True)
        held = mine.held.repeat_interleave(a.shape[0] // mine.held.shape[0], 0)[:, None]
        kept = a * held / (a * held).sum(-1, keepdim=True)
        assert found["retained_mass"][layer] == pytest.approx((a * held).sum(-1).mean().item(), abs=1e-5)
        assert found["attention_cosine"][layer] == pytest.approx(
            torch.cosine_similarity(a, kept, dim=-1).mean().item(), abs=1e-5
        )
        values = full[layer].values.repeat_interleave(held.shape[0] // mine.held.shape[0], 0)
        error = ((a - kept) @ values).norm(dim=-1) / (a @ values).norm(dim=-1)
        assert found["output_error"][layer] == pytest.approx(error.mean().item(), abs=1e-4)
    assert found["key_error"] == found["value_error"] == (0.0,) * len(weights)


def test_codes_show_as_errors_of_what_is_held_and_nothing_else():
    model = build("llama")
    plans = [
        "kivi(bits=2, group=8, recent=8)",
        "kivi(bits=8, group=8, recent=8)",
        "kivi(key_bits=2, value_bits=8, group=8, recent=8)",
    ]
    given = Subject(name="tiny", model=model, tokenizer=None)
    ids = torch.randint(3, model.config.vocab_size, (4, 90), generator=torch.Generator().manual_seed(1))

    class Windows(Fidelity):
        def _windows_task(self):
            from kvtailor.bench.tasks.perplexity import Window

            class Cut:
                def cut(self, _):
                    return [Window(row[:70], row[70:], None, str(i)) for i, row in enumerate(ids)]

            return Cut()

    the_task = Windows(text="", source="random ids", windows=4)
    full, two, eight, keys = (r.metrics for r in run(given, contestants_of(plans), [the_task], bandwidth=False))
    assert full["key_error"] == full["value_error"] == full["output_error"] == full["kl"] == 0
    assert full["retained_mass"] == pytest.approx(1, abs=1e-6) and full["attention_cosine"] == pytest.approx(
        1, abs=1e-5
    )
    for name in ("key_error", "value_error", "output_error", "kl"):
        assert 0 < eight[name] < two[name]
    assert keys["key_error"] == pytest.approx(two["key_error"], rel=0.3) and keys["value_error"] == eight["value_error"]
    assert two["retained_mass"] == pytest.approx(1, abs=1e-6)
    layers = model.config.num_hidden_layers
    assert two["output_error"] == pytest.approx(sum(two[f"output_error_{i}"] for i in range(layers)) / layers)


@torch.inference_mode()
def test_a_cache_whose_tail_has_all_been_encoded_shows_its_contents():
    from kvtailor import cache_for

    model = build("llama")
    ids = torch.randint(3, model.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(2))
    encoded, whole = cache_for(model, "quest(tokens=16) + indexed(page=16, block_size=32)"), cache_for(model, "full")
    for cache in (encoded, whole):
        model(ids, **hand_cache(cache))
    assert encoded.engine.states[0].stored.tail.length == 0
    for ours, theirs in zip(contents(encoded), contents(whole), strict=True):
        assert ours.held.all() and torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_queries_are_only_kept_while_asked_for():
    from kvtailor import cache_for

    model = build("llama")
    cache = cache_for(model, "full")
    with torch.inference_mode():
        with queries_of(cache) as queries:
            model(torch.tensor([[3, 4, 5]]), **hand_cache(cache))
        model(torch.tensor([[6]]), **hand_cache(cache))
    assert len(queries) == model.config.num_hidden_layers and queries[0].states.shape[1] == 3
    assert not any("attend" in vars(layer) for layer in cache.layers)


def test_a_plan_that_fails_is_recorded_and_full_must_be_there():
    class Failing(CountingModel):
        def logits(self, cache, ids):
            if cache.keep == 13:
                raise KvtailorError("thirteen is not done here")
            return super().logits(cache, ids)

    given = subject(Failing(), bad=DummyCache(keep=13), good=DummyCache(keep=14))
    records = run(given, [FULL, contestant("bad"), contestant("good")], [task()], bandwidth=False)
    assert [record.error for record in records] == [None, "thirteen is not done here", None]
    with pytest.raises(KvtailorError, match="without the plan 'full'"):
        run(given, [contestant("good")], [task()], bandwidth=False)
