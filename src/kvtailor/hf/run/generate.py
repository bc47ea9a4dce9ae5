"""`kvtailor.generate`: text under a plan, faster where a draft helps."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvtailor.errors import ArgumentError, CacheMisuse, PlanError, UnknownName, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs.obstacles import check_processes
from kvtailor.hf.graphs.replaying import ReplayingReader
from kvtailor.hf.images import check_text
from kvtailor.hf.model.cache_dtype import stored_dtype
from kvtailor.hf.model.devices import input_device
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.model.loading import load
from kvtailor.hf.model.rope_border import check_border
from kvtailor.hf.model.tensor_parallel import RankHeads, broadcast_from_first, share_of
from kvtailor.hf.model.vocabulary import check_ids
from kvtailor.hf.run.arguments import OF_CACHES, check_config, check_no_template, file_of, known_words, own_words
from kvtailor.hf.run.first_logits import check_logits
from kvtailor.hf.run.prefill import check_mask
from kvtailor.hf.run.reader import CacheReader
from kvtailor.hf.run.sharing import can_follow, can_remake, keep_queries
from kvtailor.hf.versions import CACHE_ARGUMENT, CACHE_ARGUMENTS
from kvtailor.ops.notebook_html import html_block, html_table
from kvtailor.plan import Plan
from kvtailor.plan.calls import check_call
from kvtailor.speculate.contract import Draft, Lookahead, Rule
from kvtailor.speculate.decode import Decoding, Drafting
from kvtailor.speculate.drafts import Hierarchy, Steps
from kvtailor.speculate.lookahead import Adaptive, Controller, Fixed
from kvtailor.speculate.rounds import Level, Statistics
from kvtailor.speculate.rules import Greedy, Sampling

__all__ = ["Generated", "generate"]

# Of a model's generation config: what no sentence needs, since the cache and the longest text are given here.
_NOT_SAID = OF_CACHES | {"max_length"}


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What `generate` gives.

    Attributes:
        sequences: (b, n + t) prompt and new tokens, as `model.generate` gives them.
        statistics: acceptance, tokens for each verification, and measured speed.
        cache: of the target; it has read all but the last token, and may serve the next turn.
        drafts: the other caches that were at work, the first drafter's first; what they hold comes on top.
    """

    sequences: Tensor
    statistics: Statistics
    cache: KvCache
    drafts: tuple[KvCache, ...] = ()

    def __repr__(self) -> str:
        shape = tuple(self.sequences.shape)
        return f"Generated(sequences={shape}, tokens={self.statistics.tokens}, cache={self.cache!r})"

    def _repr_html_(self) -> str:
        """For notebooks: what was counted, and what the cache holds."""
        counted = self.statistics
        numbers = {
            "sequences": str(tuple(self.sequences.shape)),
            "new tokens of each row": str(counted.tokens),
            "by plain decoding": str(counted.plain_tokens),
            "seconds": f"{counted.seconds:.3g}",
            "acceptance": None if counted.acceptance is None else f"{100 * counted.acceptance:.0f} %",
            "speed-up, measured": None if counted.speed_up is None else f"{counted.speed_up:.2f}×",
        }
        table = html_table([[name, value] for name, value in numbers.items()])
        return html_block("kvtailor.generate", table, self.cache._repr_html_())


@check_call
@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    plan: str | Plan = "full",
    draft: str | Path | Any = None,
    draft_plan: str | Plan | None = None,
    middle_plan: str | Plan | None = None,
    gamma: int | Literal["adaptive"] = "adaptive",
    inner_gamma: int = 2,
    min_gain: float | None = 1.05,
    refresh: int | None = None,
    max_new_tokens: int = 256,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    streamer: Any = None,
    chunk: int | None = None,
    graphs: bool = False,
    cache_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Generated:
    """Text under a plan. With a draft it is the same text (greedy), or as likely (sampling), in fewer forwards.

    ```python
    kvtailor.generate(model, ids, draft_plan="snapkv @ tokens=256")                      # the same weights draft
    kvtailor.generate(model, ids, draft="demo-draft", plan="kivi4")                      # a small model drafts
    kvtailor.generate(model, ids, draft=small, middle_plan="retrieval @ tokens=4096")    # both: a hierarchy
    ```

    Args:
        model: a transformers decoder-only model: the target.
        input_ids: (b, n) token ids, padded on the left.
        attention_mask: (b, n) 0 for padding; None: no padding.
        plan: of the target's cache.
        draft: a smaller model with the same vocabulary, or its name or folder. None: the target's own weights.
        draft_plan: of the draft's cache; "full" for a draft model where it is left out. With neither, there is no
            draft.
        middle_plan: of another cache of the target's weights, which verifies the draft model's tokens before the
            target's own cache does.
        gamma: tokens drafted at once; "adaptive": as many as pay by the measured costs and acceptance, at most 16.
        inner_gamma: tokens that the draft model drafts at once inside a hierarchy.
        min_gain: predicted speed over plain decoding below which it decodes plainly. None: it always speculates.
        refresh: emitted tokens after which the draft's or middle cache of the target's own weights is compressed anew
            from all that the target's cache holds; where that has evicted, by reading the text again. None: never.
        max_new_tokens: tokens after the prompt, at most.
        do_sample: False: the likeliest token; True: drawn after `temperature`, `top_k` and `top_p`.
        generator: of random numbers, on the model's device; of the same state in all processes that share the model.
        eos_token_id: what ends a row. None: that of the model's generation config.
        pad_token_id: what ended rows emit. None: that of the generation config, or 0.
        streamer: with `put` and `end`, as transformers' `TextIteratorStreamer`; it gets the prompt, then token by token
            what is certain. One row only.
        chunk: read the prompt so many tokens at a time; see `kvtailor.prefill`.
        graphs: replay decoded tokens as a CUDA graph, which is recorded anew whenever the plan evicts or encodes; so
            what launches kernels is not waited for. Without a draft.
        cache_dtype: in which caches of the target's weights, and of a draft that is named, hold keys and values, see
            `kvtailor.cache_for`.
        **inputs: none. What a processor makes of images is refused here; `model.generate` takes it, with
            `cache=kvtailor.cache_for(model, plan)`.

    Raises:
        PlanError: the target's plan does not allow to verify several tokens at once; nothing has been done then.
        UnsupportedModel: the draft model has another vocabulary or is elsewhere, or steps cannot be recorded and
            `graphs` is set.
        CacheMisuse: what was given does not fit together, or the model's config.json has words of `generate`.
        UnknownName: there is no such argument.
    """
    sampling = {"temperature": (temperature, 1.0), "top_k": (top_k, None), "top_p": (top_p, 1.0)}
    drawn = sampling if do_sample else {}
    if idle := [name for name, (value, usual) in sampling.items() if value != usual and not do_sample]:
        warnings.warn(f"greedy decoding leaves {' and '.join(idle)} unread: give do_sample=True", stacklevel=4)
    _check_text_alone(model, input_ids, inputs, {name for name, (value, usual) in drawn.items() if value == usual})
    target_plan, small_plan, own_plan = (_parsed(each) for each in (plan, draft_plan, middle_plan))
    assert target_plan is not None
    lookahead = _checked(target_plan, draft, small_plan, own_plan, gamma, inner_gamma, min_gain, refresh)
    drafts = draft is not None or small_plan is not None
    if graphs and drafts:
        raise CacheMisuse("graphs=True replays steps of one token, and with a draft several are read at once")
    _check_ids(model, input_ids, max_new_tokens, streams=streamer is not None)
    check_mask(attention_mask, tuple(input_ids.shape))
    _check_processes(model, gamma, min_gain, drafts=drafts, graphs=graphs)
    rule: Rule = Greedy()
    if do_sample:
        rule = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, generator=_shared(generator, model))
    small = model if draft is None else _loaded(draft, model, cache_dtype)
    if drafts:
        _check_taking_back(model, small)
    device = input_device(model)
    ids, mask = input_ids.to(device), None
    if attention_mask is not None and not bool(attention_mask.all()):
        mask = attention_mask.to(device)

    # Every cache is made, and every plan refused that does not suit its model, before any is filled.
    target = (
        ReplayingReader(model, target_plan, mask, chunk, cache_dtype, expected=max_new_tokens)
        if graphs
        else CacheReader(model, target_plan, mask, chunk, cache_dtype)
    )
    readers = [target]
    levels: list[Level] = []
    drafting: Draft | None = None
    if drafts:
        own_dtype = cache_dtype if small is model else None
        readers.append(CacheReader(small, small_plan or Plan.parse("full"), mask, chunk, own_dtype))
        levels.append(Level())
        drafting = Steps(readers[-1], rule)
    if own_plan is not None and drafting is not None:
        readers.append(CacheReader(model, own_plan, mask, chunk, cache_dtype))
        levels.append(Level())
        drafting = Hierarchy(readers[-1], drafting, rule, inner_gamma, levels[-1])
    if drafting is not None:
        _check_borders(readers, ids, max_new_tokens, "a draft is verified by one forward on either side of it")
    elif target_plan.needs.reconstruction:
        _check_borders(readers, ids, max_new_tokens, f"{target_plan} reads its context twice")
    own = readers[-1] if len(readers) > 1 and (own_plan is not None or draft is None) else None
    sharing = [own] if own is not None and can_follow(own.plan) else []
    source = target if own is not None and can_remake(target.plan, own.plan) else None
    if source is not None and own is not None and refresh is not None:
        keep_queries(source.cache, own.plan)
    logits = target.prefill(ids, sharing)
    check_logits(model, logits, new=True)
    for reader in readers[1:]:
        if reader not in sharing:
            reader.prefill(ids)
    decoding = Decoding(
        target,
        rule,
        Controller(lookahead, min_gain if drafting is not None else None),
        None
        if drafting is None
        else Drafting(
            draft=drafting,
            levels=tuple(levels),
            refresh=refresh,
            renew=None if own is None else partial(own.renew, source=source),
        ),
        eos=_ids(model.generation_config.eos_token_id if eos_token_id is None else eos_token_id),
        pad=_pad(model, pad_token_id),
        emit=None if streamer is None else _to(streamer),
    )
    if streamer is not None:
        streamer.put(ids.cpu())
    sequences = decoding.run(ids, rule.pick(rule.prediction(logits)), max_new_tokens)
    if streamer is not None:
        streamer.end()
    cache = target.close()
    known = cache.conversation.columns
    cache.conversation.append(sequences[:, known : cache.seen], None, at=known)
    return Generated(
        sequences=sequences,
        statistics=decoding.statistics,
        cache=cache,
        drafts=tuple(reader.cache for reader in readers[1:]),
    )


def _check_ids(model: Any, input_ids: Tensor, max_new_tokens: int, *, streams: bool) -> None:
    """Refuse token ids after which nothing can be generated."""
    if input_ids.ndim != 2 or not input_ids.shape[1] or max_new_tokens < 1:
        raise CacheMisuse(
            f"generating takes token ids (b, n), n at least 1, and max_new_tokens of at least 1, and got "
            f"{tuple(input_ids.shape)} and {max_new_tokens}"
        )
    check_ids(model, input_ids)
    if streams and input_ids.shape[0] > 1:
        raise CacheMisuse(f"a streamer takes one row, and input_ids has {input_ids.shape[0]}: leave it out")


def _check_taking_back(*models: Any) -> None:
    """Refuse models whose layers cannot take back the tokens of a rejected draft."""
    for each in models:
        obstacle = Geometry.of(each.config).taking_back_refusal()
        if obstacle is not None:
            raise UnsupportedModel(f"a draft may be rejected, and {obstacle}: leave draft and draft_plan out")


def _check_borders(readers: Sequence[CacheReader], ids: Tensor, new: int, why: str) -> None:
    """Refuse a run that would cross the length from which on a model computes otherwise."""
    for reader in readers:
        last, what = ids.shape[1] + new - 1, "prompt and max_new_tokens together"
        check_border(reader.cache.guard.border, seen=ids.shape[1], after=last, what=what, why=why)


def _check_text_alone(model: Any, ids: Tensor, inputs: Mapping[str, Any], unsaid: Collection[str]) -> None:
    """Refuse images, which a draft and the readers of the stage `speculate` would have to read as well.

    Args:
        unsaid: arguments of sampling that the caller left as they are.
    """
    instead = f"call model.generate(**inputs, {CACHE_ARGUMENT}=kvtailor.cache_for(model, plan)), which reads images"
    own, taken = inspect.signature(generate).parameters, inspect.signature(model.forward).parameters
    of_generate = known_words(model) - (taken.keys() - OF_CACHES) if inputs else set()
    for name in inputs:
        if inputs[name] is None and name in of_generate:
            continue
        if name in (*CACHE_ARGUMENTS, *OF_CACHES):
            raise CacheMisuse(
                f"kvtailor.generate makes the cache of its plan by itself, and got {name}: leave it out, or call "
                f"model.generate(**inputs, {CACHE_ARGUMENT}=cache)"
            )
        if name in of_generate:
            raise CacheMisuse(
                f"kvtailor.generate decodes by itself and has no {name}=: s.generate(ids, {name}=...) of `with "
                "kvtailor.session(model, plan) as s`, and model.generate with kvtailor.cache_for(model, plan), take it"
            )
        if name not in taken:
            check_no_template(name)
            raise UnknownName("argument of kvtailor.generate", name, own)
        if inputs[name] is not None:
            raise CacheMisuse(f"kvtailor.generate reads text alone, and got {name}: {instead}")
    check_text(model, ids, "kvtailor.generate", instead)
    check_config(model)
    left_out = {
        name: value
        for name, value in own_words(model).items()
        if (name not in own or name in unsaid) and name not in _NOT_SAID
    }
    if left_out:
        said = ", ".join(f"{name}={value!r}" for name, value in left_out.items())
        warnings.warn(
            f"the model's generation config ({file_of(model)}) says {said}, which kvtailor.generate leaves out; "
            "s.generate(ids) of `with kvtailor.session(model, plan) as s` follows it",
            stacklevel=5,
        )


def _parsed(plan: str | Plan | None) -> Plan | None:
    return Plan.parse(plan) if isinstance(plan, str) else plan


def _check_processes(model: Any, gamma: int | str, min_gain: float | None, *, drafts: bool, graphs: bool) -> None:
    """Refuse what processes that share a model would each decide for themselves: all must take the same forwards."""
    share = share_of(model, Geometry.of(model.config))
    if not isinstance(share, RankHeads):
        return
    if graphs:
        check_processes(share)
    if drafts and (gamma == "adaptive" or min_gain is not None):
        raise CacheMisuse(
            f"gamma={gamma!r} and min_gain={min_gain} follow measured times, which differ between the "
            f"{share.processes} processes that share this model: give a number of tokens as gamma, and min_gain=None"
        )


def _shared(generator: torch.Generator | None, model: Any) -> torch.Generator | None:
    """A generator of numbers that are the same in all processes that share the model."""
    share = share_of(model, Geometry.of(model.config))
    if generator is not None or not isinstance(share, RankHeads):
        return generator
    made = torch.Generator(device=input_device(model))
    return made.manual_seed(int(broadcast_from_first(share, str(torch.initial_seed()))))


def _checked(
    plan: Plan,
    draft: Any,
    draft_plan: Plan | None,
    middle_plan: Plan | None,
    gamma: int | str,
    inner_gamma: int,
    min_gain: float | None,
    refresh: int | None,
) -> Lookahead:
    """Refuse what cannot work together, before any work."""
    if isinstance(gamma, str) and gamma != "adaptive":
        raise CacheMisuse(f"gamma is {gamma!r}: give a number of tokens to draft at once, or 'adaptive'")
    lookahead = Adaptive() if isinstance(gamma, str) else Fixed(tokens=gamma)
    if inner_gamma < 1:
        raise ArgumentError(f"inner_gamma must be at least 1 drafted token, found {inner_gamma}")
    if min_gain is not None and not min_gain > 0:
        raise ArgumentError(f"min_gain must be above 0, or None to speculate always, found {min_gain}")
    if middle_plan is not None and draft is None:
        raise CacheMisuse(
            f"middle_plan={str(middle_plan)!r} stands between a draft model and the target, and there is no draft "
            "model: give draft=, or draft_plan= to let the target's own weights draft"
        )
    if refresh is not None:
        own = middle_plan if draft is not None else draft_plan
        if own is None:
            raise CacheMisuse("refresh is for a cache of the target's own weights: give draft_plan= or middle_plan=")
        if refresh < 1:
            raise ArgumentError(f"refresh must be at least 1 token, found {refresh}")
    if draft is not None or draft_plan is not None:
        faults = target_faults(plan)
        if faults:
            raise PlanError(str(plan), faults)
    return lookahead


def target_faults(plan: Plan) -> list[str]:
    """Why several tokens cannot be verified at once under a plan, a sentence for each reason."""
    faults = []
    if not plan.attend.reads_alike:
        faults.append(
            "its attention chooses what to read for one new token at a time, and would read everything for several, so "
            "it cannot verify a draft; it may be the draft's plan"
        )
    if plan.slack_tokens == 0:
        faults.append(
            "it evicts after every token, so no two tokens can be verified on the same cache: give a slack such as "
            "slack=32, or let it be the draft's plan"
        )
    if plan.encode.block == 1:
        faults.append(
            "it encodes after every token, so no two tokens can be verified on the same cache: give its codec a larger "
            "block, or let it be the draft's plan"
        )
    return faults


def _loaded(draft: Any, model: Any, cache_dtype: torch.dtype | None) -> Any:
    """The draft model, which must speak the target's tokens; one that is loaded here has caches like the target's."""
    device, small = input_device(model), draft
    if isinstance(draft, str | Path):
        stored = stored_dtype(model, cache_dtype)
        small = load(draft, dtype=model.dtype, cache_dtype=stored, device=device)[0]
    sizes = [each.get_output_embeddings().weight.shape[0] for each in (model, small)]
    if sizes[0] != sizes[1]:
        raise UnsupportedModel(
            f"the draft model has {sizes[1]} tokens and the target {sizes[0]}: a draft must have the target's tokenizer"
        )
    if input_device(small) != device:
        raise UnsupportedModel(
            f"the draft model is on {input_device(small)} and the target on {device}: put both on one"
        )
    return small


def _ids(eos: int | Sequence[int] | None) -> list[int]:
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else [int(each) for each in eos]


def _pad(model: Any, asked: int | None) -> int:
    found = model.generation_config.pad_token_id if asked is None else asked
    return 0 if found is None else int(found)


def _to(streamer: Any) -> Any:
    def emit(tokens: Tensor) -> None:
        for token in tokens[0].cpu():
            streamer.put(token[None])

    return emit
