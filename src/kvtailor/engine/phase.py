"""What the forwards of a cache mean now: one value, and the only ways from one value to another.

    Compressing -- deferred() -----> Deferred -- reconstructing() --> Reconstructing
    Compressing -- record() -------> Recording
    Compressing -- speculating() --> Speculating
    Compressing -- replaying() ----> Replaying

Each context manager goes back to the phase before it. No other pair goes together: a change that would leave two of
them in force is refused, and the phase stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.engine.reconstruct import ReconstructionPass
from kvtailor.errors import CacheMisuse

__all__ = [
    "Compressing",
    "Deferred",
    "Phase",
    "PhaseSwitch",
    "Reconstructing",
    "Recording",
    "Replaying",
    "Speculating",
]


@dataclass(frozen=True)
class Phase:
    """What new tokens are.

    Attributes:
        meaning: completes a sentence that begins with "this cache".
        can_be_taken_back: the newest tokens may be taken back by a crop, so nothing is done about them before it.
        all_decoded: new tokens are decoded ones, however many come at once.
    """

    meaning: ClassVar[str]
    all_decoded: ClassVar[bool] = False

    @property
    def can_be_taken_back(self) -> bool:
        """Whether what is done about new tokens waits until it is known which of them stay."""
        return False


@dataclass(frozen=True)
class Compressing(Phase):
    """New tokens are a prompt, a turn or decoded, and the plan acts on them at once."""

    meaning: ClassVar[str] = "evicts and encodes what comes, as its plan says"


@dataclass(frozen=True)
class Deferred(Phase):
    """Tokens come in pieces, and nothing is evicted or encoded before the last of them."""

    meaning: ClassVar[str] = "is being prefilled, and compresses once the whole context has come"


@dataclass(frozen=True)
class Reconstructing(Phase):
    """Forwards repeat a piece of the context, to see what they attend to. They leave no trace in what is held.

    Attributes:
        piece: what is repeated.
    """

    piece: ReconstructionPass
    meaning: ClassVar[str] = "is being prefilled, and the model repeats its context"


@dataclass(frozen=True)
class Recording(Phase):
    """Forwards wait for a crop (transformers' assisted decoding, or `activate_past_recording`).

    Attributes:
        prompt: columns of the prompt that transformers' assisted decoding feeds first; None outside of it.
    """

    prompt: int | None = None
    meaning: ClassVar[str] = "records forwards that a crop may take back"

    @property
    def can_be_taken_back(self) -> bool:
        """The prompt of assisted decoding stays; all that comes after it is taken by `rollback.attend_draft`."""
        return self.prompt is None


@dataclass(frozen=True)
class Speculating(Phase):
    """Forwards join until they settle; their tokens are decoded ones, and the newest may be taken back meanwhile."""

    meaning: ClassVar[str] = "speculates, and has not settled which tokens stay"
    all_decoded: ClassVar[bool] = True

    @property
    def can_be_taken_back(self) -> bool:
        return True


@dataclass(frozen=True)
class Replaying(Phase):
    """Steps of one token are replayed on fixed addresses; the cache does not know of their tokens yet."""

    meaning: ClassVar[str] = "is being read by replayed steps that have not landed"


class PhaseSwitch:
    """The phase of one cache.

    Attributes:
        now: the phase.
    """

    def __init__(self) -> None:
        self.now: Phase = Compressing()

    def reset(self) -> None:
        """Go back to `Compressing`, whatever the phase was."""
        self.now = Compressing()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Put off eviction and encoding inside."""
        with self._entered(Deferred(), after=Compressing):
            yield

    @contextmanager
    def reconstructing(self, piece: ReconstructionPass) -> Iterator[None]:
        """Repeat a piece of the context inside, while compression is put off."""
        with self._entered(Reconstructing(piece), after=Deferred):
            yield

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """Let forwards be taken back inside."""
        with self._entered(Speculating(), after=Compressing):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay steps inside; nothing else may use the cache."""
        with self._entered(Replaying(), after=Compressing):
            yield

    def record(self, prompt: int | None = None) -> None:
        """Let forwards wait for a crop from now on. transformers never says when that ends; see `end_recording`.

        Args:
            prompt: see `Recording`. None leaves what an earlier call gave.
        """
        if isinstance(self.now, Recording):
            self.now = Recording(self.now.prompt if prompt is None else prompt)
            return
        self._check(Recording(prompt), after=Compressing)
        self.now = Recording(prompt)

    def end_recording(self) -> None:
        """Go back to `Compressing` from `Recording`; do nothing in any other phase."""
        if isinstance(self.now, Recording):
            self.now = Compressing()

    def check_free(self, what: str) -> None:
        """Raise where replayed steps have not landed.

        Args:
            what: is about to be done with the cache, for the sentence.
        """
        if isinstance(self.now, Replaying):
            raise CacheMisuse(
                f"asked for {what}, and this cache {self.now.meaning}: land them first, or use a copy that was made "
                "before"
            )

    @contextmanager
    def _entered(self, phase: Phase, *, after: type[Phase]) -> Iterator[None]:
        self._check(phase, after=after)
        before, self.now = self.now, phase
        try:
            yield
        finally:
            # A reset inside has gone back to `Compressing` already, and nothing is left to leave.
            if self.now is phase:
                self.now = before

    def _check(self, phase: Phase, *, after: type[Phase]) -> None:
        if not isinstance(self.now, after):
            raise CacheMisuse(
                f"asked for a phase in which this cache {phase.meaning}, and this cache {self.now.meaning}: end that "
                "first, or call cache.reset()"
            )
