"""What methods promise for a model that caps its logits or has learned sinks: its own probabilities, or a refusal.

Methods of all stages find their way here by themselves. What looks at queries or at attention must say for both whether
it knows them. What it says is held against the plain softmax of another problem that has the same probabilities:

- of a cap: queries of one channel each make every logit a number of the key's own, so that keys which are capped
  beforehand give a plain softmax the capped model's logits;
- of a sink: a token inside the observation window, which no score looks at, gets the sink's logit from each query.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.discover import methods_of, samples_of
from tests.support.held_rows import held_of, make_row
from torch import Tensor

import kvtailor.allocate
import kvtailor.attend
import kvtailor.encode
import kvtailor.merge
import kvtailor.score
from kvtailor.allocate.contract import Allocator
from kvtailor.attend.contract import Attention
from kvtailor.encode.contract import Codec
from kvtailor.merge.contract import Merger
from kvtailor.method import Method
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested, word_of
from kvtailor.score.contract import Scorer
from kvtailor.types import Held, Needs, Softmax

HEADS, GROUP, SCALING, CAP = 3, 2, 0.5, 2.0
LENGTHS = (75, 52)
STAGES = {
    "score": (kvtailor.score, Scorer),
    "allocate": (kvtailor.allocate, Allocator),
    "merge": (kvtailor.merge, Merger),
    "encode": (kvtailor.encode, Codec),
}
ATTENTIONS = methods_of(kvtailor.attend, Attention)
# Whatever the model's softmax, these give the same for the same evidence: mass and repetition are made by the engine
# (tests/seam/softmax), and products before a softmax are not changed by it.
INDIFFERENT = {"H2O", "KVCompose", "KVzip", "KVzipPlus", "Retrieval", "Channels"}
# They look at a key beside its logits, or at queries of the whole text. Each has a test of its own, below or apart.
BY_KEYS_TOO = {"ATSKV", "AsymKV", "RKV", "RMS"}
# They measure whole attention rows, of which a token with the sink's logit would be a part; likewise.
BY_ROWS = {"Entropy", "Coverage", "Erank", "SimLayerKV"}


def needs_of(method: Method) -> Needs:
    return getattr(method, "needs", Needs())


def alone(method: Method) -> bool:
    """It looks at attention itself, and not only through a method that it holds."""
    return len(list(with_nested(method))) == 1


def kinds() -> list[type[Method]]:
    """The classes of all methods that look at queries or attention."""
    found: list[type[Method]] = list(ATTENTIONS)
    for module, contract in STAGES.values():
        found += [
            kind
            for kind in methods_of(module, contract)
            if any(needs_of(each).of_attention for each in samples_of(kind))
        ]
    return found


def watching(stage: str) -> list[Any]:
    """The samples of a stage that look at attention themselves, with small windows."""
    module, contract = STAGES[stage]
    every = [each for kind in methods_of(module, contract) for each in samples_of(kind) if needs_of(each).of_attention]
    return [small(each) for each in every if alone(each)]


def small(method: Any) -> Any:
    names = {field.name for field in dataclasses.fields(method)} & {"window", "rows", "kernel", "threshold"}
    return replace(method, **{name: {"kernel": 3, "threshold": 0.03}.get(name, 5) for name in names})


def text_of(method: Method) -> str:
    return str(word_of(method))


def held_for(needs: Needs, *, seed: int = 0) -> Held:
    """A padded batch whose windows' queries have a channel each, so that a logit is a number of the key."""
    window = max(needs.window, 2)
    generator = torch.Generator().manual_seed(seed)
    rows = [make_row(n, heads=HEADS, group=GROUP, size=GROUP * window, generator=generator) for n in LENGTHS]
    held = held_of(rows, needs)
    if held.queries is None:
        return held
    queries = torch.zeros_like(held.queries)
    for head, query in itertools.product(range(HEADS * GROUP), range(held.queries.shape[2])):
        queries[:, head, query, head % GROUP * window + query] = 1 / SCALING
    return replace(held, queries=queries, keys=held.keys * 2, scaling=SCALING)


def with_cap(held: Held) -> Held:
    return replace(held, softmax=Softmax(softcap=CAP))


def with_capped_keys(held: Held) -> Held:
    """What a plain softmax makes the capped model's probabilities of."""
    return replace(held, keys=CAP * (held.keys / CAP).tanh())


def sinks_of(seed: int = 4) -> Tensor:
    return torch.randn(HEADS * GROUP, generator=torch.Generator().manual_seed(seed)) + 1.0


def with_sinks(held: Held) -> tuple[Held, Held, Tensor]:
    """With sinks; with a token of the window that has their logits instead; (b, h, n) which tokens are compared."""
    assert held.query_columns is not None and held.queries is not None
    window = held.keys.shape[-1] // GROUP
    at = held.positions == held.query_columns[0]
    # (h, d): for each channel the sink of the query head that asks in it.
    of_channel = sinks_of().view(HEADS, GROUP, 1).expand(-1, -1, window).flatten(1)
    hidden = held.keys.masked_fill(at[..., None], -1e4)
    seen = torch.where(at[..., None], of_channel[None, :, None], held.keys)
    return replace(held, keys=hidden, softmax=Softmax(sinks=sinks_of())), replace(held, keys=seen), held.valid & ~at


def same(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_what_looks_at_attention_says_what_it_knows_or_is_refused(kind: type[Method]) -> None:
    for method, (field, softmax) in itertools.product(
        samples_of(kind), {"softcap": Softmax(softcap=30.0), "sinks": Softmax(sinks=torch.zeros(4))}.items()
    ):
        plan = object.__new__(Plan)
        stage = next((name for name, (_, contract) in STAGES.items() if isinstance(method, contract)), "attend")
        parts = {**Plan().parts, stage: method}
        for name, part in parts.items():
            object.__setattr__(plan, name, part)
        knows = all(getattr(each.capabilities, field) for each in with_nested(method))
        faults = plan.softmax_faults(softmax)
        assert bool(faults) != knows
        assert knows or f"set serves = Serves({field}=True)" in faults[0]


def test_a_method_without_a_word_of_it_is_refused_and_one_that_sees_no_attention_is_not() -> None:
    class Newer(kvtailor.score.snapkv.SnapKV):  # type: ignore[name-defined]
        """Inherits, and may compute otherwise."""

    plan = Plan(score=Newer(), tokens=8)
    assert len(plan.softmax_faults(Softmax(softcap=1.0, sinks=torch.zeros(2)))) == 2
    assert plan.softmax_faults(Softmax()) == []
    assert Plan.parse("knorm + adakv + kivi @ tokens=8").softmax_faults(Softmax(softcap=1.0)) == []


@pytest.mark.parametrize("scorer", watching("score"), ids=text_of)
def test_scores_of_capped_logits(scorer: Scorer) -> None:
    if not scorer.capabilities.softcap:
        pytest.skip("refused for such a model")
    held, name = held_for(scorer.needs), type(scorer).__name__
    if name in BY_KEYS_TOO:
        pytest.skip("has a test of its own")
    plain, found = scorer.score(held), scorer.score(with_cap(held))
    if name in INDIFFERENT:
        assert torch.equal(found, plain)
        return
    assert same(found[held.valid], scorer.score(with_capped_keys(held))[held.valid])
    assert not same(found[held.valid], plain[held.valid]), "a cap changes nothing, so this test has shown nothing"


@pytest.mark.parametrize("scorer", watching("score"), ids=text_of)
def test_scores_beside_sinks(scorer: Scorer) -> None:
    if not scorer.capabilities.sinks:
        pytest.skip("refused for such a model")
    held, name = held_for(scorer.needs), type(scorer).__name__
    if name in BY_KEYS_TOO or not scorer.needs.window:
        assert name in BY_KEYS_TOO | INDIFFERENT | {"Expected"}
        pytest.skip("has a test of its own, or of its evidence")
    ours, theirs, compared = with_sinks(held)
    if name in INDIFFERENT:
        assert torch.equal(scorer.score(ours), scorer.score(replace(ours, softmax=Softmax())))
        return
    found = scorer.score(ours)
    if name == "Pairs":
        # Prices are of attention before the window, where the token with the sink's logit is not.
        compared = compared & (held.positions < held.query_columns[0])
    assert same(found[compared], scorer.score(theirs)[compared])
    assert not same(found[compared], scorer.score(replace(ours, softmax=Softmax()))[compared])


@pytest.mark.parametrize("allocator", watching("allocate"), ids=text_of)
def test_measures_of_capped_logits_and_beside_sinks(allocator: Allocator) -> None:
    held = held_for(allocator.needs)
    plain, found = allocator.measure(held), allocator.measure(with_cap(held))
    assert plain is not None and found is not None
    assert same(found, allocator.measure(with_capped_keys(held)))  # type: ignore[arg-type]
    assert not same(found, plain)
    if type(allocator).__name__ in BY_ROWS:
        return
    ours, theirs, _ = with_sinks(held)
    assert same(allocator.measure(ours), allocator.measure(theirs))  # type: ignore[arg-type]


def rows_beside_sinks(held: Held) -> list[list[Tensor]]:
    """For each row of the batch and query head (v, n) probabilities of the window's queries, a sink's left out."""
    assert held.queries is not None and held.query_columns is not None and held.softmax.sinks is not None
    found = []
    for row in range(held.keys.shape[0]):
        found.append([])
        for query_head in range(HEADS * GROUP):
            there = held.valid[row, query_head // GROUP]
            keys, columns = held.keys[row, query_head // GROUP][there], held.positions[row, query_head // GROUP][there]
            logits = held.queries[row, query_head].double() @ keys.double().T * held.scaling
            logits = logits.masked_fill(columns > held.query_columns[:, None], -torch.inf)
            sink = held.softmax.sinks[query_head].double().expand(len(logits), 1)
            found[-1].append(torch.cat([logits, sink], -1).softmax(-1)[:, :-1])
    return found


def test_whole_rows_beside_sinks() -> None:
    """Of the measures that a token in the sink's place would change: their formulas, written down."""
    from kvtailor.allocate.coverage import Coverage
    from kvtailor.allocate.entropy import Entropy
    from kvtailor.allocate.erank import Erank
    from kvtailor.allocate.simlayerkv import SimLayerKV

    assert {type(each).__name__ for each in watching("allocate")} >= BY_ROWS
    held = replace(held_for(Needs(window=5)), softmax=Softmax(sinks=sinks_of()))
    given = rows_beside_sinks(held)
    entropy = torch.tensor(
        [torch.stack([torch.special.entr(p).sum(-1).exp().mean() for p in heads]).mean() for heads in given]
    )
    assert same(Entropy(window=5).measure(held).double(), entropy.double())
    # As many tokens as leave no more than a twentieth of the whole attention, the sink's share included, uncovered.
    counts = []
    for heads in given:
        for probabilities in heads:
            for each in probabilities:
                left, rest = 0, each.sort().values.cumsum(0)
                left = int((rest <= 0.05).sum())
                counts.append(max(1, len(each) - left))
    expected = torch.tensor(counts).view(len(given), -1).double().mean(-1)
    assert same(Coverage(mass=0.95, window=5).measure(held).double(), expected)
    ends = [torch.stack(heads).mean((0, 1)) for heads in given]
    shares_at_ends = torch.stack([each[:4].sum() + each[-8:].sum() for each in ends])
    assert same(SimLayerKV(recent=8, window=5).measure(held), shares_at_ends.double())
    for row, heads in enumerate(given):
        values = torch.linalg.svdvals(torch.stack(heads).mean(0))
        shares = values / values.sum()
        rank = torch.special.entr(shares).sum().exp()
        assert abs(float(Erank(rows=5).measure(held)[row]) - float(rank)) < 1e-3  # type: ignore[index]


@pytest.mark.parametrize("merger", [each for each in watching("merge") if type(each).__name__ == "CaM"], ids=text_of)
def test_merged_values_of_capped_logits_and_beside_sinks(merger: Merger) -> None:
    held = held_for(merger.needs)
    keep = torch.rand(held.valid.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    keep = (keep | (held.positions >= held.query_columns[0])) & held.valid
    plain, found, other = (merger.merge(each, keep, keep) for each in (held, with_cap(held), with_capped_keys(held)))
    assert plain is not None and found is not None and other is not None
    assert same(found.values, other.values) and not same(found.values, plain.values)
    ours, theirs, _ = with_sinks(held)
    beside, token = merger.merge(ours, keep, keep), merger.merge(theirs, keep, keep)
    # Attention of the token in the sink's place is read where kept tokens follow: those before it are compared.
    assert beside is not None and token is not None
    assert bool((beside.values - token.values).isfinite().all())


@pytest.mark.parametrize("softmax", ["softcap", "sinks", "both"])
def test_asymkv_weighs_channels_by_how_the_output_depends_on_them(softmax: str) -> None:
    """Its weight of a key's channel is the squared derivative of the output, here by autograd."""
    from kvtailor.merge.asymkv import AsymKV

    merger = AsymKV(window=4, turned=False)
    generator = torch.Generator().manual_seed(3)
    held = held_of([make_row(20, heads=1, group=1, size=4, generator=generator)], merger.needs)
    own = Softmax(
        softcap=CAP if softmax != "sinks" else None, sinks=torch.tensor([0.7]) if softmax != "softcap" else None
    )
    held = replace(held, softmax=own, scaling=SCALING)
    keep = torch.ones_like(held.valid)
    keep[..., 9] = False  # the token 9 joins the token 8
    merged = merger.merge(held, keep, keep)
    assert merged is not None and held.queries is not None and held.query_columns is not None

    def outputs(keys: Tensor) -> Tensor:
        logits = held.queries[0, 0].double() @ keys.T * SCALING
        logits = logits if own.softcap is None else CAP * (logits / CAP).tanh()
        logits = logits.masked_fill(held.positions[0, 0] > held.query_columns[:, None], -torch.inf)
        if own.sinks is not None:
            logits = torch.cat([logits, own.sinks.double().expand(len(logits), 1)], -1)
        return logits.softmax(-1)[:, : keys.shape[0]] @ held.values[0, 0].double()

    # (w, dv, n, d): summed over the window and the output's channels, of the squares.
    slopes = torch.autograd.functional.jacobian(outputs, held.keys[0, 0].double())
    weights = slopes.square().sum((0, 1))[8:10]
    expected = (weights * held.keys[0, 0, 8:10].double()).sum(0) / weights.sum(0)
    assert torch.allclose(merged.keys[0, 0, 8].double(), expected, rtol=1e-3, atol=1e-4)


def test_atskv_reads_the_models_own_attention() -> None:
    from kvtailor.score.atskv import ATSKV

    scorer, of_attention = ATSKV(window=5), slice(0, 6)
    held = held_for(Needs(window=5))
    for head in range(HEADS):
        features, plain = scorer.features(with_cap(held), 0, head), scorer.features(held, 0, head)
        other = scorer.features(with_capped_keys(held), 0, head)
        assert same(features[:, of_attention], other[:, of_attention])
        assert not same(features[:, of_attention], plain[:, of_attention])
        ours, _, _ = with_sinks(held)
        given = torch.stack(rows_beside_sinks(ours)[0][head * GROUP : (head + 1) * GROUP]).flatten(0, 1)
        share = (given.mean(0) * given.shape[-1] + 1e-2).log()
        assert same(scorer.features(ours, 0, head)[:, 0].double(), share)


def test_expected_attention_shares_with_the_sink() -> None:
    """Queries without mean or spread expect exp(0) = 1 of each token: n of them, and the sink's exponential."""
    from kvtailor.score.expected import Expected

    scorer = Expected(sinks=0, value_norm=False)
    held = held_of([make_row(30, heads=1, group=1, size=4, generator=torch.Generator().manual_seed(1))], scorer.needs)
    assert held.moments is not None
    still = replace(
        held.moments, mean=torch.zeros_like(held.moments.mean), spread=torch.zeros_like(held.moments.spread)
    )
    for sink in (-2.0, 3.0):
        held = replace(held, moments=still, softmax=Softmax(sinks=torch.tensor([sink])))
        due = 1 / (30 + torch.tensor(sink).exp())
        assert same(scorer.score(held), due.expand(1, 1, 30))
