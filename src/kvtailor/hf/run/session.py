"""A model under a plan, for many prompts: fresh caches, generation and scoring, and the model as it was afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError, CacheMisuse
from kvtailor.hf.attention import NAME, counting_plain_forwards
from kvtailor.hf.cache import KvCache
from kvtailor.hf.handed import check_seen
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.model.rope_border import check_border
from kvtailor.hf.model.vocabulary import check_ids
from kvtailor.hf.run.arguments import words_of
from kvtailor.hf.run.first_logits import with_first_checked
from kvtailor.hf.run.prefill import begin, instruction_of, prefill, read
from kvtailor.hf.switch import attention_restored
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS, find_cache, hand_cache, rename_cache
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call, told

__all__ = ["Session", "session"]


class Session:
    """What `kvtailor.session` gives.

    Attributes:
        model: the model.
        plan: the plan of every cache that this session makes.
        tokenizer, graphs, cache_dtype: see `session`.
        last: the newest cache, for its ledger; None before the first.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        tokenizer: Any = None,
        *,
        graphs: bool = False,
        cache_dtype: torch.dtype | None = None,
    ):
        self.model, self.plan, self.tokenizer, self.graphs = model, plan, tokenizer, graphs
        self.cache_dtype = cache_dtype
        self.last: KvCache | None = None

    def cache(self) -> KvCache:
        """A new, empty cache under the plan."""
        self.last = cache_for(self.model, self.plan, graphs=self.graphs, cache_dtype=self.cache_dtype)
        return self.last

    @check_call
    def prefill(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        chunk: int | None = None,
        hold: bool = False,
        **inputs: Any,
    ) -> KvCache:
        """A cache that has seen a context: a new one, unless one is given as `cache`; see `kvtailor.prefill`.

        Raises:
            CacheMisuse: a plan, a tokenizer or a cache_dtype was given, which the session has.
            Others: see `kvtailor.prefill`.
        """
        for name in ("plan", "tokenizer", "cache_dtype"):
            if name in inputs:
                raise CacheMisuse(
                    f"a session has its {name}: leave {name}= out, or call kvtailor.prefill(model, input_ids, plan=...)"
                )
        given = find_cache(inputs)
        more = {name: value for name, value in inputs.items() if name not in CACHE_ARGUMENTS}
        cache = self.cache() if given is None else given
        how: dict[str, Any] = {"chunk": chunk, "hold": hold, "tokenizer": self.tokenizer}
        return prefill(self.model, input_ids, attention_mask, cache=cache, **how, **more)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with a new cache, unless one is given as `cache` (or by its older name, `past_key_values`).

        A plan that reads its context twice compresses all of the prompt but its last token before the first new one.

        Raises:
            ArgumentError: the ids are no tensor.
            UnknownName: neither `generate` nor the model takes such an argument.
            CacheMisuse: what was asked cannot go with a cache of ours (`hf.run.arguments`); or a used cache was given,
                and the ids are not those of the conversation that it has seen the beginning of, see
                `KvCache.check_ids`. New ids alone are taken where an attention_mask covers the tokens seen as well.
                Or a cache was given by both names.
        """
        if len(args) > 1:
            # As `generate` names it.
            kwargs["generation_config"], args = args[1], (args[0], *args[2:])
        given = find_cache(kwargs)
        cache = self.cache() if given is None else given
        kwargs = rename_cache({**kwargs, CACHE_ARGUMENT: cache} if given is None else kwargs)
        if isinstance(cache, KvCache):
            kwargs = words_of(self.model, kwargs, tokenizer=self.tokenizer)
        ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if ids is None or not isinstance(cache, KvCache):
            return self.model.generate(*args, **kwargs)
        if not isinstance(ids, Tensor):
            raise ArgumentError(
                f"generate takes token ids (b, n) as a tensor, and got {told(ids)}: give what "
                "tokenizer(text, return_tensors='pt') or tokenizer.apply_chat_template(messages, "
                "add_generation_prompt=True, return_tensors='pt', return_dict=True) gives, as **inputs"
            )
        if kwargs.get("pixel_values") is None:
            check_ids(self.model, ids)
        mask, before = kwargs.get("attention_mask"), cache.seen
        alone = before > 0 and mask is not None and mask.shape[1] == before + ids.shape[1]
        if not alone:
            cache.check_ids(ids)
        if given is None:
            begin(self.model, cache, ids, mask, tokenizer=self.tokenizer)
            # For so many sequences `generate` repeats each row of its inputs, and must find it in the cache.
            rows = max(self._asked("num_beams", kwargs), self._asked("num_return_sequences", kwargs))
            if cache.seen and rows > 1:
                cache.batch_repeat_interleave(rows)
        kwargs["logits_processor"] = with_first_checked(self.model, kwargs.get("logits_processor"), new=not before)
        output = self.model.generate(*args, **kwargs)
        # The last token is never fed.
        fed_to_model = (before if alone else 0) + getattr(output, "sequences", output).shape[1] - 1
        check_seen(cache.seen, fed_to_model, self.model)
        # Beams end in another order than the sequences, but each began with its own prompt.
        certain = ids if self._asked("num_beams", kwargs) > 1 else getattr(output, "sequences", output)
        _take_note(cache, certain, mask, first=before if alone else 0)
        return output

    @check_call
    @torch.no_grad()
    def score(self, context: Tensor, continuation: Tensor, *, chunk: int | None = None) -> Tensor:
        """Log-probability of a continuation given a compressed context.

        The context is prefilled and compressed; its last logits score the first token of the continuation, and the
        compressed cache the others.

        Args:
            context: (b, n) token ids, without padding, n >= 1.
            continuation: (b, t) token ids, t >= 1.
            chunk: feed the continuation in pieces of this many tokens, so that the plan acts between them as it does
                while decoding (1: exactly as decoding). None: at once.

        Returns:
            (b, t) float32 natural logarithms.
        """
        if context.ndim != 2 or continuation.ndim != 2 or not context.shape[1] or not continuation.shape[1]:
            raise CacheMisuse(
                "scoring takes a context (b, n) and a continuation (b, t) of at least one token each, and got "
                f"{tuple(context.shape)} and {tuple(continuation.shape)}"
            )
        cache = self.cache()
        check_border(
            cache.guard.border,
            seen=context.shape[1],
            after=context.shape[1] + continuation.shape[1] - 1,
            what="context and continuation together",
        )
        logits = [read(self.model, cache, context, instruction=instruction_of(self.tokenizer))]
        fed = continuation[:, :-1]
        for piece in fed.split(chunk or max(fed.shape[1], 1), 1):
            if piece.shape[1]:
                logits.append(self.model(piece, **hand_cache(cache), use_cache=True).logits)
        check_seen(cache.seen, context.shape[1] + fed.shape[1], self.model)
        log_probabilities = torch.cat(logits, 1).float().log_softmax(-1)
        return log_probabilities.gather(-1, continuation[..., None])[..., 0]

    def _asked(self, name: str, kwargs: dict[str, Any], default: Any = 1) -> Any:
        """A field of the generation config, as `generate` will take it; the default where it is not given."""
        config = kwargs.get("generation_config") or self.model.generation_config
        found = kwargs.get(name, getattr(config, name, None))
        return default if found is None else found


def _take_note(cache: KvCache, ids: Tensor, mask: Tensor | None, first: int) -> None:
    """Tell a cache which ids (b, t) it has seen from column `first` on; it may have seen fewer."""
    known = cache.conversation.columns
    if first > known or known >= cache.seen:
        return
    rows = ids.repeat_interleave(cache.rows // len(ids), 0)[:, known - first : cache.seen - first]
    if mask is not None:
        mask = mask.repeat_interleave(cache.rows // len(mask), 0)
        mask = torch.cat([mask, mask.new_ones((len(mask), max(0, cache.seen - mask.shape[1])))], 1)
    cache.conversation.append(rows, mask, at=known)


@check_call
@contextmanager
def session(
    model: Any,
    plan: str | Plan,
    tokenizer: Any = None,
    *,
    graphs: bool = False,
    cache_dtype: torch.dtype | None = None,
) -> Iterator[Session]:
    """A model under a plan; its own attention comes back at the end.

    The plan acts on the session's caches. What `model.generate` does without one of them is not compressed, and a
    warning at the end of the block reports it.

    ```python
    with kvtailor.session(model, "snapkv @ tokens=256") as s:
        for prompt in prompts:
            output = s.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=32)
    ```

    Args:
        model: a transformers decoder-only model.
        plan: one line or a `Plan`.
        tokenizer: of the model; makes the instruction for plans that read the context twice, see `kvtailor.prefill`.
        graphs: every cache of the session replays decoded tokens as a CUDA graph, see `kvtailor.cache_for`. What cannot
            be recorded is refused as the session begins.
        cache_dtype: in which every cache of the session holds keys and values, see `kvtailor.cache_for`.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    opened = Session(model, parsed, tokenizer, graphs=graphs, cache_dtype=cache_dtype)
    config = model.config.get_text_config(decoder=True)
    with attention_restored(model, NAME):
        first = opened.cache()
        # The model's attention stays ours between two caches of this session.
        compressed, lease = first.geometry.compressed, first.lease
        opened.last = None
        del first
        with counting_plain_forwards(config, compressed[0] if compressed else -1) as plain:
            yield opened
        del lease
    if plain.count and parsed != Plan.parse("full"):
        # Above this frame stand contextlib's and the one of the with statement.
        warnings.warn(
            f"{plain.count} forwards inside kvtailor.session read the model's own cache, on which {parsed} does "
            "nothing: use s.generate(...) of `with kvtailor.session(model, plan) as s`, or give "
            f"{CACHE_ARGUMENT}=s.cache() to model.generate",
            stacklevel=3,
        )
