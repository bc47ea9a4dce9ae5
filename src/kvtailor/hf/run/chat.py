"""How a text becomes token ids: in the model's chat template where it has one, else as plain text."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.model.vocabulary import check_characters
from kvtailor.hf.versions import template_variables

__all__ = ["Prompt", "start_ids"]

_MARK = "kvtailor-question-goes-here"
# What every template is given here, and what transformers puts in reach of each.
_GIVEN = frozenset({"add_generation_prompt", "messages"})
_OF_TRANSFORMERS = frozenset({"dict", "namespace", "raise_exception", "range", "strftime_now"})


@dataclass(frozen=True)
class Prompt:
    """A message of the user, in the model's chat template or, where the tokenizer has none, as plain text.

    Attributes:
        tokenizer: of the model.
        separator: between context and question; None: an empty line in a chat, nothing in plain text.
        answer_prefix: how the answer begins.
        system: the system's message; None: there is none, and a template may write one of its own.
        template: variables of the chat template by name, such as `enable_thinking`.

    Raises:
        CacheMisuse: the tokenizer has no chat template to write the system's message or to take variables.
        UnknownName: the template reads no such variable.
    """

    tokenizer: Any
    separator: str | None = None
    answer_prefix: str = ""
    system: str | None = None
    template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.templated and (self.system is not None or self.template):
            asked = f"system={self.system!r:.60}" if self.system is not None else f"template={self.template!r:.60}"
            raise CacheMisuse(
                f"asked for {asked}, which a chat template writes, and this tokenizer has none (no chat_template): "
                "leave it out, write it into the text, or give the tokenizer of a chat model"
            )
        if self.system is not None and not self.system.strip():
            raise CacheMisuse("the system's message is empty: leave system= out, or give it a text")
        if self.templated and (self.template or not isinstance(self.tokenizer.chat_template, str)):
            self._check_variables()

    @property
    def templated(self) -> bool:
        """The tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def whole(self, text: str) -> Tensor:
        """Ids (n,) of a prompt that is one message of the user, up to where the answer begins.

        Raises:
            CacheMisuse: the template refuses the message, or leaves it out.
        """
        if not self.templated:
            return self._ids(text + self.answer_prefix, begins=True)
        if len(self._around(text)) < 2:
            raise CacheMisuse(
                "the chat template leaves the user's message out, and the model would not see it: make the token ids "
                "yourself and give them to kvtailor.prefill"
            )
        return self._ids(self._rendered(text) + self.answer_prefix)

    def split(self, context: str) -> tuple[Tensor, str]:
        """Ids (n,) of a prompt up to the end of the context, and the text that comes after the question.

        Raises:
            CacheMisuse: the template refuses the message, or does not write it once.
        """
        if not self.templated:
            return self._ids(context, begins=True), self.answer_prefix
        parts = self._around(context)
        if len(parts) != 2:
            raise CacheMisuse(
                f"the chat template writes the user's message {len(parts) - 1} times, so a question cannot follow a "
                "context in it: make the token ids yourself and give them to kvtailor.prefill"
            )
        return self._ids(parts[0]), parts[1] + self.answer_prefix

    def question(self, question: str, after: str) -> Tensor:
        """Ids (t,) of a question and what comes after it, to follow those of a context."""
        return self._ids(self._between + question + after)

    def question_first(self, question: str, context: str) -> Tensor:
        """Ids (n,) of a prompt in which the question stands before the context."""
        return self.whole(question + self._between + context)

    @property
    def _between(self) -> str:
        return ("\n\n" if self.templated else "") if self.separator is None else self.separator

    def _check_variables(self) -> None:
        try:
            text = self.tokenizer.get_chat_template(tools=self.template.get("tools"))
        except ValueError as error:
            raise CacheMisuse(
                f"this tokenizer has several chat templates and none is named 'default' ({error}): set "
                "tokenizer.chat_template to one of them"
            ) from error
        known = template_variables(text)
        for name in self.template:
            if name in _GIVEN:
                raise CacheMisuse(f"kvtailor itself gives {name} to the chat template: leave it out of template=")
            if known is not None and name not in known:
                raise UnknownName("variable of this tokenizer's chat template", name, known - _GIVEN - _OF_TRANSFORMERS)

    def _around(self, message: str) -> list[str]:
        """What the template writes before, between and after the places where it writes the user's message."""
        mark = _MARK
        while mark in message or mark in (self.system or ""):
            mark += "-"
        if self.system is not None and mark not in self._applied(message, self.system + mark, parts=self._in_parts):
            raise CacheMisuse(
                "the chat template leaves the system's message out, and the model would not see it: put it into the "
                "user's text in place of system="
            )
        return self._rendered(message + mark).split(mark)

    @cached_property
    def _in_parts(self) -> bool:
        """The template writes content that is a list of parts, as those of models with images do, and no bare text."""
        for parts in (False, True):
            with suppress(CacheMisuse):
                if _MARK in self._applied(_MARK, self.system, parts=parts):
                    return parts
        return False

    def _rendered(self, message: str) -> str:
        return self._applied(message, self.system, parts=self._in_parts)

    def _applied(self, message: str, system: str | None, *, parts: bool) -> str:
        try:
            return self._written(message, system, parts=parts)
        # A template is a program of the model's maker, and fails as any program does.
        except Exception as error:
            asked = "a message of the user" + (" and one of the system" if system is not None else "")
            raise CacheMisuse(
                f"this tokenizer's chat template refuses {asked} ({error}): {self._instead(system, parts=parts)}"
            ) from error

    def _instead(self, system: str | None, *, parts: bool) -> str:
        """What to do where the template refuses messages: found by asking it with, or without, one of the system."""
        try:
            self._written("text", "text" if system is None else None, parts=parts)
        except Exception:
            return "make the token ids yourself and give them to kvtailor.prefill"
        return (
            "it takes them with a message of the system, so give system=... (--system TEXT)"
            if system is None
            else "it takes the user's alone, so leave system= (--system) out and write that into the user's text"
        )

    def _written(self, message: str, system: str | None, *, parts: bool) -> str:
        told = [("user", message)] if system is None else [("system", system), ("user", message)]
        chat = [{"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in told]
        how = {"add_generation_prompt": True, "tokenize": False, **self.template}
        return str(self.tokenizer.apply_chat_template(chat, **how))

    def _ids(self, text: str, *, begins: bool = False) -> Tensor:
        check_characters(text)
        # A template writes the special tokens itself.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([*(start_ids(self.tokenizer) if begins else []), *ids], dtype=torch.int64)


def start_ids(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text; often none or one."""
    end, begin = getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("")["input_ids"])
    # Some tokenizers close a text with the end token: that is no beginning, unless it doubles as one.
    return ids[:-1] if ids and ids[-1] == end and end != begin else ids
