"""What the forwards of a cache mean now: one value, and the only ways from one value to another.

    Compressing -- deferred() -----> Deferred -- reconstructing() --> Reconstructing
    Compressing -- record() -------> Recording
    Compressing -- speculating() --> Speculating
    Compressing -- replaying() ----> Replaying
    Compressing -- stop() ---------> Stopped

Each context manager returns to the phase before it. Any other change raises an error, and the phase does not change.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

from kvtailor.engine.reading import ReconstructionPass
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
    "Stopped",
]


@dataclass(frozen=True)
class Phase:
    """What new tokens are.

    Attributes:
        meaning: completes a sentence that begins with "this cache".
        can_be_taken_back: a crop may remove the newest tokens, so the plan acts on them only after it.
        all_decoded: all new tokens count as decoded, however many come at once.
    """

    meaning: ClassVar[str]
    all_decoded: ClassVar[bool] = False

    @property
    def can_be_taken_back(self) -> bool:
        """Whether the plan acts on new tokens only once it is known which of them stay."""
        return False

    @property
    def windows_record(self) -> bool:
        """Whether the model's own sliding windows keep what leaves them until a crop."""
        return False


@dataclass(frozen=True)
class Compressing(Phase):
    """New tokens are a prompt, a turn or decoded tokens, and the plan acts on them at once.

    Attributes:
        after_recording: a recording ended without a crop. The model's own windows go on recording, because a crop may
            still come.
    """

    after_recording: bool = False
    meaning: ClassVar[str] = "evicts and encodes what comes, as its plan says"

    @property
    def windows_record(self) -> bool:
        return self.after_recording


@dataclass(frozen=True)
class Deferred(Phase):
    """Tokens come in pieces, and nothing is evicted or encoded before the last of them."""

    meaning: ClassVar[str] = "is being prefilled, and compresses once the whole context has come"


@dataclass(frozen=True)
class Reconstructing(Phase):
    """Forwards repeat a piece of the context, to see what they attend to; what is held does not change.

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
        """Return whether tokens can be removed: not those of a prompt; `rollback.attend_draft` takes those after it."""
        return self.prompt is None

    @property
    def windows_record(self) -> bool:
        return True


@dataclass(frozen=True)
class Speculating(Phase):
    """Forwards collect decoded tokens until `settle`; until then the newest of them may be taken back."""

    meaning: ClassVar[str] = "speculates, and has not settled which tokens stay"
    all_decoded: ClassVar[bool] = True

    @property
    def can_be_taken_back(self) -> bool:
        return True

    @property
    def windows_record(self) -> bool:
        return True


@dataclass(frozen=True)
class Replaying(Phase):
    """Steps of one token are replayed on fixed addresses; the cache does not count their tokens yet."""

    meaning: ClassVar[str] = "is being read by replayed steps that have not landed"


@dataclass(frozen=True)
class Stopped(Phase):
    """New tokens are read and stay as they are, so that what follows the last forward of a cache is not computed."""

    meaning: ClassVar[str] = "compresses nothing any more"


class PhaseSwitch:
    """Holds the phase of one cache and changes it.

    Attributes:
        now: the phase.
    """

    def __init__(self) -> None:
        self.now: Phase = Compressing()

    def reset(self) -> None:
        """Return to `Compressing` from any phase."""
        self.now = Compressing()

    def deferred(self) -> AbstractContextManager[None]:
        """Defer eviction and encoding inside."""
        return _Inside(self, Deferred(), after=Compressing)

    def reconstructing(self, piece: ReconstructionPass) -> AbstractContextManager[None]:
        """Repeat a piece of the context inside; compression must be deferred."""
        return _Inside(self, Reconstructing(piece), after=Deferred)

    def speculating(self) -> AbstractContextManager[None]:
        """Allow forwards to be taken back inside."""
        return _Inside(self, Speculating(), after=Compressing)

    def replaying(self) -> AbstractContextManager[None]:
        """Replay steps inside; nothing else may use the cache."""
        return _Inside(self, Replaying(), after=Compressing)

    def record(self, prompt: int | None = None) -> None:
        """Let forwards wait for a crop from now on, until `end_recording`; transformers never says when that is.

        Args:
            prompt: see `Recording`.
        """
        if not isinstance(self.now, Recording):
            self.check(Recording(prompt), after=Compressing)
        self.now = Recording(prompt)

    def go_on_recording(self) -> None:
        """Start a recording unless there is one; a single layer can call this."""
        if not isinstance(self.now, Recording):
            self.record()

    def end_recording(self, *, windows_go_on: bool = False) -> None:
        """Return to `Compressing` from `Recording`; do nothing in another phase.

        Args:
            windows_go_on: see `Compressing.after_recording`.
        """
        if isinstance(self.now, Recording) or (self.now.windows_record and isinstance(self.now, Compressing)):
            self.now = Compressing(after_recording=windows_go_on)

    def stop(self) -> None:
        """Compress nothing from now on, until `reset`."""
        if not isinstance(self.now, Stopped):
            self.check(Stopped(), after=Compressing)
            self.now = Stopped()

    def check_free(self, what: str) -> None:
        """Raise if the cache does not count the tokens of replayed steps yet.

        Args:
            what: what the caller is about to do with the cache, for the message.
        """
        if isinstance(self.now, Replaying):
            raise CacheMisuse(
                f"asked for {what}, and this cache {self.now.meaning}: land them first, or use a copy that was made "
                "before"
            )

    def check(self, phase: Phase, *, after: type[Phase]) -> None:
        """Raise if a phase may not follow the present one.

        Args:
            phase: the next one.
            after: the only phase that it may follow.
        """
        if not isinstance(self.now, after):
            raise CacheMisuse(
                f"asked for a phase in which this cache {phase.meaning}, and this cache {self.now.meaning}: end that "
                "first, or call cache.reset()"
            )


class _Inside(AbstractContextManager[None]):
    """A phase that lasts as long as a `with` block.

    It is no generator, which would end when it is garbage-collected: a cache whose replayed steps were never counted
    would then continue without their tokens.
    """

    def __init__(self, switch: PhaseSwitch, phase: Phase, *, after: type[Phase]):
        self._switch, self._phase, self._after = switch, phase, after
        self._before = switch.now

    def __enter__(self) -> None:
        self._switch.check(self._phase, after=self._after)
        self._before, self._switch.now = self._switch.now, self._phase

    def __exit__(self, *_: object) -> None:
        # A reset inside has gone back to `Compressing` already, and nothing is left to leave.
        if self._switch.now is self._phase:
            # Windows did not record meanwhile, and so cannot go on with it.
            self._switch.now = Compressing() if isinstance(self._before, Compressing) else self._before
