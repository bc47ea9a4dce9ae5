"""An example as the token ids that a model gets, by the official rules of its benchmark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvtailor.bench.data.longsets.sets import Example, LongSet
from kvtailor.bench.data.longsets.zeroscrolls import SUMMARIES
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError

__all__ = ["chat_overhead", "longbench_ids", "uses_chat", "zeroscrolls_ids"]

_PLAINLY = "Do not provide any explanation."


def uses_chat(subject: Subject, chosen: LongSet) -> bool:
    """Whether prompts of this set go through the tokenizer's chat template."""
    return chosen.chat and bool(getattr(subject.tokenizer, "chat_template", None))


def chat_overhead(subject: Subject) -> int:
    """Tokens that the chat template puts around a prompt."""
    return int(_in_chat(subject, "").numel())


def longbench_ids(subject: Subject, chosen: LongSet, example: Example, max_tokens: int | None) -> Tensor:
    """(n,) int64 ids of a LongBench prompt, of which the middle is cut where it has more than `max_tokens` tokens.

    The ends are made text and then tokens again, as officially, so that the result may be a few tokens off; the chat
    template comes around what is left.
    """
    text = chosen.prompt.format(**example.fields)
    ids = subject.prompt(text)
    if max_tokens is not None and ids.numel() > max_tokens:
        half = max_tokens // 2
        text = subject.text(ids[:half].tolist()) + subject.text(ids[-half:].tolist())
    return _in_chat(subject, text) if uses_chat(subject, chosen) else subject.prompt(text)


def zeroscrolls_ids(subject: Subject, chosen: LongSet, example: Example, max_tokens: int | None) -> Tensor:
    """(n,) int64 ids of a ZeroSCROLLS prompt, of whose document the end is cut where all is more than `max_tokens`.

    Raises:
        KvtailorError: the query alone is longer than that.
    """
    text, query_at = str(example.fields["input"]), int(example.fields["query_start_index"])
    chat = uses_chat(subject, chosen)
    if chat:
        text, query_at = _for_chat(chosen, text, query_at, int(example.fields["query_end_index"]))
    whole = subject.prompt(text)
    if max_tokens is None or whole.numel() <= max_tokens:
        return _in_chat(subject, text) if chat else whole
    ending = str(example.fields["truncation_seperator"]) + text[query_at:]
    ending_ids = subject.prompt(ending)[subject.start().numel() :]
    left = max_tokens - ending_ids.numel()
    if left < 1:
        raise KvtailorError(
            f"asked for at most {max_tokens} tokens, but the query of example {example.name} of {chosen.name} alone "
            f"has {ending_ids.numel()}: allow more"
        )
    document = subject.prompt(text[:query_at])[:left]
    return _in_chat(subject, subject.text(document.tolist()) + ending) if chat else torch.cat([document, ending_ids])


def _for_chat(chosen: LongSet, text: str, query_at: int, query_end: int) -> tuple[str, int]:
    """The prompt up to the end of the query, with the request that chat models get after the instruction."""
    if chosen.name in SUMMARIES:
        return text[:query_end], query_at
    end = text.find("\n\n")
    return f"{text[:end].strip()} {_PLAINLY}{text[end:query_end]}", query_at + len(_PLAINLY) + 1


def _in_chat(subject: Subject, text: str) -> Tensor:
    apply: Callable[..., Any] = subject.tokenizer.apply_chat_template
    templated = apply([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    return subject.tokens(str(templated)).ids
