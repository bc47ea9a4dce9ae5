"""A context, several questions, a plan: `kvtailor.read` and `kvtailor.ask`.

The context is read and compressed once; each question goes on from a copy, so that no answer depends on another one.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvtailor.errors import CacheFileError, CacheMisuse, UnknownName
from kvtailor.hf.cache import KvCache
from kvtailor.hf.load_saved import load_cache
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.devices import input_device
from kvtailor.hf.model.vocabulary import check_ids
from kvtailor.hf.run.arguments import in_one_answer, words_of
from kvtailor.hf.run.chat import Prompt
from kvtailor.hf.run.first_logits import with_first_checked
from kvtailor.hf.run.prefill import begin, prefill
from kvtailor.hf.saved_ranks import shards_of
from kvtailor.hf.saving import save
from kvtailor.hf.versions import CACHE_ARGUMENTS, hand_cache
from kvtailor.ledger import Ledger
from kvtailor.ops.notebook_html import html_block, html_table
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call
from kvtailor.store.cache_file import read_cache_file

__all__ = ["Answers", "Reading", "ask", "read"]

# In the header of a saved reading: the name of its text, and a question whose tokens tell tokenizers apart.
_READING = "reading"
_PROBE = "Who wrote it, and when? 0123 äöü"
_OURS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", *CACHE_ARGUMENTS)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What `ask` gives; one entry for each question, in order.

    Attributes:
        questions: as they were asked.
        texts: the answers, without special tokens.
        ids: (t,) int64 the answers' token ids on the CPU, special ones included.
        prompt_tokens: tokens of context and question together, with what the chat template puts around them.
        plan: canonical form of the plan.
        ledger: the compressed context before any question: bytes, tokens seen, tokens held. None where each question
            was compressed with the context.
        ledgers: each question's cache at the end of its answer.
    """

    questions: tuple[str, ...]
    texts: tuple[str, ...]
    ids: tuple[Tensor, ...]
    prompt_tokens: tuple[int, ...]
    plan: str
    ledger: Ledger | None
    ledgers: tuple[Ledger, ...]

    def __repr__(self) -> str:
        pairs = ", ".join(f"{q!r}: {a!r}" for q, a in zip(self.questions, self.texts, strict=True))
        return f"Answers({self.plan!r}, {{{pairs}}})"

    def _repr_html_(self) -> str:
        """For notebooks: each question with its answer, and what the compressed context takes."""
        rows = list(zip(self.questions, self.texts, strict=True))
        parts = [] if self.ledger is None else [self.ledger._repr_html_()]
        return html_block(self.plan, html_table(rows, ["question", "answer"]), *parts)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A context that was read and compressed once; what `read` gives.

    Attributes:
        model: the model.
        prompt: how questions are put.
        cache: holds what the plan left of the context; every question goes on from a copy of it.
        ids: (1, n) token ids of the context, with what the chat template puts before it.
        after: what comes after each question.
    """

    model: Any
    prompt: Prompt
    cache: KvCache
    ids: Tensor
    after: str

    @check_call
    def ask(self, questions: str | Sequence[str], *, max_new_tokens: int | None = None, **generation: Any) -> Answers:
        """Answers questions about the context, each as if it were the only one. See `kvtailor.ask`."""
        asked = _questions(questions)
        how = _generation(self.model, self.prompt.tokenizer, max_new_tokens, generation)
        given = [
            torch.cat([self.ids, self.prompt.question(each, self.after)[None].to(self.ids.device)], 1) for each in asked
        ]
        return _answered(self, asked, given, how, self.cache.ledger())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compressed context, and how questions are put to it, to one file; see `load` and `KvCache.save`.

        The file is a saved cache as well, which `kvtailor.load_cache` reads.

        Raises:
            CacheFileError: the file cannot be written; one that was there is as it was.
        """
        self.cache.guard.check_settled()
        about = {
            "separator": self.prompt.separator,
            "answer_prefix": self.prompt.answer_prefix,
            "after": self.after,
            "ids": self.ids[0].tolist(),
            "question": self.prompt.question(_PROBE, self.after).tolist(),
        }
        save(path, self.cache.layers, self.cache.guard, self.cache.conversation, {_READING: json.dumps(about)})

    @classmethod
    def load(cls, model: Any, tokenizer: Any, path: str | os.PathLike[str]) -> Reading:
        """Read a context that was saved, in this or another process, so that questions go on.

        Args:
            model: that the context was read by.
            tokenizer: of the model.
            path: that `save` wrote.

        Raises:
            CacheFileError: the file is damaged or no saved reading, the model is another one, or the tokenizer writes
                a question otherwise.
        """
        cache = load_cache(model, path)
        text = read_cache_file(shards_of(Path(path))[0].path).about.get(_READING)
        if text is None:
            raise CacheFileError(
                f"{os.fspath(path)!r} is a saved cache without the prompt that questions follow: give a file that "
                "Reading.save wrote, or read it with kvtailor.load_cache"
            )
        about = json.loads(text)
        prompt = Prompt(tokenizer, about["separator"], about["answer_prefix"])
        if prompt.question(_PROBE, about["after"]).tolist() != about["question"]:
            raise CacheFileError(
                f"{os.fspath(path)!r} was saved with another tokenizer than this one, which writes a question in other "
                "tokens: give the tokenizer of the model that read the context"
            )
        ids = torch.tensor([about["ids"]], dtype=torch.int64, device=input_device(model))
        return cls(model=model, prompt=prompt, cache=cache, ids=ids, after=about["after"])

    def __repr__(self) -> str:
        return f"Reading({str(self.cache.plan)!r}, {self.ids.shape[1]} tokens, {self.cache.ledger()!r})"


@check_call
def read(
    model: Any,
    tokenizer: Any,
    context: str,
    *,
    plan: str | Plan,
    separator: str | None = None,
    answer_prefix: str = "",
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
    chunk: int | None = None,
    hold: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> Reading:
    """Read a context and compress it, for questions that come later.

    ```python
    reading = kvtailor.read(model, tokenizer, document, plan="snapkv @ tokens=1024")
    answers = reading.ask(["Who wrote it?", "When?"], max_new_tokens=64)
    ```

    Where the tokenizer has a chat template, context and question are one message of the user. The prompt is cut where
    the context ends: what stands before is read and compressed now, the question and the rest of the template come with
    `ask`. Without a template the question follows the context as plain text.

    Args:
        model: a transformers decoder-only model.
        tokenizer: of the model.
        context: what the questions are about.
        plan: one line or a `Plan`.
        separator: between context and question. None: an empty line in a chat template, nothing in plain text.
        answer_prefix: how each answer begins; it is a part of the prompt.
        system: the system's message in the chat template; None: what the template itself writes there, if anything.
        template: variables of the chat template by name, such as `{"enable_thinking": False}`.
        chunk, hold, cache_dtype: see `kvtailor.prefill`.

    Raises:
        CacheMisuse: the context is empty, or the chat template refuses the messages, leaves one out or does not write
            the context once, or there is no template for `system` and `template`; nothing has been read then.
        UnknownName: the chat template reads no such variable.
        PlanError: the plan has faults, or does not suit the model.
        UnsupportedModel: for a model that cannot be compressed.
    """
    prompt = _prompt(tokenizer, context, separator, answer_prefix, system, template)
    ids, after = prompt.split(context)
    ids = ids[None].to(input_device(model))
    cache = cache_for(model, plan, cache_dtype=cache_dtype)
    prefill(model, ids, cache=cache, chunk=chunk, hold=hold, tokenizer=tokenizer)
    return Reading(model=model, prompt=prompt, cache=cache, ids=ids, after=after)


@check_call
def ask(
    model: Any,
    tokenizer: Any,
    context: str,
    questions: str | Sequence[str],
    *,
    plan: str | Plan,
    question: Literal["after", "inside", "before"] = "after",
    max_new_tokens: int | None = None,
    separator: str | None = None,
    answer_prefix: str = "",
    system: str | None = None,
    template: Mapping[str, Any] | None = None,
    chunk: int | None = None,
    cache_dtype: torch.dtype | None = None,
    **generation: Any,
) -> Answers:
    """Answers questions about a context from a compressed cache.

    ```python
    answers = kvtailor.ask(model, tokenizer, document, ["Who wrote it?", "When?"], plan="snapkv @ tokens=1024")
    print(answers.texts, answers.ledger.ratio)
    ```

    Args:
        model: a transformers decoder-only model.
        tokenizer: of the model; its chat template is used where it has one, see `kvtailor.read`.
        context: what the questions are about.
        questions: one or several.
        plan: one line or a `Plan`.
        question: "after": the context is read once, compressed without any question, and each question follows on a
            copy. "inside": the same token ids, but the question is a part of what is compressed, so that the context is
            read anew for each. "before": so, too, and the question stands before the context.
        max_new_tokens: tokens of an answer, at most. None: as `generation_config=` or the model's own says, else 256.
        separator, answer_prefix, system, template: see `kvtailor.read`.
        chunk: read so many tokens of the context at a time.
        cache_dtype: in which the cache holds keys and values, see `kvtailor.cache_for`.
        **generation: further arguments of `model.generate`, such as `do_sample=False`. What is not given is as in the
            model's generation config.

    Raises:
        CacheMisuse: a question or the context is empty, an argument of generate cannot be used here, or the chat
            template cannot write what was asked, see `kvtailor.read`; nothing has been read then.
        UnknownName: generate has no such argument, or the chat template no such variable.
        PlanError: the plan has faults, or does not suit the model.
        UnsupportedModel: for a model that cannot be compressed.
    """
    if question not in ("after", "inside", "before"):
        raise UnknownName("place of the question", str(question), ("after", "inside", "before"))
    asked = _questions(questions)
    how = _generation(model, tokenizer, max_new_tokens, generation)
    if question == "after":
        how_put: dict[str, Any] = {"separator": separator, "answer_prefix": answer_prefix}
        how_put |= {"system": system, "template": template, "chunk": chunk, "cache_dtype": cache_dtype}
        reading = read(model, tokenizer, context, plan=plan, **how_put)
        return reading.ask(asked, max_new_tokens=max_new_tokens, **generation)
    prompt = _prompt(tokenizer, context, separator, answer_prefix, system, template)
    head, after = prompt.split(context)
    cache = cache_for(model, plan, cache_dtype=cache_dtype)
    reading = Reading(model=model, prompt=prompt, cache=cache, ids=head[None], after=after)
    if question == "inside":
        given = [torch.cat([head, prompt.question(each, after)]) for each in asked]
    else:
        given = [prompt.question_first(each, context) for each in asked]
    device = input_device(model)
    return _answered(reading, asked, [each[None].to(device) for each in given], how, None, chunk)


def _answered(
    reading: Reading,
    questions: tuple[str, ...],
    given: Sequence[Tensor],
    how: Mapping[str, Any],
    ledger: Ledger | None,
    chunk: int | None = None,
) -> Answers:
    """The answers to prompts (1, n), each on a copy of the reading's cache."""
    model, tokenizer = reading.model, reading.prompt.tokenizer
    found, ledgers = [], []
    for ids in given:
        check_ids(model, ids)
    for ids in given:
        mine, more = copy.deepcopy(reading.cache), dict(how)
        if not mine.seen:
            begin(model, mine, ids, tokenizer=tokenizer, chunk=chunk)
            more |= {"prefill_chunk_size": chunk} if chunk is not None and not mine.seen else {}
        if mine.seen and more["generation_config"].num_beams > 1:
            mine.batch_repeat_interleave(more["generation_config"].num_beams)
        mask = torch.ones_like(ids)
        more["logits_processor"] = with_first_checked(model, more.get("logits_processor"), new=not reading.cache.seen)
        output = model.generate(ids, attention_mask=mask, **hand_cache(mine), **more)
        found.append(getattr(output, "sequences", output)[0, ids.shape[1] :].cpu())
        ledgers.append(mine.ledger())
    return Answers(
        questions=questions,
        texts=tuple(str(tokenizer.decode(each, skip_special_tokens=True)) for each in found),
        ids=tuple(found),
        prompt_tokens=tuple(ids.shape[1] for ids in given),
        plan=str(reading.cache.plan),
        ledger=ledger,
        ledgers=tuple(ledgers),
    )


def _prompt(
    tokenizer: Any,
    context: str,
    separator: str | None,
    answer_prefix: str,
    system: str | None,
    template: Mapping[str, Any] | None,
) -> Prompt:
    if not callable(tokenizer):
        raise CacheMisuse(f"reading a text takes the model's tokenizer, and got {type(tokenizer).__name__}")
    if not isinstance(context, str) or not context.strip():
        raise CacheMisuse(f"the context must be a text that is not empty, and is {context!r:.60}")
    return Prompt(tokenizer, separator, answer_prefix, system, dict(template or {}))


def _questions(questions: str | Sequence[str]) -> tuple[str, ...]:
    asked = (questions,) if isinstance(questions, str) else tuple(questions)
    if not asked:
        raise CacheMisuse("there is no question: give a text or several")
    for index, each in enumerate(asked):
        if not isinstance(each, str) or not each.strip():
            raise CacheMisuse(f"question {index} must be a text that is not empty, and is {each!r:.60}")
    return asked


def _generation(model: Any, tokenizer: Any, max_new_tokens: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `model.generate`, all that belongs to the generation config in one.

    Raises:
        CacheMisuse: one of them cannot go with a context that was read before.
        UnknownName: generate has no such argument.
    """
    if max_new_tokens is not None and max_new_tokens < 1:
        raise CacheMisuse(f"asked for max_new_tokens={max_new_tokens}: an answer has at least 1 token")
    for name in _OURS:
        if name in given:
            raise CacheMisuse(f"{name} is made from context and question: leave it out, or use model.generate itself")
    words = words_of(model, given, tokenizer=tokenizer)
    # What the model's own config says, transformers takes where the others leave it open; an argument goes before all.
    away = in_one_answer(model, given)
    away |= {name: words[name] for name in ("use_cache", "cache_implementation") if name in words}
    rest = {name: value for name, value in words.items() if name != "generation_config"}
    config = copy.deepcopy(words.get("generation_config") or model.generation_config)
    if max_new_tokens is None and given.get("max_length") is None:
        max_new_tokens = config.max_new_tokens or model.generation_config.max_new_tokens or 256
    more = config.update(**rest | away, **{} if max_new_tokens is None else {"max_new_tokens": max_new_tokens})
    config.num_beams = config.num_beams or 1
    return {**more, **away, "generation_config": config}
