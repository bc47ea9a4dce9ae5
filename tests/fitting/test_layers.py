"""Stage 1: what each layer loses, and the plan that follows from it."""

import pytest
from tests.support.fitting.small import CONTEXT, pieces, subject

from kvtailor.fitting.layers import LayerMap, codec_by_layer, measure_layers, settings, solved_plan
from kvtailor.fitting.measuring import Measurer
from kvtailor.fitting.sizing import Sizer
from kvtailor.plan import Plan


def solved(found, sizer, share):
    return solved_plan(
        found,
        sizer.geometry,
        context=CONTEXT,
        batch=1,
        element=sizer.element,
        memory=int(share * sizer.full),
        size=sizer.most,
    )


@pytest.fixture(scope="module")
def one_layer_matters(tmp_path_factory):
    made = subject(layers=4, matters=2)
    sizer = Sizer.of(made.model, context=CONTEXT, batch=1)
    measurer = Measurer(made, tmp_path_factory.mktemp("records"))
    found = measure_layers(
        measurer, sizer.geometry, pieces(3), score="snapkv(window=8, kernel=5)", widths=(8, 4, 2), shares=(0.5, 0.25)
    )
    return made, sizer, measurer, found


def test_only_the_layer_that_matters_is_seen_to_lose(one_layer_matters):
    _, _, _, found = one_layer_matters
    for side in (found.keys, found.values, [groups[0] for groups in found.kept]):
        for layer, row in enumerate(side):
            assert row[0] == 0.0
            if layer == 2:
                assert row[-1] > 0.01
            else:
                assert max(row) < 1e-3


def test_the_layer_that_matters_gets_the_bytes(one_layer_matters):
    made, sizer, measurer, found = one_layer_matters
    best = solved(found, sizer, 0.45)
    plan, loss = best.plan, best.loss
    record = measurer.measure([plan], pieces(3))[0]
    layers = made.model.config.num_hidden_layers
    cache = made.new_cache(_contestant(plan))
    made.prefill(pieces(1)[0].context[None], cache)
    by_layer = cache.ledger().by_layer
    assert max(range(layers), key=lambda layer: by_layer[layer]) == 2
    assert by_layer[2] > 1.8 * max(size for layer, size in enumerate(by_layer) if layer != 2)
    # Alike layers for the same bytes lose far more.
    alike = measurer.measure([Plan.parse("kivi(bits=4, recent=32)")], pieces(3))[0]
    assert record.loss < 0.2 * alike.loss and loss == pytest.approx(record.loss, abs=1e-4)


def test_a_plan_fits_the_memory_that_it_was_solved_for(one_layer_matters):
    _, sizer, _, found = one_layer_matters
    for share in (0.35, 0.5, 0.8):
        plan = solved(found, sizer, share).plan
        assert sizer.most(plan) <= share * sizer.full
    assert solved(found, sizer, 0.01) is None


def test_every_setting_is_a_plan_of_its_own():
    sizer = Sizer.of(subject().model, context=CONTEXT, batch=1)
    layers, heads = 3, sizer.geometry.kv_heads
    found = settings(sizer.geometry, score="snapkv", widths=(4, 2), shares=(0.5,), by_head=True)
    assert len(found) == layers * 2 * 2 + layers * heads
    assert len({plan.hash for plan in found.values()}) == len(found)
    kept = found["kept", 1, 1, 1]
    assert kept.allocate.weights == ((1.0, 1.0), (1.0, 0.5), (1.0, 1.0)) and kept.keep == pytest.approx(5.5 / 6)


def test_one_head_alone_is_cut(tmp_path):
    made = subject()
    sizer = Sizer.of(made.model, context=CONTEXT, batch=1)
    plan = settings(sizer.geometry, score="snapkv(window=8)", widths=(), shares=(0.25,), by_head=True)["kept", 1, 0, 1]
    cache = made.new_cache(_contestant(plan))
    made.prefill(pieces(1)[0].context[None], cache)
    held = cache.held()[0].tolist()
    assert held == [[96, 96], [24, 96], [96, 96]]


def test_a_codec_names_each_width_once():
    assert codec_by_layer([(4, 4), (4, 4)]) == "kivi(bits=4, recent=32)"
    text = codec_by_layer([(0, 0), (4, 2), (0, 8), (4, 2)])
    plan = Plan.parse(text)
    assert plan.encode.layers == (0, 1, 2, 1) and len(plan.encode.of) == 3


def test_a_map_survives_json_and_restriction():
    found = LayerMap(
        score="snapkv",
        widths=(0, 4, 2),
        shares=(1.0, 0.5, 0.1),
        keys=((0.0, 1.0, 2.0),),
        values=((0.0, 3.0, 4.0),),
        kept=(((0.0, 5.0, 6.0),),),
        pieces=3,
    )
    import json

    assert LayerMap.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    less = found.restricted(least_width=4, least_share=0.5)
    assert (less.widths, less.shares, less.keys, less.kept) == ((0, 4), (1.0, 0.5), ((0.0, 1.0),), (((0.0, 5.0),),))


def _contestant(plan):
    from kvtailor.bench.contestant import Contestant

    return Contestant.of(str(plan))
