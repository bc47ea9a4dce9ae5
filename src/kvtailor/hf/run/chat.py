"""How a context and a question become token ids: in the model's chat template where it has one, else as plain text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse

__all__ = ["Prompt", "start_ids"]

_MARK = "kvtailor-question-goes-here"


@dataclass(frozen=True)
class Prompt:
    """A message of the user, in the model's chat template or, where the tokenizer has none, as plain text.

    Attributes:
        tokenizer: of the model.
        separator: between context and question; None: an empty line in a chat, nothing in plain text.
        answer_prefix: how the answer begins.
    """

    tokenizer: Any
    separator: str | None = None
    answer_prefix: str = ""

    @property
    def templated(self) -> bool:
        """The tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def split(self, context: str) -> tuple[Tensor, str]:
        """Ids (n,) of a prompt up to the end of the context, and the text that comes after the question."""
        if not self.templated:
            return self._ids(context, begins=True), self.answer_prefix
        mark = _MARK
        while mark in context:
            mark += "-"
        parts = self._rendered(context + mark).split(mark)
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
        message = question + self._between + context
        if self.templated:
            return self._ids(self._rendered(message) + self.answer_prefix)
        return self._ids(message + self.answer_prefix, begins=True)

    @property
    def _between(self) -> str:
        return ("\n\n" if self.templated else "") if self.separator is None else self.separator

    def _rendered(self, message: str) -> str:
        chat = [{"role": "user", "content": message}]
        return str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))

    def _ids(self, text: str, *, begins: bool = False) -> Tensor:
        # A template writes the special tokens itself.
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor([*(start_ids(self.tokenizer) if begins else []), *ids], dtype=torch.int64)


def start_ids(tokenizer: Any) -> list[int]:
    """The special tokens that a tokenizer puts before a text; often none or one."""
    end, begin = getattr(tokenizer, "eos_token_id", None), getattr(tokenizer, "bos_token_id", None)
    ids = list(tokenizer("")["input_ids"])
    # Some tokenizers close a text with the end token: that is no beginning, unless it doubles as one.
    return ids[:-1] if ids and ids[-1] == end and end != begin else ids
