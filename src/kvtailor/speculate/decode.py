"""The loop: rounds and plain tokens until there are enough."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from kvtailor.speculate.contract import Draft, Reader, Rule
from kvtailor.speculate.lookahead import Controller
from kvtailor.speculate.rounds import Level, Statistics, next_token, verified

__all__ = ["Decoding", "Drafting"]


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """A draft, how it is counted, and when it makes anew what it remembers.

    Attributes:
        draft: proposes tokens to the target.
        levels: counts; the first of them is the target's.
        refresh: emitted tokens after which the draft makes anew what it remembers; None: never.
        renew: how it does so, from the columns so far, of which it reads all but the last.
    """

    draft: Draft
    levels: tuple[Level, ...]
    refresh: int | None = None
    renew: Callable[[Tensor], None] | None = None


class Decoding:
    """One run of a batch.

    Args:
        target: has read all columns of the prompt.
        rule: chooses and judges.
        controller: how many tokens to draft; used only where there is a draft.
        drafting: None: plain decoding.
        eos: tokens that end a row.
        pad: what ended rows emit; needed where there are several.
        emit: called with (b, t) tokens as soon as they are certain, in order.
    """

    def __init__(
        self,
        target: Reader,
        rule: Rule,
        controller: Controller,
        drafting: Drafting | None,
        *,
        eos: Collection[int] = (),
        pad: int = 0,
        emit: Callable[[Tensor], None] | None = None,
    ):
        self.target, self.rule, self.controller, self.drafting = target, rule, controller, drafting
        self.pad, self.emit = pad, emit
        self.eos = torch.tensor(sorted(eos), dtype=torch.int64)
        self.statistics = Statistics(levels=() if drafting is None else drafting.levels)
        self._stale = self._told = 0

    def run(self, ids: Tensor, first: Tensor, count: int) -> Tensor:
        """Return the prompt's columns `ids` (b, n) and at most `count` tokens after them, the first being `first` (b,).

        The run stops at the token with which the last row ends.
        """
        self.live = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
        ids = self._taken(ids, first[:, None])
        end = ids.shape[1] + count - 1
        started = perf_counter()
        while ids.shape[1] < end and bool(self.live.any()):
            ids = self._advanced(ids, end - ids.shape[1])
        self.target.wait()
        self.statistics.seconds = perf_counter() - started
        self.statistics.plain_seconds = self.controller.measured.plain
        return ids

    def _advanced(self, ids: Tensor, most: int) -> Tensor:
        until_action = self.target.tokens_until_action()
        # A verification reads the last token too, and gives one more than was drafted.
        longest = min(most - 1, most if until_action is None else until_action - 1)
        count = min(self.controller.length(), longest) if self.drafting is not None and longest > 0 else 0
        if self.drafting is None or count < 1:
            return self._plain(ids)
        return self._round(self.drafting, ids, count)

    def _plain(self, ids: Tensor) -> Tensor:
        started = perf_counter()
        tokens = next_token(self.target, self.rule, ids).tokens
        self.target.settle()
        self.target.wait()
        self.controller.plain_took(perf_counter() - started)
        ids = self._taken(ids, tokens)
        self.statistics.tokens += 1
        self.statistics.plain_tokens += 1
        return ids

    def _round(self, drafting: Drafting, ids: Tensor, count: int) -> Tensor:
        before, started = ids.shape[1], perf_counter()
        if drafting.refresh is not None and drafting.renew is not None and self._stale >= drafting.refresh:
            drafting.renew(ids)
            self._stale = 0
        proposal = drafting.draft.propose(ids, count)
        self.target.wait()
        drafted = perf_counter()
        level = self.statistics.levels[0]
        _, over = self._ends(proposal.tokens)
        given = verified(self.target, self.rule, ids, proposal, self.live, level, over=over, pad=self.pad)
        ids = self._taken(ids, given.tokens)
        # Of an accepted run that goes on after the text's end, nothing stays.
        for each in (self.target, drafting.draft):
            each.retract(ids.shape[1] - 1)
            each.settle()
        self.target.wait()
        self.controller.round_took(
            proposal.tokens.shape[1], drafted - started, perf_counter() - drafted, given.accepted, given.judged
        )
        emitted = ids.shape[1] - before
        level.emitted += self._told
        self.statistics.tokens += emitted
        self._stale += emitted
        return ids

    def _taken(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Append new tokens (b, t) to the text, up to the token with which the last row ends."""
        ended, over = self._ends(tokens)
        tokens = tokens.masked_fill(over, self.pad)
        alive = (self.live[:, None] & (ended == 0)).any(0)
        length = tokens.shape[1] if bool(alive.all()) else int(alive.to(torch.int64).argmin()) + 1
        self.live = self.live & (ended[:, length - 1] == 0)
        tokens = tokens[:, :length]
        self._told = int((~over[:, :length]).sum())
        if self.emit is not None:
            self.emit(tokens)
        return torch.cat([ids, tokens], 1)

    def _ends(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of new tokens (b, t): how many up to each end a row, and which lie behind the end of their row's text."""
        ends = (torch.isin(tokens, self.eos.to(tokens.device)) & self.live[:, None]).to(torch.int64)
        ended = ends.cumsum(1)
        return ended, (ended - ends > 0) | ~self.live[:, None]
