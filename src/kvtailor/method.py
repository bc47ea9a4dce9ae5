"""What all methods have in common, whatever their stage."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

__all__ = ["Method", "Serves"]

_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Serves:
    """Which models a method is right for, beside plain ones that one process has whole.

    In a class's own declaration None is a field of which it says nothing: then `Method.derived` holds.

    Attributes:
        split_heads: those of which a process holds some of a layer's kv heads and others hold the rest: a head's result
            depends on that head alone, or the method meets the other heads through the `HeadShare` that it gets.
        latents: those whose layers hold latents: True, or a clause that says why not. Such a layer is one kv head with
            the queries of all heads, whose keys are [latent ; rotated key] and whose values are the latents
            (`types.latent_attention`). A codec gets latents as keys and rotated keys as values, and what attention
            reads must be what it decodes. An attention may get the heads that latents expand to instead, so that it
            carries nothing from call to call. A merger must change latents alike in keys and in values.
        softcap: those that cap their attention logits: what the method computes of queries and keys goes through the
            `Softmax` that it gets, or does not depend on the cap.
        sinks: those with learned sinks, whose shares belong to no token; likewise.
    """

    split_heads: bool | None = None
    latents: Literal[True] | str | None = None
    softcap: bool | None = None
    sinks: bool | None = None

    def over(self, other: Serves) -> Serves:
        """Return what this one says, and of the fields of which it says nothing what the other one does."""
        pairs = {each.name: (getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        return Serves(**{name: own if own is not None else theirs for name, (own, theirs) in pairs.items()})


class Method:
    """What a plan can name: a frozen, keyword-only dataclass of its own arguments. Every stage's contract is one.

    A field that is annotated with a contract takes a method of that contract's stage. With `of: Allocator` a plan may
    have `inverse(of=pyramid(beta=10))`; faults of the inner method's arguments are worded as outside.

    Attributes:
        examples: some of these as a plan writes them, where the name alone is not enough. A stage's promises are tested
            with each of them. Empty: the name alone is a method.
        serves: where it differs from `derived`. What a class inherits does not count: it was declared of another one.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    serves: ClassVar[Serves] = Serves()

    @property
    def sees_attention(self) -> bool:
        """Whether queries, or what they attend to, are among what it computes with."""
        needs = getattr(self, "needs", None)
        return needs is not None and needs.of_attention

    @property
    def derived(self) -> Serves:
        """What it serves unless its class declares otherwise.

        The methods that stand beside their stage's contract serve everything, for `tests/contract` holds each of them
        to it. Of any other class nothing is known but what follows from its needs: what sees no attention is right
        whatever the softmax.
        """
        kind = type(self)
        contracts = [base.__module__ for base in kind.__mro__ if base.__module__.endswith(".contract")]
        folders = [each.removesuffix("contract") for each in contracts if each.startswith(f"{_PACKAGE}.")]
        ours = kind.__module__.startswith(tuple(folders))
        any_softmax = ours or not self.sees_attention
        unsaid = "it does not declare that it is right on them"
        return Serves(split_heads=ours, latents=ours or unsaid, softcap=any_softmax, sinks=any_softmax)

    @property
    def capabilities(self) -> Serves:
        """What it serves, as its class declares and else as is `derived`: every check of a plan reads this value."""
        declared: Serves = vars(type(self)).get("serves", Serves())
        return declared.over(self.derived)

    @property
    def content_hash(self) -> str | None:
        """sha256 of what this method read from the files that its arguments name, for the plan's hash; None: no file.

        A method reads its files once, when it is made (see `ops.files`), so that a plan is the same for all its life.
        """
        return None

    def split_refusal(self, *, heads: int, ranks: int) -> str | None:
        """Why the method cannot be served where heads lie on several processes, as a sentence; None: it can.

        Args:
            heads: kv heads of each layer that each process holds.
            ranks: how many processes.
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
