"""Whether ATSKV's networks are worth anything: against the SnapKV score among their own features, on held-out text.

Three numbers, each with a 95 % interval of the paired difference over held-out passages and documents: the share of the
future attention that falls on the tokens that a budget keeps; the nats of a token after a compressed context; and the
nats of the answers to generated questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.contestant import Contestant
from kvtailor.bench.measure.statistics import Estimate, mean_difference
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import score_window
from kvtailor.calibration.relevance_examples import Example, Text
from kvtailor.calibration.relevance_training import logits_of, loss_of
from kvtailor.score.atskv import ATSKV

__all__ = ["KEEPS", "RIVALS", "kept_mass", "of_attention", "of_models", "rank_correlation", "sentence"]

KEEPS = (0.25, 0.1)
RIVALS = {"snapkv(kernel=5)": 2, "snapkv(kernel=21)": 3}
"""Plans that score by one of the features, and which one. The first is SnapKV's own, the other shows how much of a gain
is no more than a wider average.
"""
_OWN = "atskv"


def of_attention(networks: dict[str, Tensor], examples: Sequence[Example], *, always: int) -> dict[str, Any]:
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
    subject: Subject, file: str, texts: Sequence[Text], *, advance: Callable[[str], None] = lambda what: None
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


def kept_mass(scores: Tensor, example: Example, keep: float, always: int) -> Tensor:
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


def _scores(networks: dict[str, Tensor], example: Example) -> dict[str, Tensor]:
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


def _nats(subject: Subject, contestant: Contestant, text: Text) -> float:
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
