"""What all methods have in common, whatever their stage."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["Method"]


class Method:
    """What a plan can name: a frozen, keyword-only dataclass of its own arguments. Every stage's contract is one.

    A field that is annotated with a contract takes a method of that contract's stage. With `of: Allocator` a plan may
    have `inverse(of=pyramid(beta=10))`; faults of the inner method's arguments are worded as outside.

    Attributes:
        examples: some of these as a plan writes them, where the name alone is not enough. A stage's promises are tested
            with each of them. Empty: the name alone is a method.
        splits_heads: it works where a process holds some of a layer's kv heads and others hold the rest: a head's
            result depends on that head alone, or the method meets the other heads through the `HeadShare` that it is
            given. What does not declare it is refused under tensor parallelism.
        latent_refusal: why it is refused on layers that hold latents, a clause; None: it is right there. Such a layer
            is one kv head with the queries of all heads, whose keys are [latent ; rotated key] and whose values are the
            latents (`types.latent_attention`). A codec gets latents as keys and rotated keys as values, and what
            attention reads must be what it decodes. An attention may get the heads that latents expand to instead, so
            that it carries nothing from call to call. A merger must change latents alike in keys and in values. What a
            class inherits does not count.
        knows_softcap: it is right for a model that caps its attention logits: what it computes of queries and keys goes
            through the `Softmax` that it is given, or does not depend on the cap. What sees queries or attention and
            does not declare it is refused for such a model.
        knows_sinks: the same for a model with learned sinks, whose shares belong to no token.
    """

    examples: ClassVar[tuple[str, ...]] = ()
    splits_heads: ClassVar[bool] = False
    latent_refusal: ClassVar[str | None] = "it does not declare that it is right on them"
    knows_softcap: ClassVar[bool] = False
    knows_sinks: ClassVar[bool] = False

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
