"""What a user asks of a plan: limits on memory, loss and time. What has no limit is made as small as it can be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.ops.sizes import bytes_of

__all__ = ["Aim", "Question", "QuestionError", "load_faults", "memory_of", "seconds_of"]

Aim = Literal["loss", "bytes", "time"]
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s)")
_IN_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class QuestionError(KvtailorError, ValueError):
    """A question that cannot be answered as it is asked. Holds all faults at once, each a whole sentence."""

    def __init__(self, faults: list[str]):
        self.faults = tuple(faults)
        super().__init__("\n  - ".join(["fit cannot answer what was asked:", *faults]))


@dataclass(frozen=True, kw_only=True)
class Question:
    """Limits, and the load that they are for.

    Attributes:
        context: tokens of each row's prompt.
        batch: rows.
        memory: bytes that the cache of all rows may have after the prompt; None: no limit.
        loss: most nats per token of text that the plan may lose to the full cache; None: no limit.
        points: most points of percent of right answers that it may lose, of any family; None: no limit.
        seconds: most time for a decoded token of all rows; None: no limit.
    """

    context: int
    batch: int = 1
    memory: int | None = None
    loss: float | None = None
    points: float | None = None
    seconds: float | None = None

    @property
    def aim(self) -> Aim:
        """What is made as small as it can be: what has no limit, of several the loss before the bytes.

        With limits on all three, the loss: the others are met or they are not.
        """
        if self.loss is None and self.points is None:
            return "loss"
        if self.memory is None:
            return "bytes"
        return "time" if self.seconds is None else "loss"

    @classmethod
    def of(
        cls,
        *,
        full: int,
        context: int,
        batch: int = 1,
        memory: int | str | None = None,
        bytes_per_token: float | None = None,
        keep_bytes: float | str | None = None,
        loss: float | None = None,
        points: float | None = None,
        tpot: float | str | None = None,
    ) -> Question:
        """Return the question in bytes and seconds.

        Args:
            full: bytes of the uncompressed cache at this context and batch.
            context, batch: see the class.
            memory: bytes of the whole cache, or text such as "2GiB".
            bytes_per_token: the same for one token of one row.
            keep_bytes: the same as a share of `full`: 0.25 or "25%".
            loss: nats per token.
            points: of percent.
            tpot: seconds for a decoded token, or text such as "12ms".

        Raises:
            QuestionError: with all faults at once.
        """
        faults = load_faults(context, batch)
        limits = {"memory": memory, "bytes_per_token": bytes_per_token, "keep_bytes": keep_bytes}
        given = [name for name, value in limits.items() if value is not None]
        if len(given) > 1:
            words = " and ".join(f"{name}={limits[name]}" for name in given)
            faults.append(f"{words} limit the same bytes in several units: give one of them")
        limit = None
        if len(given) == 1 and not faults:
            try:
                limit = memory_of(given[0], limits[given[0]], full=full, tokens=context * batch)
            except ValueError as error:
                faults.append(str(error))
        seconds = None
        if tpot is not None:
            try:
                seconds = seconds_of(tpot)
            except ValueError as error:
                faults.append(str(error))
        for name, value, unit in (("loss", loss, "nats per token"), ("points", points, "points of percent")):
            if value is not None and (isinstance(value, bool) or not _above_0(value)):
                faults.append(f"{name} is {value!r}: give a number of {unit} above 0")
        if not given and loss is None and points is None and tpot is None and not faults:
            faults.append(
                "there is no limit: give what you have (memory='2GiB', keep_bytes=0.25 or bytes_per_token=) or what "
                "you can bear (loss=0.01, points=5)"
            )
        if not given and loss is None and points is None and tpot is not None and not faults:
            faults.append(
                "a limit on time alone is met by the full cache, or by nothing that is right: give a memory or a loss "
                "beside it"
            )
        if faults:
            raise QuestionError(faults)
        return cls(context=context, batch=batch, memory=limit, loss=loss, points=points, seconds=seconds)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "context": self.context,
            "batch": self.batch,
            "memory": self.memory,
            "loss": self.loss,
            "points": self.points,
            "seconds": self.seconds,
            "aim": self.aim,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Question:
        """Return what `as_dict` wrote."""
        return cls(**{name: value for name, value in found.items() if name != "aim"})


def load_faults(context: object, batch: object) -> list[str]:
    """Return what is wrong with a context and a batch, whole sentences."""
    faults = []
    if not _whole(context) or context < 2:
        faults.append(f"context is {context!r}: give a whole number of tokens from 2 up")
    if not _whole(batch) or batch < 1:
        faults.append(f"batch is {batch!r}: give a whole number of rows from 1 up")
    return faults


def memory_of(unit: str, asked: Any, *, full: int, tokens: int) -> int:
    """Return a limit in bytes.

    Args:
        unit: "memory", "bytes_per_token" or "keep_bytes".
        asked: its value, see `Question.of`.
        full: bytes of the uncompressed cache.
        tokens: of all rows.

    Raises:
        ArgumentError: no such value.
    """
    if isinstance(asked, str) and (share := _SHARE.fullmatch(asked.strip())) and unit != "bytes_per_token":
        part = float(share[1]) / 100
        if not 0 < part <= 1:
            raise ArgumentError(f"{unit} is {asked}: give a share of the uncompressed bytes, above 0 and at most 100%")
        return max(1, math.floor(part * full))
    if unit == "memory" and isinstance(asked, str):
        try:
            asked = bytes_of(asked)
        except ValueError as error:
            raise ArgumentError(f"memory is not a size: {error}; a share such as 25% is one too") from error
    if isinstance(asked, str):
        try:
            asked = float(asked)
        except ValueError as error:
            raise ArgumentError(f"{unit} is {asked!r}: give a number") from error
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not math.isfinite(asked) or asked <= 0:
        raise ArgumentError(f"{unit} is {asked!r}: give a number above 0")
    if unit == "memory" and asked < 1:
        raise ArgumentError(f"memory is {asked!r}, less than one byte: give bytes, or a share such as {100 * asked:g}%")
    if unit == "keep_bytes":
        if asked > 1:
            raise ArgumentError(f"keep_bytes is {asked}: give a share of the uncompressed bytes, above 0 and at most 1")
        return max(1, math.floor(asked * full))
    return max(1, math.floor(asked * tokens)) if unit == "bytes_per_token" else math.floor(asked)


def seconds_of(asked: float | str) -> float:
    """Return the seconds that "12ms", "0.5s" or a plain number of seconds stands for.

    Raises:
        ArgumentError: none of these, or not above 0.
    """
    value: Any = asked
    if isinstance(asked, str):
        hit = _SECONDS.fullmatch(asked.strip())
        value = float(hit[1]) * _IN_SECONDS[hit[2]] if hit else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ArgumentError(f"tpot is {asked!r}: give a time above 0 with its unit, such as 12ms")
    return float(value)


def _above_0(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
