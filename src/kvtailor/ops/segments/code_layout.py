"""How the codes of one side lie in memory, and what they stand for: all that reads them as they are goes by this.

A code that is one of these kinds is read by the plain forms, and by C++ and Triton where their tables of kinds have it
(`ops/attention/cpu/sides.py`, `ops/attention/triton/sides.py`), without a line of theirs.
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["Aside", "CodeKind", "CodeLayout", "TokenMagnitudes", "TokenSigns"]


class CodeKind(Enum):
    """What the code k of a channel stands for. Tables and scales are those of its token, or of its run of tokens.

    Attributes:
        WHOLE: there are no codes; states are as the model made them.
        TOKENS: k * step + low, or (k - zero) * step, with tables for each token and block of channels.
        CHANNELS: k * step + low, with tables for each channel of a run of tokens.
        LEVELS: levels[k] * step, with a step for each token.
        POINTS: a code is of two channels, i and size - 1 - i: levels[k, 0] * step and levels[k, 1] * step.
        SIGNS: LEVELS, and behind them as many numbers again, each plus or minus a number of the token.
        BLOCKS: levels[k], a small float, times a scale of 8 bits for each block of channels, times one of a run.
        FITTED: levels[k] * step + low, where each run of tokens has levels; some numbers are kept aside as they are.
        FLOATS: k is an 8-bit float, times a step for each run of tokens.
    """

    WHOLE = "whole"
    TOKENS = "tokens"
    CHANNELS = "channels"
    LEVELS = "levels"
    POINTS = "points"
    SIGNS = "signs"
    BLOCKS = "blocks"
    FITTED = "fitted"
    FLOATS = "floats"

    # Readers look kinds up for every part of every layer, and Enum's own hash is a call of Python.
    __hash__ = object.__hash__


class TokenSigns(NamedTuple):
    """Signs (m, s, bytes) uint8, packed as codes of one bit, 1 for plus; and what they are of, (m, s, 1)."""

    signs: Tensor
    norm: Tensor


class Aside(NamedTuple):
    """Numbers kept as they are: how many of each token (m, s), in which channels (n,), and the numbers (n,)."""

    counts: Tensor
    channels: Tensor
    exact: Tensor


class TokenMagnitudes(NamedTuple):
    """Factors (m, s, 1) of whole tokens, but for those at the places (r,) int32 lane * s + slot, which are (r, c)."""

    magnitudes: Tensor
    places: Tensor
    whole: Tensor


class CodeLayout(NamedTuple):
    """Codes of states (m, s, c), and their tables.

    A tuple, since a decoded token makes one for each part that is plain.

    Attributes:
        kind: what a code stands for.
        codes: (m, s, bytes) uint8, packed along the channels by `ops.codes.quant.pack`; or plain states (m, s, c).
        size: c, channels.
        dtype: in which tables are read. In float32 products are as exact, else as 16 bits allow.
        bits: of a code; 0 where states are plain.
        step: what levels or codes are multiplied by: (m, s, c / block), or (m, ceil(s / group), ...) of runs of tokens,
            with `row` (rows, ...). Of BLOCKS uint8.
        low: as step; None: the code `zero` stands for 0.
        zero: of TOKENS without low, the code of 0.
        steps: of TOKENS, whether each is above 0, may be 0, or may also be negative.
        row: (m, s) int32 row of the tables that each token uses; None: slot i uses row i // group of its lane.
        group: tokens that share tables.
        block: channels that share a step.
        levels: float32 on the CPU, the same tensor for all of such codes: (2^bits,), ascending where they are LEVELS;
            of POINTS (2^bits, 2). Of FITTED (m, ceil(s / group), 2^bits) of the cache's dtype.
        element: of small floats "e2m1", "e4m3" or "e5m2".
        exponents: scales of BLOCKS are powers of two (E8M0), and not floats (E4M3).
        outer: of BLOCKS (m, ceil(s / group), 1) float32, what the scales of a run of tokens are multiplied by; with
            `row` (rows, 1). None: nothing.
        signs: of SIGNS.
        aside: of FITTED.
        magnitudes: of the tokens, whatever their kind; None: there are none.
    """

    kind: CodeKind
    codes: Tensor
    size: int
    dtype: torch.dtype
    bits: int = 0
    step: Tensor | None = None
    low: Tensor | None = None
    zero: int = 0
    steps: Literal["above 0", "0 and more", "any"] = "above 0"
    row: Tensor | None = None
    group: int = 1
    block: int = 1
    levels: Tensor | None = None
    element: str | None = None
    exponents: bool = False
    outer: Tensor | None = None
    signs: TokenSigns | None = None
    aside: Aside | None = None
    magnitudes: TokenMagnitudes | None = None
