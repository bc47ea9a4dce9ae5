"""A model under a plan, for many prompts: fresh caches, generation and scoring, and the model as it was afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvtailor.errors import CacheMisuse
from kvtailor.hf.attention import NAME
from kvtailor.hf.cache import KvCache, cache_for
from kvtailor.hf.prefill import begin, instruction_of, prefill, read
from kvtailor.hf.switch import attention_restored
from kvtailor.plan import Plan

__all__ = ["Session", "session"]


class Session:
    """What `kvtailor.session` gives.

    Attributes:
        model: the model.
        plan: the plan of every cache that this session makes.
        tokenizer: see `session`.
        last: the newest cache, for its ledger; None before the first.
    """

    def __init__(self, model: Any, plan: Plan, tokenizer: Any = None):
        self.model, self.plan, self.tokenizer = model, plan, tokenizer
        self.last: KvCache | None = None

    def cache(self) -> KvCache:
        """A new, empty cache under the plan."""
        self.last = cache_for(self.model, self.plan)
        return self.last

    def prefill(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk: int | None = None, hold: bool = False
    ) -> KvCache:
        """A new cache that has seen a context; see `kvtailor.prefill`."""
        return prefill(
            self.model, self.cache(), input_ids, attention_mask, chunk=chunk, hold=hold, tokenizer=self.tokenizer
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with a new cache, unless one is given as `past_key_values`.

        A plan that reads its context twice compresses all of the prompt but its last token before the first new one.
        """
        if "past_key_values" not in kwargs:
            cache = kwargs["past_key_values"] = self.cache()
            ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
            if ids is not None:
                begin(self.model, cache, ids, kwargs.get("attention_mask"), tokenizer=self.tokenizer)
                rows = self._sequences(kwargs)
                if cache.seen and rows > 1:
                    cache.batch_repeat_interleave(rows)
        return self.model.generate(*args, **kwargs)

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
        logits = [read(self.model, cache, context, instruction=instruction_of(self.tokenizer))]
        fed = continuation[:, :-1]
        for piece in fed.split(chunk or max(fed.shape[1], 1), 1):
            if piece.shape[1]:
                logits.append(self.model(piece, past_key_values=cache, use_cache=True).logits)
        log_probabilities = torch.cat(logits, 1).float().log_softmax(-1)
        return log_probabilities.gather(-1, continuation[..., None])[..., 0]

    def _sequences(self, kwargs: dict[str, Any]) -> int:
        """For how many sequences `generate` repeats each row of its inputs, and must find it in the cache."""
        config = kwargs.get("generation_config") or self.model.generation_config
        asked = [kwargs.get(name, getattr(config, name, 1)) for name in ("num_beams", "num_return_sequences")]
        return max(each or 1 for each in asked)


@contextmanager
def session(model: Any, plan: str | Plan, tokenizer: Any = None) -> Iterator[Session]:
    """A model under a plan; its own attention comes back at the end.

    ```python
    with kvtailor.session(model, "snapkv @ tokens=256") as s:
        for prompt in prompts:
            output = s.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=32)
    ```

    Args:
        model: a transformers decoder-only model.
        plan: one line or a `Plan`.
        tokenizer: of the model; makes the instruction for plans that read the context twice, see `kvtailor.prefill`.
    """
    parsed = Plan.parse(plan) if isinstance(plan, str) else plan
    opened = Session(model, parsed, tokenizer)
    with attention_restored(model, NAME):
        opened.cache()
        opened.last = None
        yield opened
