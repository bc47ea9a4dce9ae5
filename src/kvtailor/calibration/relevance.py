"""ATSKV's networks: what they learn from, their training, and whether they are worth anything.

They learn from features of held tokens, and the attention that later tokens really give them; all heads of all layers
are trained at once. The verdict is against the SnapKV score among their own features, on held-out text, in three
numbers, each with a 95 % interval of the paired difference over held-out passages and documents: the share of the
future attention that falls on the tokens that a budget keeps; the nats of a token after a compressed context; and the
nats of the answers to generated questions.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.data.synthetic.documents import SPLITS, TASKS, Document, make_document
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import code_document
from kvtailor.bench.tasks.perplexity import score_window
from kvtailor.calibration.passages import Passage
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.presets import FULL
from kvtailor.score.atskv import ATSKV
from kvtailor.types import Held

__all__ = [
    "RelevanceExample",
    "HIDDEN",
    "KEEPS",
    "RIVALS",
    "AskedText",
    "as_text",
    "cut_passage",
    "documents_of",
    "examples_of",
    "held_before",
    "kept_mass",
    "logits_of",
    "loss_of",
    "of_attention",
    "of_models",
    "rank_correlation",
    "sentence",
    "train",
]

_FUTURE = 128
_BLOCK = 64
_SHORTEST, _LONGEST = 20, 250


@dataclass(frozen=True)
class AskedText:
    """Tokens that end with something to predict.

    Attributes:
        ids: (n,) int64.
        cuts: where a prompt ends, at each of which the tokens after it are the future.
        future: most tokens after a cut that count.
        source: "text" or "questions".
    """

    ids: Tensor
    cuts: tuple[int, ...]
    future: int
    source: str


@dataclass(frozen=True)
class RelevanceExample:
    """One prompt in all compressed layers; n candidates, neither sinks nor the window.

    Attributes:
        features: (l, h, n, f) float16.
        mass: (l, h, n) float32 attention that each candidate gets, mean over the future's queries and the group.
        tokens: of the prompt.
        source: see `AskedText`.
    """

    features: Tensor
    mass: Tensor
    tokens: int
    source: str


def cut_passage(passage: Passage) -> AskedText:
    """A passage with two cuts, in its middle and before its last `_FUTURE` tokens."""
    size = int(passage.ids.numel())
    future = max(1, min(_FUTURE, size // 4))
    return AskedText(passage.ids, (size // 2, size - future), future, "text")


def documents_of(subject: Subject, passages: Sequence[Passage], context: int, state: int) -> list[Document]:
    """As many generated documents as there are passages: facts among the passages' own sentences, and a question.

    Of the split "calibration", so that no instance is ever part of an evaluation. A document that does not fit into
    `context` tokens is left out.
    """
    sentences = [
        f"{each.strip()}."
        for passage in passages
        for each in " ".join(passage.text.split()).split(". ")
        if _SHORTEST < len(each) < _LONGEST
    ]
    draw = random.Random(state)
    states, kinds = SPLITS["calibration"], list(TASKS)
    found = []
    for index in range(len(passages)):
        length, depth = draw.randrange(context // 3, max(context - context // 8, context // 3 + 1)), draw.random()
        try:
            document = make_document(
                kinds[index % len(kinds)],
                state=states[(1000 * state + index) % len(states)],
                split="calibration",
                length=length,
                depth=depth,
                count_tokens=subject.count,
                filler=sentences or None,
            )
        except ValueError:
            continue
        found.append(document)
    return found


def as_text(subject: Subject, document: Document) -> AskedText:
    """A document with one cut, before its answer."""
    context, question, answer = code_document(subject, document)
    prompt = torch.cat([context, question])
    return AskedText(torch.cat([prompt, answer]), (int(prompt.numel()),), int(answer.numel()), "questions")


def examples_of(subject: Subject, text: AskedText, scorer: ATSKV) -> Iterator[RelevanceExample]:
    """One example for each cut, from a single forward.

    Args:
        subject: the model.
        text: tokens and cuts.
        scorer: whose features are read.
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {cut: [] for cut in text.cuts}

    def see(states: LayerStates) -> None:
        for cut, layers in found.items():
            layers.append(_of_layer(states, cut, text.future, scorer))

    cache = cache_for(subject.model, FULL)
    with watched(cache, see):
        subject.forward(text.ids[None], cache, last_only=True)
    for cut, layers in found.items():
        features, mass = (torch.stack(each) for each in zip(*layers, strict=True))
        if features.shape[2]:
            yield RelevanceExample(features, mass, cut, text.source)


def held_before(states: LayerStates, cut: int, window: int) -> Held:
    """What the layer would hold of the first `cut` tokens alone, at the end of their prefill."""
    heads = states.keys.shape[0]
    columns = torch.arange(cut, device=states.keys.device)
    window = min(window, cut)
    return Held(
        keys=states.keys[None, :, :cut],
        values=states.values[None, :, :cut],
        positions=columns.expand(1, heads, cut),
        valid=torch.ones((1, heads, cut), dtype=torch.bool, device=columns.device),
        first=columns.new_zeros(1),
        seen=cut,
        layer=states.layer,
        layers=states.layer + 1,
        scaling=states.scaling,
        softmax=states.softmax,
        queries=states.queries[None, :, cut - window : cut],
        query_columns=columns[cut - window :],
    )


def _of_layer(states: LayerStates, cut: int, future: int, scorer: ATSKV) -> tuple[Tensor, Tensor]:
    """Features (h, n, f) float16 and future attention (h, n) of the candidates of one layer."""
    held = held_before(states, cut, scorer.window)
    end = min(cut + future, states.queries.shape[1])
    candidates = slice(min(scorer.sinks, cut), max(cut - scorer.window, min(scorer.sinks, cut)))
    features, mass = [], []
    for head in range(states.keys.shape[0]):
        features.append(scorer.features(held, 0, head)[candidates].half().cpu())
        total = torch.zeros(cut, device=states.keys.device, dtype=torch.float32)
        for first in range(cut, end, _BLOCK):
            last = min(first + _BLOCK, end)
            total += states.attention(head, first, last)[..., :cut].mean(0).sum(0)
        mass.append((total / (end - cut))[candidates].cpu())
    return torch.stack(features), torch.stack(mass)


HIDDEN = 32
_RATE = 2e-2
_AT_ONCE = 4
_TINY = 1e-12


def train(
    examples: Sequence[RelevanceExample], *, steps: int, state: int, advance: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Networks that predict each token's share of the future attention, as `score/atskv.py` reads them.

    The loss is the cross-entropy between the shares of the candidates' future attention and the softmax of the logits
    over them: the likelihood of attention that falls on tokens one by one. It cares for the order of the tokens and not
    for how much attention a head gives them together. The last bias then makes the exponential of a logit the expected
    attention beside an even share, so that the sigmoid is 1/2 there.

    Args:
        examples: at least one.
        steps: of Adam, each with `_AT_ONCE` examples.
        state: random state of weights and order.
        advance: called after each step.

    Returns:
        hidden (l, h, f, 32), hidden_bias (l, h, 32), out (l, h, 32), out_bias (l, h), float32.

    Raises:
        KvtailorError: there is no example, or the loss became no number.
    """
    if not examples:
        raise KvtailorError("there is nothing to learn from: give more text, or longer passages")
    layers, heads, _, features = examples[0].features.shape
    middle, scale = _moments(examples)
    generator = torch.Generator().manual_seed(state)
    hidden = torch.randn(layers, heads, features, HIDDEN, generator=generator, dtype=torch.float32) * features**-0.5
    out = torch.randn(layers, heads, HIDDEN, generator=generator, dtype=torch.float32) * HIDDEN**-0.5
    learned = [
        hidden,
        torch.zeros(layers, heads, HIDDEN, dtype=torch.float32),
        out,
        torch.zeros(layers, heads, dtype=torch.float32),
    ]
    for tensor in learned:
        tensor.requires_grad_()

    def networks() -> dict[str, Tensor]:
        # The features' scales go into the first matrix, so that a scorer needs no others.
        first = learned[0] / scale[..., None]
        bias = learned[1] - (middle[..., None] * first).sum(2)
        return {"hidden": first, "hidden_bias": bias, "out": learned[2], "out_bias": learned[3]}

    descent = torch.optim.Adam(learned, lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(descent, steps)
    with torch.enable_grad():
        for _ in range(steps):
            chosen = torch.randint(len(examples), (_AT_ONCE,), generator=generator).tolist()
            loss = torch.stack([loss_of(networks(), examples[each]) for each in chosen]).mean()
            descent.zero_grad()
            loss.backward()
            descent.step()
            schedule.step()
            advance()
    made = {name: tensor.detach().clone() for name, tensor in networks().items()}
    if not all(bool(tensor.isfinite().all()) for tensor in made.values()):
        raise KvtailorError("training ended with weights that are no numbers: give more text, or another random state")
    made["out_bias"] += _offset(made, examples)
    return made


def logits_of(networks: dict[str, Tensor], example: RelevanceExample) -> Tensor:
    """(l, h, n) float32 before the sigmoid."""
    hidden = example.features.float() @ networks["hidden"] + networks["hidden_bias"][:, :, None]
    return (hidden.relu() @ networks["out"][..., None])[..., 0] + networks["out_bias"][..., None]


def loss_of(networks: dict[str, Tensor], example: RelevanceExample) -> Tensor:
    """Cross-entropy of the candidates' shares, mean over layers and heads."""
    shares = example.mass / example.mass.sum(-1, keepdim=True).clamp_min(_TINY)
    return -(shares * logits_of(networks, example).log_softmax(-1)).sum(-1).mean()


def _moments(examples: Sequence[RelevanceExample]) -> tuple[Tensor, Tensor]:
    """(l, h, f) mean and standard deviation of the features."""
    together = torch.cat([example.features for example in examples], 2).float()
    return together.mean(2), together.std(2).clamp_min(1e-3)


def _offset(networks: dict[str, Tensor], examples: Sequence[RelevanceExample]) -> Tensor:
    """(l, h) what makes the exponential of the logits sum to the attention beside an even share, over all examples."""
    given = torch.stack([(example.mass * example.tokens).mean(-1) for example in examples]).mean(0)
    said = torch.stack([logits_of(networks, example).exp().mean(-1) for example in examples]).mean(0)
    return (given.clamp_min(_TINY) / said.clamp_min(_TINY)).log()


KEEPS = (0.25, 0.1)
RIVALS = {"snapkv(kernel=5)": 2, "snapkv(kernel=21)": 3}
"""Plans that score by one of the features, and which one. The first is SnapKV's own, the other shows how much of a gain
is no more than a wider average.
"""
_OWN = "atskv"


def of_attention(networks: dict[str, Tensor], examples: Sequence[RelevanceExample], *, always: int) -> dict[str, Any]:
    """Loss of the networks, and rank correlation and kept future attention of the method's scores on held-out examples.

    Args:
        networks: that were trained.
        examples: held out, at least one.
        always: tokens that every budget keeps beside the candidates (sinks and window).
    """
    scores = [_scores(networks, example) for example in examples]
    names = list(scores[0])
    kept: dict[str, Any] = {}
    for keep in KEEPS:
        by_name = {
            name: torch.stack(
                [kept_mass(one[name], example, keep, always) for one, example in zip(scores, examples, strict=True)]
            )
            for name in names
        }
        kept[str(keep)] = {
            "mean": {name: found.mean().item() for name, found in by_name.items()},
            **{f"against {rival}": _against(by_name[_OWN], by_name[rival]) for rival in RIVALS},
        }
    ranks = {
        name: fmean(
            rank_correlation(one[name], example.mass).mean().item()
            for one, example in zip(scores, examples, strict=True)
        )
        for name in names
    }
    loss = fmean(loss_of(networks, example).item() for example in examples)
    return {"examples": len(examples), "loss": loss, "rank_correlation": ranks, "kept_attention": kept}


def of_models(
    subject: Subject, file: str, texts: Sequence[AskedText], *, advance: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Nats of a token after a compressed prompt, for the last cut of each text, by source and budget.

    Args:
        subject: the model.
        file: that holds the networks.
        texts: held out.
        advance: called for each text and plan.
    """
    found: dict[str, Any] = {}
    for source in dict.fromkeys(text.source for text in texts):
        mine = [text for text in texts if text.source == source]
        found[source] = {"texts": len(mine)}
        for keep in KEEPS:
            nats = {}
            for name in (_OWN, *RIVALS):
                plan = f"{_OWN}(file={_quoted(file)}) @ keep={keep}" if name == _OWN else f"{name} @ keep={keep}"
                nats[name] = [_nats(subject, Contestant.of(plan), text) for text in mine]
                advance(f"{name} @ keep={keep}")
            found[source][str(keep)] = {
                "mean": {name: fmean(each) for name, each in nats.items()},
                **{f"against {rival}": _told(mean_difference(nats[_OWN], nats[rival])) for rival in RIVALS},
            }
    return found


def kept_mass(scores: Tensor, example: RelevanceExample, keep: float, always: int) -> Tensor:
    """(l, h) share of the candidates' future attention on those that a budget keeps by score.

    Args:
        scores: (l, h, n).
        example: whose attention it is.
        keep: of the prompt's tokens, those among them that are kept in any case.
        always: how many these are.
    """
    count = min(max(1, int(keep * example.tokens) - always), scores.shape[-1])
    chosen = scores.topk(count, -1).indices
    return example.mass.gather(-1, chosen).sum(-1) / example.mass.sum(-1).clamp_min(1e-12)


def rank_correlation(one: Tensor, other: Tensor) -> Tensor:
    """(...) Spearman's coefficient of the last dimension; ties in the order in which they stand."""
    ranks = [each.argsort(dim=-1, stable=True).argsort(dim=-1).double() for each in (one, other)]
    apart = [rank - rank.mean(-1, keepdim=True) for rank in ranks]
    lengths = [each.norm(dim=-1) for each in apart]
    found: Tensor = (apart[0] * apart[1]).sum(-1) / (lengths[0] * lengths[1]).clamp_min(1e-12)
    return found


def sentence(attention: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Whether the networks beat each of `RIVALS`, measure by measure, in numbers."""
    first, *others = (_beats(rival, attention, models) for rival in RIVALS)
    wider = (f"beats {rival}: {said}" for rival, said in zip(list(RIVALS)[1:], others, strict=True))
    return ". ".join([f"beats its SnapKV feature on held-out text: {first}", *wider])


def _beats(rival: str, attention: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    measures = {"future attention kept, points": (100.0, 1, [attention["kept_attention"][str(k)] for k in KEEPS])}
    measures |= {f"nats of {source}": (-1.0, 3, [said[str(k)] for k in KEEPS]) for source, said in models.items()}
    words, parts = [], []
    for name, (scale, digits, found) in measures.items():
        against = [each[f"against {rival}"] for each in found]
        told = [each.get("difference", each) for each in against]
        gains = [sorted(scale * each[end] for end in ("low", "high") if each[end] is not None) for each in told]
        word = _word([gain for gain in gains if gain], len(gains))
        numbers = [
            f"{abs(scale) * each['value']:+.{digits}f} ({_interval(each, abs(scale), digits)}) at keep={keep}"
            for each, keep in zip(told, KEEPS, strict=True)
        ]
        words.append(word)
        parts.append(f"{name}: {word}, {', '.join(numbers)}")
    whole = "yes" if set(words) == {"yes"} else "no" if "yes" not in words else "in part"
    return f"{whole}; {'; '.join(parts)}"


def _word(gains: Sequence[Sequence[float]], wanted: int) -> str:
    """Return the verdict that intervals of gains give together."""
    if any(high < 0 for _, high in gains):
        return "no"
    return "yes" if len(gains) == wanted and all(low > 0 for low, _ in gains) else "not told apart"


def _scores(networks: dict[str, Tensor], example: RelevanceExample) -> dict[str, Tensor]:
    relevance = ATSKV().smoothed(logits_of(networks, example).sigmoid())
    features = {name: example.features[..., index].float() for name, index in RIVALS.items()}
    return {_OWN: relevance, **features}


def _against(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Difference over examples (e, l, h): of the mean over heads, and how many heads differ beyond chance."""
    whole = mean_difference(ours.mean((1, 2)).tolist(), theirs.mean((1, 2)).tolist())
    lanes = zip(ours.flatten(1).unbind(1), theirs.flatten(1).unbind(1), strict=True)
    heads = [mean_difference(one.tolist(), other.tolist()) for one, other in lanes]
    return {
        "difference": _told(whole),
        "heads": len(heads),
        "heads_better": sum(each.low is not None and each.low > 0 for each in heads),
        "heads_worse": sum(each.high is not None and each.high < 0 for each in heads),
        "by_head": [[round(each.value, 4), _rounded(each.low), _rounded(each.high)] for each in heads],
    }


def _nats(subject: Subject, contestant: Contestant, text: AskedText) -> float:
    cut = text.cuts[-1]
    scores, _ = score_window(subject, contestant, text.ids[:cut], text.ids[cut : cut + text.future])
    return -float(scores.mean())


def _told(found: Estimate) -> dict[str, Any]:
    return {"value": found.value, "low": found.low, "high": found.high, "count": found.count}


def _interval(found: Mapping[str, Any], scale: float, digits: int) -> str:
    if found["low"] is None:
        return f"{found['count']} samples"
    return f"{scale * found['low']:+.{digits}f} to {scale * found['high']:+.{digits}f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _quoted(file: str) -> str:
    from kvtailor.plan.grammar import write_value

    return write_value(file)
