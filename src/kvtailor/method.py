"""What all methods have in common, whatever their stage."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from kvtailor.errors import ArgumentError, MethodError

__all__ = ["Method", "renamed"]

_Kind = TypeVar("_Kind", bound=type)


class Method:
    """What a plan can name: a frozen, keyword-only dataclass of its own arguments. Every stage's contract is one.

    A field that is annotated with a contract takes a method of that contract's stage. With `of: Allocator` a plan may
    have `inverse(of=pyramid(beta=10))`; faults of the inner method's arguments are worded as outside.

    Attributes:
        examples: some of these as a plan writes them, where the name alone is not enough. A stage's promises are tested
            with each of them. Empty: the name alone is a method.
        added: arguments that the method got after results had been named by hashes without them. At their defaults they
            are no part of a plan's hash, so that a plan of before keeps its own.
        old_names: arguments that had another name before, by that name; see `renamed`.
        old_members: present name of each member that a contract has renamed, by its old one.
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
    added: ClassVar[tuple[str, ...]] = ()
    old_names: ClassVar[Mapping[str, str]] = {}
    old_members: ClassVar[Mapping[str, str]] = {}
    splits_heads: ClassVar[bool] = False
    latent_refusal: ClassVar[str | None] = "it does not declare that it is right on them"
    knows_softcap: ClassVar[bool] = False
    knows_sinks: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse a class that goes on with a name of before: what it means by that would be passed over in silence.

        Raises:
            MethodError: the class declares an argument by its old name; or it, or one that it derives from, has a
                member or a field of a name that its contract has changed.
        """
        super().__init_subclass__(**options)
        if old := [name for name in cls.old_names if name in vars(cls).get("__annotations__", {})]:
            raise MethodError(
                f"{cls.__qualname__} declares {', '.join(old)}, which is now called "
                f"{', '.join(cls.old_names[name] for name in old)} (CHANGELOG.md): rename it"
            )
        for name, now in cls.old_members.items():
            if any(name in vars(each) or name in vars(each).get("__annotations__", {}) for each in cls.__mro__[:-1]):
                raise MethodError(f"{cls.__qualname__} has {name}, which is now called {now} (CHANGELOG.md): rename it")

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


def renamed(**now: str) -> Callable[[_Kind], _Kind]:
    """Let a method's arguments be given, and read, by the names that they had before.

    It stands above `@dataclass`. Hashes go on naming these arguments as before, so that a plan keeps its own.

    Args:
        now: the present name of each argument, by its old one.
    """

    def of(kind: _Kind) -> _Kind:
        made = kind.__init__  # type: ignore[misc]

        @functools.wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for old in [name for name in given if name in now]:
                # `dataclasses.replace` gives every field, and beside them what is to change.
                replaced = sys._getframe(1).f_globals.get("__name__") == "dataclasses"
                if now[old] in given and not replaced:
                    raise ArgumentError(f"{old} is the old name of {now[old]}, and both were given: leave {old} out")
                given[now[old]] = given.pop(old)
            made(self, *args, **given)

        kind.__init__ = init  # type: ignore[misc]
        kind.old_names = dict(now)  # type: ignore[attr-defined]
        for old, name in now.items():
            setattr(kind, old, property(operator.attrgetter(name)))
        return kind

    return of
