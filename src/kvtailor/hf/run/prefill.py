"""A context goes through the model and leaves a compressed cache: at once, in chunks, or read twice.

What a question-agnostic cache is made with: the document is prefilled once, and each question goes on from a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvtailor.engine import rollback
from kvtailor.engine.phase import Compressing, Deferred
from kvtailor.engine.reading import ReconstructionPass
from kvtailor.errors import ArgumentError, CacheMisuse
from kvtailor.hf.cache import KvCache
from kvtailor.hf.handed import check_seen
from kvtailor.hf.images import check_inputs, check_text
from kvtailor.hf.layers.of_cache import remember_all_states
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.mask import lazy_mask
from kvtailor.hf.model.devices import input_device
from kvtailor.hf.model.hidden_lengths import hidden_lengths
from kvtailor.hf.model.rope_border import check_border
from kvtailor.hf.model.vocabulary import check_ids
from kvtailor.hf.run.feeding import fed, placed
from kvtailor.hf.run.gradients import check_gradients, log_gradients
from kvtailor.hf.run.kept_prompt import KeptPrompt, fill
from kvtailor.hf.versions import CACHE_ARGUMENT
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call
from kvtailor.types import Repetition
from kvtailor.types.late_checks import send

__all__ = ["INSTRUCTION", "begin", "check_mask", "instruction_of", "prefill", "read", "repetitions"]

INSTRUCTION = "\n\nNow repeat all of the text above, word for word:\n"
"""The instruction before the model repeats a piece of its context, where there is a tokenizer."""


@check_call
def prefill(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    plan: str | Plan | None = None,
    cache: KvCache | None = None,
    chunk: int | None = None,
    hold: bool = False,
    tokenizer: Any = None,
    instruction: Sequence[int] | Tensor | None = None,
    cache_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> KvCache:
    """A cache that has seen a context and holds what the plan leaves of it.

    ```python
    cache = kvtailor.prefill(model, document_ids, plan="snapkv @ tokens=1024", chunk=512)
    answer = model.generate(torch.cat([document_ids, question_ids], 1), cache=copy.deepcopy(cache))
    ```

    Args:
        model: a transformers decoder-only model.
        input_ids: (b, n) the tokens that the cache has not seen.
        attention_mask: (b, columns) of all that the cache has seen and these tokens, 0 for padding; None: no padding.
        plan: of a new cache: one line or a `Plan`.
        cache: instead of a plan; a used one goes on with what follows.
        chunk: feed so many tokens at a time, and compress after each, so that the cache never holds more than its
            budget and a chunk. None: at once. With 1 each token counts as decoded, so that a plan
            which cuts prompts alone holds all of them.
        hold: compress only when the whole context was seen; chunks then bound the activations alone.
        tokenizer: makes the instruction (`INSTRUCTION`) for plans that read the context twice.
        instruction: token ids of another instruction. With neither, those plans repeat the context without one.
        cache_dtype: in which a new cache holds keys and values, see `kvtailor.cache_for`.
        **inputs: what else the model's processor gives for images among these tokens, such as `pixel_values`,
            `image_grid_thw` and token types. They are fed at once, with the tokens.

    Raises:
        CacheMisuse: what was given does not fit together, or begins with all that a used cache has seen; nothing has
            been fed then.
        UnknownName: the model takes no input of such a name.
    """
    if (plan is None) == (cache is None):
        raise ArgumentError(
            f"kvtailor.prefill takes a plan= for a new cache or the cache= to go on with, and got "
            f"{'neither' if plan is None else 'both'}"
        )
    if cache is None:
        assert plan is not None
        cache = cache_for(model, plan, cache_dtype=cache_dtype)
    elif cache_dtype is not None:
        raise ArgumentError("kvtailor.prefill takes cache_dtype= for a new cache, and got a cache=, which has its own")
    words = instruction_of(tokenizer) if instruction is None else torch.as_tensor(instruction, dtype=torch.int64)
    with torch.no_grad():
        read(model, cache, input_ids, attention_mask, chunk=chunk, hold=hold, instruction=words, inputs=inputs)
    return cache


def instruction_of(tokenizer: Any) -> Tensor:
    """(i,) int64 token ids of `INSTRUCTION`; none without a tokenizer."""
    ids = [] if tokenizer is None else tokenizer(INSTRUCTION, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def begin(
    model: Any,
    cache: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    chunk: int | None = None,
) -> None:
    """Before `generate()`: prefills all but the last token of a prompt (b, n), where the plan reads it twice.

    The last token is left for `generate()` to feed. For every other plan, and a cache that has seen something, nothing
    happens.
    """
    if not isinstance(cache, KvCache) or not cache.engine.needs.reconstruction or cache.seen:
        return
    if input_ids.shape[1] < 2:
        cache.engine.take_short_context()
        return
    mask = None if attention_mask is None else attention_mask[:, :-1]
    prefill(model, input_ids[:, :-1], mask, cache=cache, tokenizer=tokenizer, chunk=chunk)


def read(
    model: Any,
    cache: KvCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    chunk: int | None = None,
    hold: bool = False,
    instruction: Tensor | None = None,
    last_only: bool = True,
    inputs: Mapping[str, Any] | None = None,
    kept: KeptPrompt | None = None,
) -> Tensor:
    """Logits (b, n, V) of the context, or (b, 1, V) with `last_only`; see `prefill`.

    With `kept` the context has gone through the model before, in one piece, and the new cache takes it in; so it does
    with what passes that repeat the context have found for another plan.
    """
    before, device = cache.seen, input_device(model)
    _check(model, cache, input_ids, attention_mask, chunk, instruction)
    inputs = {name: value for name, value in (inputs or {}).items() if value is not None}
    _check_images(model, cache, input_ids, chunk, inputs)
    # The conversation takes note of them here anyway, and a device is waited for once.
    here = input_ids.cpu()
    if not inputs:
        # Tokens that stand for images may have no row.
        check_ids(model, here)
    ids = input_ids.to(device)
    mask = None if attention_mask is None or _hides_nothing(attention_mask, cache) else attention_mask.to(device)
    engine, twice = cache.engine, cache.engine.needs.reconstruction
    passes: list[tuple[ReconstructionPass, Tensor]] = []
    words = torch.zeros(0, dtype=torch.int64) if instruction is None else instruction
    if twice is not None and cache.geometry.compressed:
        passes = list(repetitions(ids, mask, words.to(device), twice, cache.geometry.max_positions))
    hold = hold or twice is not None
    if hold:
        # A recording that was left on has ended, which transformers never says; nothing else goes with a deferral.
        rollback.end_recording(engine)
        engine.switch.check(Deferred(), after=Compressing)
    try:
        logits = []
        with engine.switch.deferred() if hold else nullcontext():
            if kept is not None:
                fill(cache, kept)
                logits.append(kept.logits.clone())
            for first, last in () if kept is not None else _pieces(ids.shape[1], chunk):
                seen = None if mask is None else mask[:, : before + last]
                logits.append(fed(model, cache, ids[:, first:last], seen, keep=int(last_only), inputs=inputs))
                if last_only:
                    logits = logits[-1:]
            known = kept is not None and bool(passes) and kept.take_repetition(cache, words)
            for piece, new in () if known else passes:
                restore = remember_all_states(cache.layers)
                seen = _joined(mask, piece.real, before + ids.shape[1])
                with (
                    _weights(model, cache, piece, new, seen) as log_weights,
                    engine.switch.reconstructing(replace(piece, log_weights=log_weights)),
                ):
                    # A model whose last layers read the keys of others feeds them the tokens with logits alone.
                    keep = 0 if cache.geometry.readers else 1
                    fed(model, cache, new, seen, keep=keep)
                restore()
            if kept is not None and passes and not known:
                kept.keep_repetition(cache, words)
        if hold:
            rows, tokens = ids.shape
            engine.release(lazy_mask(rows, tokens, before + tokens, before, attention_mask=mask, device=device))
    except BaseException:
        # A cache that was fed a part of the context, or was not compressed, must not be taken for one that was.
        if cache.seen != before or hold:
            if before:
                cache.guard.break_off("what kvtailor.prefill added to this cache did not come to its end")
            else:
                cache.reset()
        raise
    check_seen(cache.seen, before + ids.shape[1], model)
    cache.take_ids(here, attention_mask, at=before)
    return torch.cat(logits, 1)


def repetitions(
    ids: Tensor, mask: Tensor | None, instruction: Tensor, how: Repetition, positions: int | None
) -> Iterator[tuple[ReconstructionPass, Tensor]]:
    """The passes that repeat a context, and the tokens (b, t) of each, padded on their right.

    Of each row a pass repeats one piece: the instruction, the last tokens before the piece, the piece. Rows have equal
    pieces of their own tokens, as many as they need.

    Args:
        ids: (b, n) the context.
        mask: (b, n) 0 for padding; None: no padding.
        instruction: (i,) token ids.
        how: sizes.
        positions: that the model has; None: not known.

    Raises:
        CacheMisuse: the model has no position left after the context.
    """
    # On the CPU, since sizes follow from them.
    columns = [torch.arange(ids.shape[1])] * len(ids)
    if mask is not None:
        columns = [row.nonzero().flatten() for row in mask.cpu()]
    sizes = []
    for row in columns:
        count, most = row.numel(), how.chunk
        if positions is not None:
            most = min(most, positions - count - instruction.numel() - how.lead)
        if most < 1:
            raise CacheMisuse(
                f"a context of {count} tokens is to be repeated after itself, and with {instruction.numel()} tokens of "
                f"instruction the model's {positions} positions leave no room: shorten the context"
            )
        sizes.append(-(-count // max(1, -(-count // most))))
    for index in range(max(-(-row.numel() // max(1, size)) for row, size in zip(columns, sizes, strict=True))):
        first = [index * size for size in sizes]
        pieces = [row[at : at + size] for row, at, size in zip(columns, first, sizes, strict=True)]
        leads = [row[max(0, at - how.lead) : at] for row, at in zip(columns, first, strict=True)]
        new = [
            torch.cat([instruction, ids[row, send(torch.cat([lead, piece]), ids.device)]])
            if piece.numel()
            else ids.new_empty(0)
            for row, (lead, piece) in enumerate(zip(leads, pieces, strict=True))
        ]
        together = torch.nn.utils.rnn.pad_sequence(new, batch_first=True)
        lengths = send(torch.tensor([row.numel() for row in new]), ids.device)
        real = torch.arange(together.shape[1], device=ids.device) < lengths[:, None]
        sinks = [row[: how.sinks] for row in columns]
        found = ReconstructionPass(
            columns=pieces, sinks=sinks, real=real, queries=how.queries, mean_group=how.mean_group
        )
        yield found, together


@contextmanager
def _weights(
    model: Any, cache: KvCache, piece: ReconstructionPass, new: Tensor, seen: Tensor | None
) -> Iterator[Callable[[int], Tensor] | None]:
    """While it is open, what `ReconstructionPass.log_weights` asks for; None where the plan weighs nothing."""
    how = cache.engine.needs.reconstruction
    if how is None or not how.weighted:
        yield None
    elif how.graded:
        found = log_gradients(model, cache, new, piece.real, {} if seen is None else placed(model, cache, new, seen))
        yield found.__getitem__
    else:
        with hidden_lengths(model, cache.geometry) as lengths:
            yield lengths


def _hides_nothing(mask: Tensor, cache: KvCache) -> bool:
    """Whether nothing of a mask (b, n) is padding; warn where a row ends in some and the plan evicts."""
    new = mask[:, cache.seen :].to(torch.bool)
    # One wait for the device.
    whole, ends = torch.stack([mask.all(), (new.any(1) & ~new[:, -1]).any()]).tolist()
    if ends and cache.plan.evicts:
        warnings.warn(
            f"a row of this prompt ends in padding, and {cache.plan} goes by what comes last: that row keeps other "
            "tokens than alone. Pad on the left (tokenizer.padding_side = 'left')",
            stacklevel=4,
        )
    return bool(whole)


def check_mask(mask: Tensor | None, wanted: tuple[int, ...], *, seen: int = 0) -> None:
    """Raise where a mask is not one of rows and columns (b, n), of which a cache has seen some.

    Raises:
        CacheMisuse: it has another shape.
    """
    if mask is not None and tuple(mask.shape) != wanted:
        raise CacheMisuse(
            f"the cache has seen {seen} tokens and {wanted[1] - seen} are new, so the attention_mask must be "
            f"{wanted}, and is {tuple(mask.shape)}"
        )


def _check(
    model: Any, cache: KvCache, ids: Tensor, mask: Tensor | None, chunk: int | None, instruction: Tensor | None
) -> None:
    if ids.ndim != 2 or not ids.shape[1]:
        raise CacheMisuse(f"prefill takes token ids (b, n), n at least 1, and got {tuple(ids.shape)}")
    if chunk is not None and chunk < 1:
        raise CacheMisuse(f"asked for chunk={chunk}: give at least 1 token, or None to feed all at once")
    check_mask(mask, (ids.shape[0], cache.seen + ids.shape[1]), seen=cache.seen)
    twice = cache.engine.needs.reconstruction is not None
    if cache.geometry.restarts and (twice or (chunk is not None and 1 < chunk < ids.shape[1])):
        asked = f"{cache.plan} reads its context twice" if twice else f"asked for chunk={chunk}"
        raise CacheMisuse(
            f"{asked}: transformers' {cache.geometry.model_type} begins its recurrent state anew with each piece of a "
            "text, so its context must be read at once, and once"
        )
    border, how, tokens = cache.guard.border, cache.engine.needs.reconstruction, cache.seen + ids.shape[1]
    if border is not None:
        first = cache.seen or min(chunk or tokens, tokens)
        check_border(border, seen=first, after=tokens, what="this context, fed so many tokens at a time,")
        if how is not None:
            words = 0 if instruction is None else int(instruction.numel())
            again = min(tokens, how.lead + how.chunk) + words
            check_border(border, seen=tokens, after=tokens + again, what="this context, repeated after itself,")
    if how is not None and how.weighted and cache.geometry.readers:
        raise CacheMisuse(
            f"{cache.plan} weighs what a repetition attends to by the layer's output projection, and in this "
            f"{cache.geometry.model_type} several layers read one layer's keys and values: take kvzip, which does not"
        )
    if how is not None and how.graded:
        check_gradients(model, cache, ids.to(input_device(model)))
    if cache.engine.needs.reconstruction and cache.seen:
        raise CacheMisuse(
            f"{cache.plan} reads its context twice, and this cache holds one already, compressed: give the whole "
            "context to a new cache, or what follows to generate()"
        )
    if mask is None:
        cache.conversation.check_new(ids, seen=cache.seen)


def _check_images(model: Any, cache: KvCache, ids: Tensor, chunk: int | None, inputs: Mapping[str, Any]) -> None:
    """Raise where a prompt has images that cannot be fed, or tokens of images without the images."""
    twice = cache.engine.needs.reconstruction is not None
    if not inputs:
        instead = "give it all that the processor made, kvtailor.prefill(model, **inputs, plan=plan)"
        if twice:
            instead = f"{cache.plan} reads its context twice by its token ids alone, so choose another plan for images"
        return check_text(model, ids, "prefill", instead)
    check_inputs(model, inputs)
    names = ", ".join(inputs)
    if twice:
        raise CacheMisuse(
            f"{cache.plan} reads its context twice by its token ids alone, and {names} came with them: choose another "
            "plan for images"
        )
    if chunk is not None and chunk < ids.shape[1]:
        raise CacheMisuse(
            f"asked for chunk={chunk} and for {names}, which belong to the whole prompt: leave chunk out, or call "
            f"model.generate(**inputs, {CACHE_ARGUMENT}=cache, prefill_chunk_size=...), which splits them where the "
            "model allows it"
        )
    if cache.seen and cache.guard.rope.kept:
        raise CacheMisuse(
            f"this cache has seen {cache.seen} tokens, and the positions of an image among what follows ({names}) need "
            f"the whole conversation: give that to model.generate, with this cache as {CACHE_ARGUMENT}"
        )


def _pieces(tokens: int, chunk: int | None) -> Iterator[tuple[int, int]]:
    """First and end of each chunk. The last is never a single token, which would count as a decoded one."""
    cuts = list(range(0, tokens, chunk or tokens))
    if len(cuts) > 1 and tokens - cuts[-1] == 1 and chunk != 1:
        cuts[-1] -= 1
    yield from zip(cuts, [*cuts[1:], tokens], strict=True)


def _joined(mask: Tensor | None, real: Tensor, columns: int) -> Tensor | None:
    """The mask of a context of so many columns and the new tokens after it."""
    if mask is None and bool(real.all()):
        return None
    before = real.new_ones((len(real), columns)) if mask is None else mask.to(torch.bool)
    return torch.cat([before, real], 1).to(torch.int64)
