"""Methods of a third party that break their contract are refused by name, before what they say is used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.allocate.uniform import Uniform
from kvtailor.attend.segments import Segments
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.vector import Vector
from kvtailor.errors import KvtailorError, MethodError
from kvtailor.hf.versions import hand_cache
from kvtailor.merge.contract import Merged, Merger
from kvtailor.plan import Plan
from kvtailor.score.by_keys.knorm import KNorm
from kvtailor.score.critical import Critical
from kvtailor.score.h2o import H2O
from kvtailor.select.topk import TopK
from kvtailor.types import Held, PlainSegment
from tests.support.seam.zoo import build, prompts

TOKENS, HEADS = 40, 2
HELD = (1, HEADS, TOKENS)


def run(**parts: Any) -> None:
    """A prompt, and a few tokens more, through a cache of the plan."""
    model = build("llama")
    ids, _ = prompts((TOKENS,))
    cache = kvtailor.cache_for(model, Plan(**{"score": KNorm(), "tokens": 16, **parts}))
    with torch.no_grad():
        model(ids, **hand_cache(cache))
        model(ids[:, :3], **hand_cache(cache))


def changed(base: type, method: str, change: Callable[..., Any], **declared: Any) -> Any:
    """A third party's method: another one, of which one call returns something else."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(getattr(base, method)(self, *args, **kwargs))

    kind = type("Theirs", (base,), {method: call, "__module__": "theirs", **declared})
    return dataclasses.dataclass(frozen=True, kw_only=True)(kind)()


SCORES = {
    "of one number": (lambda s: s[:1, :1, :1], r"scores of shape \(1, 1, 1\), where \(1, 2, 40\) is due"),
    "of one head": (lambda s: s[:, :1], r"scores of shape \(1, 1, 40\)"),
    "without heads": (lambda s: s[:, 0], r"scores of shape \(1, 40\)"),
    "in half precision": (lambda s: s.half(), r"scores of torch.float16, where torch.float32 is due"),
    "elsewhere": (lambda s: s.to("meta"), r"scores on meta, where cpu is due"),
    "as a list": (lambda s: s.tolist(), r"returned list as scores"),
}


@pytest.mark.parametrize("wrong", SCORES)
def test_scores(wrong: str) -> None:
    change, sentence = SCORES[wrong]
    with pytest.raises(MethodError, match=rf"Theirs \(of theirs\) returned {sentence}|Theirs \(of theirs\) {sentence}"):
        run(score=changed(KNorm, "score", change))
    with pytest.raises(MethodError, match=r"Theirs \(of theirs\)"):
        run(score=Critical(of=changed(KNorm, "score", change)))


def test_the_scale_of_scores() -> None:
    with pytest.raises(MethodError, match=r"Theirs .* attention_scale of shape \(\), where \(1,\) is due"):
        run(score=Critical(of=changed(H2O, "attention_scale", lambda scale: scale[0])))


def moved(budgets: torch.Tensor, by: int) -> torch.Tensor:
    other = budgets.clone()
    other[0, 0, 0] += by
    return other


BUDGETS = {
    "for one head": (lambda b: b[..., :1], r"budgets of shape \(1, 1, 1\), where \(1, 1, 2\) is due"),
    "as floats": (lambda b: b.double(), r"budgets of torch.float64, where torch.int64 is due"),
    "below zero": (lambda b: moved(b, -100), r"gave -84 tokens to \(row, layer, head\) \(0, 0, 0\), below the tokens"),
    "above capacity": (lambda b: moved(b, 100), r"gave 116 tokens to .* above the tokens that are there, which are 40"),
}


@pytest.mark.parametrize("wrong", BUDGETS)
def test_budgets(wrong: str) -> None:
    change, sentence = BUDGETS[wrong]
    with pytest.raises(MethodError, match=rf"Theirs \(of theirs\) .*{sentence}"):
        run(allocate=changed(Uniform, "allocate", change))


def test_budgets_of_another_sum() -> None:
    """All layers at once: 3 layers of 2 heads and 16 tokens each are 96 in all. More is refused, less is said."""
    more, fewer = (changed(Uniform, "allocate", lambda b, by=by: moved(b, by), scope="prompt") for by in (1, -2))
    with pytest.raises(MethodError, match=r"gave row 0 97 tokens in all, where 96 are due"):
        run(allocate=more)
    with pytest.warns(UserWarning, match=r"Theirs .* gave row 0 94 tokens in all, where 96 are due.* fewer are held"):
        run(allocate=fewer)


def test_one_layer_cannot_get_more_than_all() -> None:
    with pytest.raises(MethodError, match=r"gave row 0 66 tokens in all, where 60 are due"):
        run(allocate=changed(Uniform, "allocate", lambda b: torch.full_like(b, 33)), tokens=10)


def test_layers_one_after_the_other_cannot_get_more_than_all() -> None:
    """3 layers of 2 heads and 16 tokens each, of which each layer alone gets less than there is for all."""
    with pytest.raises(MethodError, match=r"gave row 0 128 tokens beyond .* on 2 layers, where all .* have 96"):
        run(allocate=changed(Uniform, "allocate", lambda b: 2 * b))
    half_of_them = [0]

    def front(budgets: torch.Tensor) -> torch.Tensor:
        half_of_them[0] += 1
        return budgets + (8 if half_of_them[0] % 3 == 1 else -4)

    for _ in range(2):
        run(allocate=changed(Uniform, "allocate", front))


def test_what_an_allocator_is_shown_stays_what_it_is() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Greedy(Uniform):
        def allocate(self, request: Any) -> torch.Tensor:
            request.total.mul_(2)
            return super().allocate(request)

    with pytest.raises(MethodError, match=r"Greedy .* gave row 0 128 tokens beyond"):
        run(allocate=Greedy())


def test_what_an_allocator_measured() -> None:
    for wrong in (torch.zeros(5), 3.0, torch.zeros(())):
        with pytest.raises(MethodError, match=r"Theirs .* measured .* where a tensor of 1 rows is due"):
            run(allocate=changed(Uniform, "measure", lambda _, wrong=wrong: wrong))


KEPT = {
    "of one head": (lambda k: k[:, :1], r"a kept set of shape \(1, 1, 40\), where \(1, 2, 40\) is due"),
    "as numbers": (lambda k: k.long(), r"a kept set of torch.int64, where torch.bool is due"),
    "too many": (lambda k: k | True, r"kept 40 tokens in \(row, head\) \(0, 0\), where 16 are due"),
    "too few": (lambda k: k & False, r"kept 0 tokens in \(row, head\) \(0, 0\), where 16 are due"),
}


@pytest.mark.parametrize("wrong", KEPT)
def test_kept_sets(wrong: str) -> None:
    change, sentence = KEPT[wrong]
    with pytest.raises(MethodError, match=rf"Theirs \(of theirs\) .*{sentence}"):
        run(select=changed(TopK, "select", change))


def test_a_kept_set_of_padding() -> None:
    model = build("llama")
    ids, mask = prompts((TOKENS, 20))
    first = changed(TopK, "select", lambda kept: (torch.arange(TOKENS) < 16).expand_as(kept))
    cache = kvtailor.cache_for(model, Plan(score=KNorm(), select=first, tokens=16))
    with pytest.raises(MethodError, match=r"Theirs .* kept 32 slots that hold no token"), torch.no_grad():
        model(ids, attention_mask=mask, **hand_cache(cache))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Folding(Merger):
    """Gives the kept tokens as they are."""

    def merge(self, held: Held, keep: torch.Tensor, into: torch.Tensor) -> Merged:
        at = keep.flatten(0, 1).nonzero()[:, 1].view(1, HEADS, -1, 1)
        return Merged(
            keys=held.keys.gather(2, at.expand(-1, -1, -1, held.keys.shape[-1])),
            values=held.values.gather(2, at.expand(-1, -1, -1, held.values.shape[-1])),
        )


MERGED = {
    "keys of one token": (
        lambda m: dataclasses.replace(m, keys=m.keys[:, :, :1]),
        r"merged keys of shape \(1, 2, 1, 16\)",
    ),
    "values in float64": (lambda m: dataclasses.replace(m, values=m.values.double()), "merged values of torch.float64"),
    "weights unsaid": (lambda m: dataclasses.replace(m, log_weight=m.keys[..., 0]), "does not declare that it is"),
    "a pair": (lambda m: (m.keys, m.values), r"returned a tuple, where Merged or None is due"),
}


@pytest.mark.parametrize("wrong", MERGED)
def test_merged_tokens(wrong: str) -> None:
    run(merge=Folding())
    change, sentence = MERGED[wrong]
    with pytest.raises(MethodError, match=rf"Theirs \(of theirs\) .*{sentence}"):
        run(merge=changed(Folding, "merge", change))


@pytest.mark.parametrize("score", [KNorm(), None])
def test_segments(score: Any) -> None:
    """Of what a cut left, and of what left the tail."""
    budget = {"score": score, "tokens": 16 if score else None}
    run(encode=Vector(), **budget)
    with pytest.raises(MethodError, match=r"Theirs .* returned a tuple as a segment, where a \w+ is due"):
        run(encode=changed(Vector, "encode", lambda s: (s.keys, s.values)), **budget)
    shorter = changed(Vector, "encode", lambda s: s.rows(torch.tensor([0, 0])))
    with pytest.raises(MethodError, match=r"Theirs .* segment of \(rows, heads, lanes, slots\) \(2, 2, 4"):
        run(encode=shorter, **budget)


DECODED = {
    "keys of one token": (lambda k, v: (k[:, :1], v), r"decoded keys of shape \(\d+, 1, 16\), where \(\d+, \d+, 16\)"),
    "one channel": (lambda k, v: (k, v[..., :1]), r"decoded values of shape \(\d+, \d+, 1\), where \(\d+, \d+, 16\)"),
    "in float64": (lambda k, v: (k.double(), v), r"decoded keys of torch.float64, where torch.float32 is due"),
}


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("wrong", DECODED)
def test_decoded_states(wrong: str, around: bool) -> None:
    """What would be broadcast, once it is read; also inside of a codec of ours."""
    change, sentence = DECODED[wrong]

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Plainly(PlainSegment):
        plain = False

        def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
            return change(self.keys, self.values)

    theirs = changed(
        Vector,
        "encode",
        lambda s: Plainly(layout=s.layout, **dict(zip(("keys", "values"), s.decode(), strict=True))),
        segment_type=lambda self: Plainly,
    )
    with pytest.raises(MethodError, match=sentence):
        run(encode=Hadamard(of=theirs) if around else theirs)


OUTPUTS = {
    "of one query": (
        lambda a: dataclasses.replace(a, output=a.output[:, :, :1]),
        r"an output of shape \(1, 4, 1, 16\)",
    ),
    "of one head": (lambda a: dataclasses.replace(a, output=a.output[:, :1]), r"an output of shape \(1, 1, 40, 16\)"),
    "in float64": (lambda a: dataclasses.replace(a, output=a.output.double()), "an output of torch.float64"),
    "nothing": (lambda a: None, "returned NoneType as an output"),
    "read of a row": (
        lambda a: dataclasses.replace(a, tokens_read=torch.zeros(1).long()),
        r"tokens read of shape \(1,\)",
    ),
}


@pytest.mark.parametrize("wrong", OUTPUTS)
def test_outputs(wrong: str) -> None:
    change, sentence = OUTPUTS[wrong]
    with pytest.raises(MethodError, match=rf"Theirs \(of theirs\) .*{sentence}"):
        run(attend=changed(Segments, "attend", change))


@pytest.mark.parametrize("wrong", [None, [], [torch.zeros(1, TOKENS)]], ids=str)
def test_mass(wrong: Any) -> None:
    theirs = changed(Segments, "attend", lambda a: dataclasses.replace(a, mass=wrong))
    with pytest.raises(MethodError, match=r"Theirs .* returned mass of"):
        run(score=H2O(recent=4), attend=theirs)


def test_a_method_that_keeps_its_contract_is_taken() -> None:
    for base, method in ((KNorm, "score"), (Uniform, "allocate"), (TopK, "select"), (Segments, "attend")):
        stage = {KNorm: "score", Uniform: "allocate", TopK: "select", Segments: "attend"}[base]
        run(**{stage: changed(base, method, lambda found: found)})
    assert issubclass(MethodError, KvtailorError)
