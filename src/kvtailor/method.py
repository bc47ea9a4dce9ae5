"""What all methods have in common, whatever their stage."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Method"]


class Method:
    """What a plan can name: a frozen, keyword-only dataclass of its own arguments. Every stage's contract is one.

    A field that is annotated with a contract takes a method of that contract's stage. With `of: Allocator` a plan may
    say `inverse(of=pyramid(beta=10))`; what is said about the inner method's arguments is the same as outside.

    Attributes:
        examples: some of these as a plan writes them, where the name alone is not enough. A stage's promises are tested
            with each of them. Empty: the name alone is a method.
        added: arguments that the method got after results had been named by hashes without them. At their defaults they
            are no part of a plan's hash, so that a plan of before keeps its own.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    added: ClassVar[tuple[str, ...]] = ()

    @property
    def content_hash(self) -> str | None:
        """sha256 of what this method read from the files that its arguments name, for the plan's hash; None: no file.

        A method reads its files once, when it is made (see `ops.files`), so that a plan is the same for all its life.
        """
        return None

    def misfit(self, *, layers: int, heads: int, size: int) -> str | None:
        """Why a model cannot be served, as a sentence that begins with the method's name; None: it can.

        Args:
            layers: layers that the plan compresses.
            heads: h, kv heads of each.
            size: d, of a key.
        """
        return None
