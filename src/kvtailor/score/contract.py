"""The stage `score`: evidence -> one number for each (row, kv head, held token). Tokens with higher ones are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from kvtailor.method import Method
from kvtailor.types import Held, Needs

__all__ = ["Scorer"]


class Scorer(Method, ABC):
    """One way to rank tokens by how much they matter. A subclass is a frozen, keyword-only dataclass of its
    hyper-parameters.

    Pure: inputs are never changed, nothing is remembered between calls, rows are never mixed, and permuting the kv
    heads (with their groups) permutes the result.

    A property of this class may be a class attribute of a method for which it is constant (`slack: ClassVar[int | None]
    = 32`). A method around another method returns the other one's.
    """

    @property
    def scope(self) -> str:
        """Return "layer" if a layer can be scored once it has read the prompt; "prompt" if all must have."""
        return "layer"

    @property
    def slack(self) -> int | None:
        """Return by how many tokens a decoding cache may exceed its budget before it is cut; None: it is never cut.

        A plan's own `slack` takes precedence.
        """
        return None

    @property
    def heads_alike(self) -> bool:
        """Whether permuting the kv heads permutes the result; False for a control that goes by a kv head's number."""
        return True

    @property
    def same_on_layers(self) -> bool:
        """Whether layers that hold the same columns give them the same scores, and so keep the same ones."""
        return False

    @property
    def needs(self) -> Needs:
        """Return the evidence to gather for this scorer."""
        return Needs()

    @property
    def recent(self) -> int:
        """Return how many of the newest tokens every head keeps, whatever their score (an observation window)."""
        return 0

    @property
    def first_kept(self) -> int | None:
        """Return how many of a row's first tokens outrank all others, if the others rank by age, the newest highest.

        None: scores depend on more than age.
        """
        return None

    def newest_kept(self, kept: int) -> int:
        """Return how many of the newest tokens are sure to be among the `kept` best of a head."""
        return min(self.recent, kept)

    def note(self, held: Held) -> Tensor:
        """Return numbers about each held token for the next eviction; called only if `needs.notes` is above 0.

        Called before `score`, which gets the result as `held.noted`, and the previous eviction's as `held.previous`.

        Returns:
            (b, h, needs.notes, n) float32, NaN for what is not known.
        """
        raise NotImplementedError(f"{type(self).__name__} declares notes, and makes none")

    @abstractmethod
    def score(self, held: Held) -> Tensor:
        """Return (b, h, n) float32 scores; finite wherever `held.valid`, anything elsewhere."""

    def attention_scale(self, held: Held, *, group: int) -> Tensor | None:
        """Return how many times one query's attention probabilities scores are; None: they are no such probabilities.

        A sum over w queries and g query heads has the scale w * g, a mean has 1. Published constants that stand beside
        an attention probability, as the epsilon of `critical`, are multiplied by it. Tokens that a scorer lifts above
        all others (such as sinks) are not counted.

        Args:
            held: what `score` was given.
            group: g, query heads of a kv head.

        Returns:
            (b,) float32 above 0, or None.
        """
        return None

    def flops(self, *, tokens: int, group: int, size: int) -> int | None:
        """Count what one call of `score` computes for one row and kv head; None: not known, which does not mean zero.

        One addition, multiplication, division or exponential of floating-point numbers counts as one, and so a
        multiply-add as two. Comparisons, conversions, copies and integer arithmetic count as none, and neither does
        work that does not grow with the tokens. It is the method that is counted, not what an implementation adds.

        Args:
            tokens: n, tokens held.
            group: g, query heads of a kv head.
            size: d, of a key.
        """
        return None
