"""The model in a finer dtype, and whether scores are farther from it than the model's own ways to compute them.

Two exact ways to compute one attention differ by rounding, and by how much depends on model, text, dtype and processor:
on SmolLM2-135M in bfloat16 two ways are 0.036 nats apart in the mean token, and on the embedded model 0.003 to 0.1. So
no limit on a difference between two ways is right for all models. But each way is as far from the truth as rounding
takes it, and the truth can be had: the same weights in float32 (of a float32 model: in float64). What is farther from
it than the model's own cache under both of its attentions, or is off to one side, by more than chance gives, lost
something.

The noise of half precision hides much: a cache that loses a tenth of its tokens is often no farther from the truth than
rounding takes every other one. So a plan is computed in the finer dtype too, where the same code has next to no noise.

The weights of one decoder layer at a time are made finer, so a large model needs room for one such layer and for what
is in none.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvtailor.bench.contestant import OTHER_ATTENTION, OWN_ROUNDED, Contestant
from kvtailor.bench.measure.machine import free_bytes
from kvtailor.bench.measure.statistics import FEWEST, student_quantile
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.processes import started

__all__ = ["FARTHER", "ReferenceScores", "finer", "judge", "reference_of"]

_LONGEST = 4096  # tokens, of which eager attention makes a whole matrix
_BLOCK = 16
"""Tokens next to each other share the rounding of their context, so the samples of the test are means of so many."""
_FALSE_ALARMS = 0.001
FARTHER = 0.25
"""Most by which the mean distance may exceed that of the model's own ways, as a share of theirs."""
_BIASED = 0.125
"""The same of the mean difference with its sign."""
_NEGLIGIBLE = 1e-4
"""Nats in the mean token that no number of a report shows."""
_TINY = 1e-12
_AT_ONCE = 1 / 3
"""Share of the free memory that the weights may take in the finer dtype, all at once.

Layer by layer they are made finer again in every forward, which takes far longer than a token itself.
"""

Score = Callable[[Contestant], Sequence[Tensor]]


@dataclass(frozen=True)
class ReferenceScores:
    """Log-probabilities of the same tokens, one tensor (t,) for each piece of text.

    Attributes:
        truth: by the model in a finer dtype; None where that is not to be had.
        dtype: in which; of the model itself where there is no truth.
        ways: by the model's own cache in its own dtype, by the name of the attention.
        why: there is no truth, in half a sentence.
        finely: by the plan that is judged, in the finer dtype; None where nobody asked or it could not be had.
    """

    truth: Sequence[Tensor] | None
    dtype: torch.dtype
    ways: Mapping[str, Sequence[Tensor]]
    why: str = ""
    finely: Sequence[Tensor] | None = None


def reference_of(subject: Subject, score: Score, tokens: int, judged: Contestant | None = None) -> ReferenceScores:
    """Score some pieces of text by the model in a finer dtype, and by its own cache under both of its attentions.

    Args:
        subject: the model.
        score: of the pieces under a contestant.
        tokens: of the longest piece.
        judged: a plan that is computed in the finer dtype as well, where model or cache is in half precision.
    """
    stock, half = subject.stock_attention, subject.cache_dtype.itemsize <= 2
    ways = {stock or "its own attention": score(OWN_ROUNDED)}
    if stock is not None and tokens <= _LONGEST:
        ways["sdpa" if stock == "eager" else "eager"] = score(OTHER_ATTENTION)
    try:
        with finer(subject) as dtype:
            truth = [each.double() for each in score(OWN_ROUNDED)]
            finely = None if judged is None or not half else score(judged)
            return ReferenceScores(truth, dtype, ways, finely=finely)
    except (KvtailorError, RuntimeError, NotImplementedError, TypeError) as error:
        return ReferenceScores(None, subject.dtype, ways, str(error).splitlines()[0])


def judge(
    ours: Sequence[Tensor], reference: ReferenceScores, margin: float = FARTHER, name: str = "plan 'full'"
) -> tuple[bool, str]:
    """Say whether scores are as near to the truth as the model's own ways are, and a sentence with all distances.

    Distances are means of blocks of neighbouring tokens. One is too far where it exceeds those of *all* of the model's
    own ways, by Student's one-sided test of the blocks' ratios at 0.001 and by `margin` of theirs; or where the
    differences lean to one side in the same manner. Without a truth, what is compared is how far ours are from each way
    and how far the ways are from each other.

    Args:
        ours: like `ReferenceScores.truth`.
        reference: of the same tokens.
        margin: see `FARTHER`.
        name: of what is judged.
    """
    count = sum(each.numel() for each in ours)
    if any(bool(each.isnan().any()) for each in ours):
        return False, f"{name} gives NaN, where the model's own cache gives numbers,"
    if reference.truth is None:
        return _judge_among_themselves(ours, reference, margin, name, count)
    mine = _errors(ours, reference.truth)
    theirs = {way: _errors(scores, reference.truth) for way, scores in reference.ways.items()}
    dtype = str(reference.dtype).removeprefix("torch.")
    sentence = (
        f"{name} is {_mean_size(mine):.2e} nats a token from the model in {dtype} "
        f"({_lean(mine):+.1e} with its sign), and its own cache "
        + " and ".join(f"{_mean_size(each):.2e} under {way} ({_lean(each):+.1e})" for way, each in theirs.items())
        + f", over {count} tokens"
    )
    return not _strays(mine, list(theirs.values()), margin), sentence


def _judge_among_themselves(
    ours: Sequence[Tensor], reference: ReferenceScores, margin: float, name: str, count: int
) -> tuple[bool, str]:
    (first, own), *others = reference.ways.items()
    apart = [_errors(own, other) for _, other in others]
    mine = _errors(ours, own)
    told = "".join(
        f"; under {first} and {way} that cache differs from itself by {_mean_size(each):.2e}"
        for (way, _), each in zip(others, apart, strict=True)
    )
    sentence = (
        f"{name} is {_mean_size(mine):.2e} nats a token from the model's own cache under {first}, over {count} tokens"
        f"{told} (a finer dtype was not to be had: {reference.why})"
    )
    if not apart:
        # Nothing says what rounding does here.
        return False, sentence
    far = [_errors(ours, way) for way in reference.ways.values()]
    return not all(_are_larger(_sizes(each), _sizes(apart[0]), margin) for each in far), sentence


def _strays(mine: Sequence[Tensor], theirs: Sequence[Sequence[Tensor]], margin: float) -> bool:
    """Whether errors are larger than all of those that the model's own ways have, or lean to one side of them."""
    if all(_are_larger(_sizes(mine), _sizes(each), margin) for each in theirs):
        return True
    share = margin * _BIASED / FARTHER
    return any(
        all(_leans(_signed(mine, side) - _signed(each, side), share * _mean_size(each)) for each in theirs)
        for side in (1, -1)
    )


def _leans(more: Tensor, least: float) -> bool:
    return float(more.mean()) > max(_NEGLIGIBLE, least) and _is_beyond_chance(more)


def _are_larger(ours: Tensor, theirs: Tensor, margin: float) -> bool:
    """Whether sizes (n,) of the errors in the same blocks are larger by `margin` and beyond chance.

    The test is of their ratios: a size that varies over the text is no doubt on one that is always the larger.
    """
    if not float((ours - theirs).mean()) > max(_NEGLIGIBLE, margin * float(theirs.mean())):
        return False
    return _is_beyond_chance(ours.clamp(min=_TINY).log() - theirs.clamp(min=_TINY).log())


def _is_beyond_chance(samples: Tensor) -> bool:
    """Whether the mean of samples (n,) is above zero, by Student's one-sided test; of too few it is believed."""
    count = samples.numel()
    if count < FEWEST:
        return True
    mean, error = float(samples.mean()), float(samples.std()) / math.sqrt(count)
    return mean > student_quantile(1 - _FALSE_ALARMS, count - 1) * error


def _errors(ours: Sequence[Tensor], truth: Sequence[Tensor]) -> list[Tensor]:
    return [a.double() - b.double() for a, b in zip(ours, truth, strict=True)]


def _sizes(errors: Sequence[Tensor]) -> Tensor:
    return _block_means([each.abs() for each in errors])


def _signed(errors: Sequence[Tensor], side: int) -> Tensor:
    return _block_means([side * each for each in errors])


def _block_means(pieces: Sequence[Tensor]) -> Tensor:
    """(n,) means of blocks of neighbours, of which there are some even where the tokens are few."""
    size = max(1, min(_BLOCK, sum(each.numel() for each in pieces) // (2 * FEWEST)))
    return torch.stack([block.mean() for each in pieces for block in each.split(size)])


def _mean_size(errors: Sequence[Tensor]) -> float:
    return float(torch.cat(list(errors)).abs().mean())


def _lean(errors: Sequence[Tensor]) -> float:
    return float(torch.cat(list(errors)).mean())


@contextmanager
def finer(subject: Subject) -> Iterator[torch.dtype]:
    """Compute in float32 what is in half precision, and in float64 what is in float32, within this context.

    The weights stay as they are, bit for bit. All are made finer for the whole time where that takes a third of the
    free memory at most; otherwise those of a layer while it runs. What was there is put back, whatever happens.

    Raises:
        KvtailorError: processes share the model, its weights are quantised or elsewhere, or memory is short.
    """
    model: Any = subject.model
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        raise KvtailorError("it has no weights")
    if started().size > 1:
        raise KvtailorError("several processes share it")
    dtype = torch.float64 if subject.dtype in (torch.float32, torch.float64) else torch.float32
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or type(parameter.data) is not Tensor or parameter.device.type == "meta":
            raise KvtailorError(f"{name} is quantised, shared or elsewhere")
    free = free_bytes(subject.device)
    whole = dtype.itemsize * sum(each.numel() for each in _tensors(model))
    layers = [] if free is not None and whole <= free * _AT_ONCE else _layers(model)
    of_layers = {id(each) for layer in layers for each in _tensors(layer)}
    outside = [each for each in _tensors(model) if id(each) not in of_layers]
    needs = dtype.itemsize * (
        sum(each.numel() for each in outside)
        + max((sum(each.numel() for each in _tensors(layer)) for layer in layers), default=0)
    )
    if free is not None and needs > free / 2:
        raise KvtailorError(f"in {dtype} its largest layer and what is in none take {needs} bytes, and {free} are free")
    stock = subject.stock_attention
    with ExitStack() as stack:
        # That a cache of ours computes in float32 is known here.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="this model is in float64")
        kept: list[tuple[Tensor, Tensor]] = []
        stack.callback(_restore, kept)
        _make_finer(outside, dtype, kept)
        for layer in layers:
            own: list[tuple[Tensor, Tensor]] = []
            stack.callback(_restore, own)
            before = layer.register_forward_pre_hook(_finer_hook(own, dtype))
            stack.callback(before.remove)
            after = layer.register_forward_hook(_restoring_hook(own))
            stack.callback(after.remove)
        # What is kept has gone through the model in its own dtype.
        stack.callback(object.__setattr__, subject, "kept", subject.kept)
        object.__setattr__(subject, "kept", None)
        if stock not in (None, "sdpa", "eager"):
            # Kernels made for half precision take nothing else.
            object.__setattr__(subject, "stock_attention", "sdpa")
            stack.callback(object.__setattr__, subject, "stock_attention", stock)
        yield dtype


def _finer_hook(kept: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Callable[..., None]:
    return lambda layer, given: _make_finer(_tensors(layer), dtype, kept)


def _restoring_hook(kept: list[tuple[Tensor, Tensor]]) -> Callable[..., None]:
    return lambda layer, given, found: _restore(kept)


def _make_finer(tensors: Sequence[Tensor], dtype: torch.dtype, kept: list[tuple[Tensor, Tensor]]) -> None:
    # The hooks run while inference mode is on, and a weight may not become one of its tensors.
    with torch.inference_mode(False), torch.no_grad():
        for each in tensors:
            if each.is_floating_point() and each.dtype.itemsize < dtype.itemsize:
                kept.append((each, each.data))
                each.data = each.data.to(dtype)


def _restore(kept: list[tuple[Tensor, Tensor]]) -> None:
    for each, data in kept:
        each.data = data
    kept.clear()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest list that is in no other list: a model's decoder layers; none where there is none."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=[]))
