"""What becomes of one tiny model under kvtailor: it works, is refused, crashes, or gives something else."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tests.support.every_model.build import NotBuilt, build
from tests.support.every_model.pairs import Pair
from tests.support.every_model.reference import decoded_under_mask
from tests.support.every_model.shrink import FIRST_SPECIAL
from tests.support.seam.zoo import ROUNDING
from torch import Tensor

import kvtailor
from kvtailor.errors import KvtailorError
from kvtailor.hf.versions import hand_cache, read_cache

__all__ = ["EVICTING", "ENCODING", "VERDICTS", "Verdict", "judge"]

# Models whose prompt needs what a processor gives beside the tokens, as `token_type_ids`.
TYPED = frozenset({"paligemma"})
WORKS, REFUSED, LATE, CRASH, DIFFERS, NOT_BUILT = "works", "refused", "refused late", "crash", "differs", "not built"
VERDICTS = (WORKS, REFUSED, LATE, CRASH, DIFFERS, NOT_BUILT)
EVICTING = "snapkv(window=4) @ tokens=16"
ENCODING = "kivi(bits=4, group=8, recent=8)"
BESIDE = "its own cache while one of ours is alive"
PROMPT, DECODED, TURN = 40, 8, 6
EXACT = ROUNDING
"""Largest difference of a logit, relative to the largest logit."""


@dataclass
class Verdict:
    """The verdict on a pair.

    Attributes:
        mapping, model_type, model_class: the pair.
        verdict: one of `VERDICTS`.
        reason: the sentence of a refusal, an error's, or why there is no model; empty where it works.
        where: what was being done; empty where it works.
        numbers: errors and shares that were measured, by name.
        seconds: of the whole judgement.
    """

    mapping: str
    model_type: str
    model_class: str
    verdict: str = WORKS
    reason: str = ""
    where: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


class _Ends(Exception):
    """A verdict other than "works" was reached."""

    def __init__(self, verdict: str, reason: str, where: str):
        super().__init__(reason)
        self.verdict, self.reason, self.where = verdict, reason, where


def judge(pair: Pair) -> Verdict:
    """Return what becomes of a tiny model of the pair."""
    found = Verdict(*pair)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _judge(pair, found.numbers)
    except _Ends as end:
        found.verdict, found.reason, found.where = end.verdict, end.reason, end.where
    return found


def _judge(pair: Pair, numbers: dict[str, float]) -> None:
    try:
        model = build(pair)
    except NotBuilt as missing:
        raise _Ends(NOT_BUILT, str(missing), "building") from missing
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_logit_softcapping", None):
        # The sdpa of older releases drops the cap without a word; eager is what the family is defined by.
        model.set_attn_implementation("eager")
    if not hasattr(model, "generate") or not model.can_generate():
        # A forward without generation is no decoding; what kvtailor makes of the model is asked all the same.
        _refusal_expected(model, "it cannot generate")
    ids = _prompt(1, PROMPT)
    try:
        own = _generated(model, ids, torch.ones_like(ids))
        again = _generated(model, ids, torch.ones_like(ids))
    except Exception as broken:
        _refusal_expected(model, f"its own generate() ends with {_told(broken)}")
        raise
    if own.past is None:
        _refusal_expected(model, "its own generate() gives no cache back")
    if not torch.equal(own.logits, again.logits):
        _refusal_expected(model, "two runs of its own differ")
    if own.logits.isnan().any():
        _refusal_expected(model, "its own logits are not finite")
    with _refusals("cache_for", model):
        cache = kvtailor.cache_for(model, "full")
    with _errors("full"):
        ours = _generated(model, ids, torch.ones_like(ids), cache)
        numbers["full"] = _compared(ours, own, "full")
    with _errors(BESIDE):
        numbers["own beside ours"] = _compared(_generated(model, ids, torch.ones_like(ids)), own, BESIDE)
    with _errors("turn two of full"):
        turn = _prompt(1, TURN, state=5)
        if not cache.geometry.restarts:
            found = _next_turn(model, ours, turn, cache)
            expected = _next_turn(model, own, turn, own.past)
            if error(found.logits, expected.logits) > EXACT:
                # MiniMax's own cache forgets at a second turn; what it means is the text at once.
                expected = _next_turn(model, own, turn, None)
            numbers["turn two"] = _compared(found, expected, "turn two")
            del found
    plain_bytes = cache.ledger().total
    # The model has its own attention back once no cache of ours is there.
    del cache, ours
    padded, mask = _padded()
    try:
        own_padded = _generated(model, padded, mask)
    except Exception:
        own_padded = None
    if own_padded is not None:
        with _errors("a padded batch"):
            cache = kvtailor.cache_for(model, "full")
            found = _generated(model, padded, mask, cache)
            expected = own_padded
            if error(found.logits, own_padded.logits) > EXACT:
                # MiniMax's own cache reads padding while it decodes; each row alone is what a batch has to give.
                expected = _each_alone(model, padded, mask)
            numbers["padded batch"] = _compared(found, expected, "a padded batch")
        with _errors(BESIDE):
            beside = _generated(model, padded, mask)
            numbers["padded beside ours"] = _compared(beside, own_padded, BESIDE)
            del cache, found
    if not _compressed(model):
        raise _Ends(WORKS, "every layer has a sliding window of the model's own: there is nothing to compress", "")
    _evicts(model, ids, own, numbers)
    _encodes(model, ids, numbers, plain_bytes)
    with _errors("its own cache afterwards"):
        if not torch.equal(_generated(model, ids, torch.ones_like(ids)).logits, own.logits):
            raise _Ends(DIFFERS, "the model's own generation is not what it was before", "its own cache afterwards")


def _evicts(model: Any, ids: Tensor, own: Generated, numbers: dict[str, float]) -> None:
    with _errors(EVICTING):
        with _refusals(EVICTING, model):
            cache = kvtailor.cache_for(model, EVICTING)
        found = _generated(model, ids, torch.ones_like(ids), cache)
        _finite(found, EVICTING)
        held = float(cache.held().double().mean())
        numbers["held"] = held
        if not held <= 16 + DECODED:
            raise _Ends(DIFFERS, f"{held:.1f} tokens are held for each head, and 16 were asked for", EVICTING)
        numbers["contrast"] = error(found.logits[:, 1:2], own.logits[:, 1:2]) if _same_first(found, own) else -1.0
        expected = decoded_under_mask(model, cache, ids, found.tokens, **_typed(model, ids))
        if expected is not None:
            numbers["truth"] = error(found.logits[:, : expected.shape[1]], expected)
            if not numbers["truth"] <= EXACT:
                raise _Ends(
                    DIFFERS, f"logits differ by {numbers['truth']:.1e} from those of a masked full cache", EVICTING
                )


def _encodes(model: Any, ids: Tensor, numbers: dict[str, float], plain_bytes: int) -> None:
    with _errors(ENCODING):
        with _refusals(ENCODING, model):
            cache = kvtailor.cache_for(model, ENCODING)
        found = _generated(model, ids, torch.ones_like(ids), cache)
        _finite(found, ENCODING)
        if not cache.geometry.restarts:
            _finite(_next_turn(model, found, _prompt(1, TURN, state=5), cache), ENCODING)
        held = cache.ledger().total
        numbers["encoded bytes"] = held / plain_bytes
        if not held < plain_bytes:
            raise _Ends(DIFFERS, f"{held} bytes are held, and {plain_bytes} under full", ENCODING)


@dataclass
class Generated:
    """What a model generated: tokens (b, n + t), logits (b, t, v), and the cache."""

    tokens: Tensor
    logits: Tensor
    past: Any


def _generated(model: Any, ids: Tensor, mask: Tensor, cache: Any = None, steps: int = DECODED) -> Generated:
    options: dict[str, Any] = {} if cache is None else hand_cache(cache)
    options |= _typed(model, ids)
    torch.manual_seed(3)
    with torch.no_grad():
        found = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            use_cache=True,
            **options,
        )
    return Generated(found.sequences, torch.stack(found.logits, 1).float(), read_cache(found))


def _each_alone(model: Any, ids: Tensor, mask: Tensor) -> Generated:
    """What the rows of a left-padded batch generate without the others."""
    alone = []
    for row in range(len(ids)):
        own = ids[row : row + 1, int((1 - mask[row]).sum()) :]
        alone.append(_generated(model, own, torch.ones_like(own)))
    new = torch.cat([each.tokens[:, -DECODED:] for each in alone])
    return Generated(torch.cat([ids, new], 1), torch.cat([each.logits for each in alone]), None)


def _typed(model: Any, ids: Tensor) -> dict[str, Tensor]:
    return {"token_type_ids": torch.zeros_like(ids)} if model.config.model_type in TYPED else {}


def _next_turn(model: Any, before: Generated, turn: Tensor, cache: Any) -> Generated:
    ids = torch.cat([before.tokens, turn], 1)
    return _generated(model, ids, torch.ones_like(ids), cache, steps=4)


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    # What a model forbids has the lowest number there is, in both.
    allowed = expected > -1e30
    if not torch.equal(allowed, found > -1e30):
        return float("inf")
    found, expected = found[allowed], expected[allowed]
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def _compared(found: Generated, expected: Generated, where: str) -> float:
    if found.logits.shape != expected.logits.shape:
        shapes = f"{tuple(found.logits.shape)} instead of {tuple(expected.logits.shape)}"
        raise _Ends(DIFFERS, f"logits have the shape {shapes}", where)
    _finite(found, where)
    largest = error(found.logits, expected.logits)
    if not largest <= EXACT or not torch.equal(found.tokens, expected.tokens):
        raise _Ends(DIFFERS, f"logits differ by {largest:.1e} from those with the model's own cache", where)
    return largest


def _finite(found: Generated, where: str) -> None:
    if found.logits.isnan().any():
        raise _Ends(DIFFERS, "logits are NaN", where)


def _same_first(found: Generated, own: Generated) -> bool:
    return torch.equal(found.tokens[:, : PROMPT + 1], own.tokens[:, : PROMPT + 1])


def _compressed(model: Any) -> bool:
    return bool(kvtailor.cache_for(model, "full").geometry.compressed)


def _refusal_expected(model: Any, why: str) -> None:
    """Ends with the sentence of `cache_for`; where it has none, the pair cannot be judged by text."""
    with _refusals("cache_for", model):
        kvtailor.cache_for(model, "full")
    raise _Ends(NOT_BUILT, f"cannot be judged: {why}", "its own generate()")


class _refusals:
    """Turns kvtailor's own errors into the verdict "refused"; the model must be what it was."""

    def __init__(self, where: str, model: Any):
        self.where, self.model = where, model

    def __enter__(self) -> None:
        self.before = self.model.config._attn_implementation

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, KvtailorError):
            raise _Ends(REFUSED, _one_line(str(error)), self.where) from error
        if isinstance(error, Exception):
            raise _Ends(CRASH, _told(error), self.where) from error


class _errors:
    """Turns what ends a forward into the verdicts "refused late" and "crash"."""

    def __init__(self, where: str):
        self.where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, _Ends) or not isinstance(error, Exception):
            return
        if isinstance(error, KvtailorError):
            raise _Ends(LATE, _one_line(str(error)), self.where) from error
        raise _Ends(CRASH, _told(error), self.where) from error


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_one_line(str(error))[:300]} ({Path(frame.filename).name}: {frame.line})"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _prompt(rows: int, tokens: int, state: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(state)
    return torch.randint(3, FIRST_SPECIAL - 10, (rows, tokens), generator=generator)


def _padded() -> tuple[Tensor, Tensor]:
    ids = _prompt(2, PROMPT, state=2)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    ids[1, :9] = 0
    return ids, mask
