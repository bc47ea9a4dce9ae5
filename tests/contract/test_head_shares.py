"""Heads that lie on several processes: every method gives what it gives where one process has them all.

Processes are threads here, so that all methods are met in seconds; `tests/seam/tensor_parallel` runs whole models in
processes of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.discover import methods_of, samples_of
from tests.support.held_rows import example_tensors, held_by, held_of, make_row
from tests.support.segments_of import states
from tests.support.thread_heads import held_of_share, on_ranks
from torch import Tensor

import kvtailor.allocate
import kvtailor.attend
import kvtailor.encode
import kvtailor.merge
import kvtailor.score
import kvtailor.select
from kvtailor.allocate.contract import Allocator
from kvtailor.attend.contract import Attention, AttentionContext, AttentionRequest, IndexRequest
from kvtailor.calibration_file import calibrated
from kvtailor.encode.contract import Codec, CodecContext
from kvtailor.encode.indexed import Indexed
from kvtailor.engine.budget import Budget
from kvtailor.engine.evict import ScoredLayer, decide
from kvtailor.hf.mask import LazyMask
from kvtailor.merge.contract import Merger
from kvtailor.method import Method
from kvtailor.plan import Plan
from kvtailor.plan.arguments import with_nested, word_of
from kvtailor.score.contract import Scorer
from kvtailor.score.position import Position
from kvtailor.select.contract import Selector
from kvtailor.types import HeadShare, Held, Layout, PlainSegment, Rotation

HEADS, GROUP, SIZE, LAYERS = 4, 2, 8, 3
LENGTHS = (63, 40, 9)
RANKS = [2, 4]


def samples(stage: Any, contract: type) -> list[Any]:
    return [sample for kind in methods_of(stage, contract) for sample in samples_of(kind)]


SCORERS = samples(kvtailor.score, Scorer)
ALLOCATORS = samples(kvtailor.allocate, Allocator)
SELECTORS = [*samples(kvtailor.select, Selector), kvtailor.select.chunks.Chunks(size=3, heads="all")]
MERGERS = samples(kvtailor.merge, Merger)
CODECS = samples(kvtailor.encode, Codec)
ATTENTIONS = [
    *samples(kvtailor.attend, Attention),
    kvtailor.attend.quest.Quest(tokens=32, least=1, dense_layers=0),
    kvtailor.attend.rocket.Rocket(tokens=24, expect=4),
    kvtailor.attend.rocket.Rocket(tokens=24, expect=4, turns=True, window=4, kernel=3),
]
every_rank = pytest.mark.parametrize("ranks", RANKS)


def named(method: Method) -> str:
    return str(word_of(method))


def rows(seed: int = 0, heads: int = HEADS) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [make_row(n, heads=heads, group=GROUP, size=SIZE, generator=generator) for n in LENGTHS]


def by_head(method: Method) -> list[str]:
    return [name for each in calibrated(with_nested(method)) for name in each.per_head]


def uneven(held: Held) -> Held:
    """The same with heads that have lost other tokens, as after an eviction under uneven budgets."""
    gone = (
        torch.rand(held.valid.shape, generator=torch.Generator().manual_seed(9))
        < torch.linspace(0.1, 0.5, held.valid.shape[1])[None, :, None]
    )
    gone[..., -8:] = False
    return replace(held, valid=held.valid & ~gone)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("scorer", SCORERS, ids=named)
def test_scores(scorer: Scorer, ragged: bool, ranks: int) -> None:
    held = held_by(scorer, rows())
    held = uneven(held) if ragged else held
    whole = scorer.score(held)
    found = torch.cat(on_ranks(ranks, lambda share: scorer.score(held_of_share(held, share, by_head(scorer)))), 1)
    assert torch.allclose(found[held.valid], whole[held.valid], atol=1e-5, rtol=1e-5)


@every_rank
@pytest.mark.parametrize("allocator", ALLOCATORS, ids=named)
def test_what_allocators_measure(allocator: Allocator, ranks: int) -> None:
    held = uneven(held_of(rows(1), allocator.needs))
    whole = allocator.measure(held)
    found = on_ranks(ranks, lambda share: allocator.measure(held_of_share(held, share)))
    for each in found:
        assert (each is None) == (whole is None)
        # The same bits on all ranks: a share of a token more or less must not depend on who counts.
        if whole is not None and each is not None and found[0] is not None:
            assert torch.allclose(each.double(), whole.double(), rtol=1e-5) and torch.equal(each, found[0])


def candidate(layer: int, scores: Tensor, measured: Tensor | None) -> ScoredLayer:
    return ScoredLayer(
        layer=layer,
        scores=scores,
        counts=(scores > -torch.inf).sum(-1),
        floor=(scores == torch.inf).sum(-1),
        measured=measured,
    )


@every_rank
@pytest.mark.parametrize("allocator", ALLOCATORS, ids=named)
def test_budgets_and_kept_sets(allocator: Allocator, ranks: int) -> None:
    """Each head competes with heads of other processes for what they share, and is cut to what it won."""
    heads = next(h for h in (4, 8, 2) if allocator.misfit(layers=LAYERS, heads=h, size=SIZE) is None)
    if heads % ranks:
        return
    generator = torch.Generator().manual_seed(3)
    every, measured = [], []
    for layer in range(LAYERS):
        scores = torch.rand(2, heads, 50, generator=generator) * torch.rand(2, heads, 1, generator=generator)
        scores[..., -4:] = torch.inf
        # The first heads hold fewer tokens, so that slots differ between ranks.
        scores[:, 0, :20] = -torch.inf
        every.append(scores)
        made = [make_row(20, heads=heads, group=2, size=4, generator=generator) for _ in range(2)]
        measured.append(allocator.measure(held_of(made, allocator.needs, layer=layer, layers=LAYERS)))
    total = torch.tensor([LAYERS * heads * 17, LAYERS * heads * 9 + 5])
    budget = Budget(total=total, each=total // (LAYERS * heads), row_tokens=torch.tensor([50, 50]))
    calibration = example_tensors(allocator, layers=LAYERS, heads=heads, group=2, size=4) or None
    plan = Plan(score=Position(), allocate=allocator, tokens=17)
    scopes = {"layer": [[0], [1], [2]], "prompt": [[0, 1, 2]], "progressive": [[0], [0, 1], [0, 1, 2]]}
    for layers in scopes[allocator.scope]:

        def work(share: HeadShare, layers: list[int] = layers) -> Any:
            given = []
            for i in layers:
                one = candidate(i, every[i], measured[i])
                # Slots behind a rank's longest head are not there.
                own = share.own(every[i], 1)
                given.append(replace(one, scores=own[..., int((own > -torch.inf).any((0, 1)).nonzero()[0]) :]))
            return decide(
                plan,
                given,
                budget,
                layers=LAYERS,
                last=len(layers) == LAYERS or allocator.scope == "layer",
                calibration=calibration,
                share=share,
            )

        (whole,) = on_ranks(1, work)
        found = on_ranks(ranks, work)
        for rank, each in enumerate(found):
            assert torch.equal(each.budgets, whole.budgets)
            for ours, theirs in zip(each.cuts, whole.cuts, strict=True):
                assert torch.equal(ours.counts, theirs.counts) and (ours.keep is None) == (theirs.keep is None)
                if ours.keep is not None and theirs.keep is not None:
                    own = theirs.keep.chunk(ranks, 1)[rank]
                    assert torch.equal(ours.keep, own[..., own.shape[-1] - ours.keep.shape[-1] :])


@every_rank
@pytest.mark.parametrize("selector", SELECTORS, ids=named)
def test_selections(selector: Selector, ranks: int) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(3, HEADS, 41, generator=generator)
    scores[..., -3:], scores[0, :, :7] = torch.inf, -torch.inf
    plan = Plan(score=Position(), select=selector, tokens=12)
    budget = Budget(total=torch.full((3,), 48), each=torch.full((3,), 12), row_tokens=torch.full((3,), 41))

    def work(share: HeadShare) -> Any:
        one = candidate(0, scores, None)
        (cut,) = decide(
            plan, [replace(one, scores=share.own(scores, 1))], budget, layers=1, last=True, share=share
        ).cuts
        return cut

    (whole,) = on_ranks(1, work)
    found = on_ranks(ranks, work)
    assert torch.equal(torch.cat([each.keep for each in found], 1), whole.keep)
    assert all(torch.equal(each.counts, whole.counts) for each in found)


@every_rank
@pytest.mark.parametrize("merger", MERGERS, ids=named)
def test_mergers(merger: Merger, ranks: int) -> None:
    held = uneven(held_of(rows(2), merger.needs))
    keep = held.valid & (torch.rand(held.valid.shape, generator=torch.Generator().manual_seed(5)) < 0.4)
    keep[..., -1] = held.valid[..., -1]

    def work(share: HeadShare) -> Any:
        own = share.own(keep, 1)
        return merger.merge(held_of_share(held, share), own, own), own

    ((whole, _),) = on_ranks(1, work)
    found = on_ranks(ranks, work)
    if whole is None:
        assert all(each is None for each, _ in found)
        return
    for name in ("keys", "values", "log_weight"):
        due = getattr(whole, name)
        parts = [] if due is None else due.chunk(ranks, 1)
        for (each, own), part in zip(found, parts, strict=due is not None):
            # (b, h, k): of each head as many as it keeps; behind them is filler.
            mine, count = getattr(each, name), own.sum(-1)
            filled = torch.arange(mine.shape[2]) < count[..., None]
            assert torch.allclose(mine[filled], part[:, :, : mine.shape[2]][filled], atol=1e-5)


@every_rank
@pytest.mark.parametrize("sample", CODECS, ids=named)
def test_codecs(sample: Codec, ranks: int) -> None:
    """What a process stores of its heads decodes to what one process has of them, groups across processes included."""
    if sample.split_refusal(heads=HEADS // ranks, ranks=ranks) is not None:
        assert "project" in str(sample.split_refusal(heads=HEADS // ranks, ranks=ranks))
        return
    lanes, slots = len(LENGTHS) * HEADS, 48
    keys, values = states((lanes, slots, 16), 1, torch.float32), states((lanes, slots, 16), 2, torch.float32)
    others = states((lanes, slots, 16), 3, torch.float32), states((lanes, slots, 16), 4, torch.float32)
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01]))

    def work(share: HeadShare) -> tuple[Tensor, Tensor]:
        def own(tensor: Tensor) -> Tensor:
            return share.own(tensor.unflatten(0, (len(LENGTHS), HEADS)), 1).flatten(0, 1)

        heads = HEADS // share.ranks
        codec = sample.for_layer(CodecContext(layer=2, layers=LAYERS, heads=heads, rotation=rotation, share=share))
        layout = Layout(rows=len(LENGTHS), heads=heads, size=slots, start=0)
        if codec.across:
            segment = codec.encode_group(layout, [(own(others[0]), own(others[1])), (own(keys), own(values))])[1]
        else:
            segment = codec.encode(layout, own(keys), own(values))
        fields, tensors = segment.state()
        segment = codec.restore(layout, fields, tensors)
        found = [each.unflatten(0, (len(LENGTHS), heads)) for each in segment.decode()]
        return found[0], found[1]

    (whole,) = on_ranks(1, work)
    found = on_ranks(ranks, work)
    for side in (0, 1):
        joined = torch.cat([each[side] for each in found], 1)
        # Sums that meet in another order may fall on the other side of a rounding: then a code differs by one step.
        apart = (joined - whole[side]).abs() > 1e-4
        assert apart.float().mean() < 0.002 and joined.shape == whole[side].shape


@every_rank
@pytest.mark.parametrize("method", ATTENTIONS, ids=named)
def test_attentions(method: Attention, ranks: int) -> None:
    """A prompt is indexed, then three tokens are decoded; heads hold different numbers of tokens."""
    generator = torch.Generator().manual_seed(6)
    heads, n, size = HEADS, 64, 16
    keys = torch.randn(2 * heads, n + 3, size, generator=generator)
    values = torch.randn(2 * heads, n + 3, size, generator=generator)
    queries = torch.randn(2, heads * GROUP, n + 3, size, generator=generator)
    rotation = Rotation(frequencies=torch.tensor([1.0, 0.3, 0.1, 0.01]))

    def work(share: HeadShare) -> list[Tensor]:
        def own(tensor: Tensor) -> Tensor:
            return share.own(tensor.unflatten(0, (2, heads)), 1).flatten(0, 1)

        h = heads // share.ranks
        context = AttentionContext(layer=1, layers=2, rotation=rotation, share=share)
        layout = Layout(rows=2, heads=h, size=n, start=0)
        codec = Indexed()
        plain = PlainSegment(layout=layout, keys=own(keys[:, :n]), values=own(values[:, :n]))
        parts: list[Any] = [plain]
        outputs = []
        seen = LazyMask.causal(2, n, 0, keys.device)
        query = share.own(queries, 1)
        first = method.attend(
            AttentionRequest(query=query[:, :, :n], parts=parts, visible=seen, scaling=0.4, context=context)
        )
        if method.needs_codec == "indexed":
            parts = [codec.encode(layout, plain.keys, plain.values)]
        carry = method.index(IndexRequest(parts=parts, visible=seen, context=replace(context, carry=first.carry)))
        for step in range(3):
            tail = PlainSegment(
                layout=Layout(rows=2, heads=h, size=step + 1, start=n),
                keys=own(keys[:, n : n + step + 1]),
                values=own(values[:, n : n + step + 1]),
            )
            found = method.attend(
                AttentionRequest(
                    query=query[:, :, n + step : n + step + 1],
                    parts=[*parts, tail],
                    visible=LazyMask.causal(2, 1, n + step, keys.device),
                    scaling=0.4,
                    context=replace(context, carry=carry),
                )
            )
            carry = found.carry
            outputs.append(found.output)
        return outputs

    (whole,) = on_ranks(1, work)
    found = on_ranks(ranks, work)
    for step, due in enumerate(whole):
        assert torch.allclose(torch.cat([each[step] for each in found], 1), due, atol=1e-5)
