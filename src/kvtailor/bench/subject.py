"""What is measured: a model with its tokenizer.

A model here is anything that is called like a causal language model of transformers, so that tests can measure a dummy
whose right answers are known.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kvtailor.bench.contestant import OTHER_ATTENTION, OWN, Contestant
from kvtailor.bench.data.overlap import Calibrated, read_back
from kvtailor.calibration_file import Calibration
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.cache_dtype import dtype_of_caches, stored_dtype
from kvtailor.hf.model.devices import local_part
from kvtailor.hf.model.fingerprint import fingerprint
from kvtailor.hf.model.processes import started
from kvtailor.hf.model.vocabulary import check_characters, check_ids, token_rows
from kvtailor.hf.run.first_logits import not_a_number
from kvtailor.hf.versions import hand_cache, read_cache
from kvtailor.ledger import storage_bytes
from kvtailor.plan import Plan

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["Prefills", "Subject", "Tokens", "at_whole_budget", "plans_at_whole_budget"]

_DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_UNREAD = f"unread-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Tokens:
    """Tokens of a text.

    Attributes:
        ids: (n,) int64.
        text: what they were made from.
        ends: for each token, the UTF-8 bytes of the text up to its end; None where the tokenizer does not say.
    """

    ids: Tensor
    text: str
    ends: tuple[int, ...] | None


class Prefills(Protocol):
    """What may fill a cache with a prompt in place of a forward."""

    def filled(
        self, model: Any, ids: Tensor, cache: Any, *, last_only: bool, instruction: Tensor | None = None
    ) -> Tensor | None:
        """See `bench.measure.kept_prompts.KeptPrompts.filled`."""

    def followed(
        self, model: Any, ids: Tensor, following: Tensor, cache: Any, forward: Callable[[Any], Tensor]
    ) -> Tensor:
        """See `bench.measure.kept_prompts.KeptPrompts.followed`."""

    def not_filled(self, cache: Any, why: str) -> None:
        """See `bench.measure.kept_prompts.KeptPrompts.not_filled`."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure.

    Attributes:
        name: name or folder it was loaded from.
        model: called as `model(input_ids=, cache=, use_cache=True, logits_to_keep=)`, the cache by the name that
            `hf.versions` found.
        tokenizer: called as transformers' tokenizers are; None where no task needs text.
        make_cache: (model, plan in one line) -> cache; None: `kvtailor.cache_for`.
        whole_budget: the plans that a plan becomes where it may keep and read everything, see `plans_at_whole_budget`;
            None: kvtailor's own where `make_cache` is kvtailor's; else no plan is tried.
        loadable: another process can load the same model by `name`, dtype and device.
        trained: its answers mean something; the bench asks an untrained model for costs alone.
        elsewhere: makes the same subject in another process; it can be pickled. None: nothing can.
        stock_attention: the attention implementation under which the model's own cache is measured; found by itself.
        kept: fills caches with prompts that have gone through the model before, see `bench.measure.kept_prompts`; None:
            each cache reads its prompt itself.
    """

    name: str
    model: Any
    tokenizer: Any = None
    make_cache: Callable[[Any, str], Any] | None = None
    whole_budget: Callable[[str], tuple[str, ...]] | None = None
    loadable: bool = False
    trained: bool = True
    elsewhere: Callable[[], Subject] | None = None
    stock_attention: str | None = None
    kept: Prefills | None = None

    def __post_init__(self) -> None:
        if self.stock_attention is None and hasattr(self.model, "set_attn_implementation"):
            object.__setattr__(self, "stock_attention", self._config()._attn_implementation)

    @classmethod
    def load(
        cls, name: str, *, dtype: str | None = None, cache_dtype: str | None = None, device: str | None = None
    ) -> Subject:
        """The model of a name or folder, see `hf.model.loading.load`.

        Raises:
            KvtailorError: there is no such model, or its dtype or device is not known.
        """
        from kvtailor.hf.model.config import RANDOM_SHAPES
        from kvtailor.hf.model.loading import load

        wanted = {each: _dtype(given) for each, given in (("dtype", dtype), ("cache_dtype", cache_dtype))}
        try:
            model, tokenizer = load(name, **wanted, device=device, processes=started())
        except (OSError, RuntimeError) as error:
            raise KvtailorError(str(error)) from error
        if (stored := stored_dtype(model)) is not None:
            # Another machine may have chosen otherwise.
            dtype, cache_dtype = "float32", str(stored).removeprefix("torch.")
        return cls(
            name=name,
            model=model,
            tokenizer=tokenizer,
            loadable=True,
            trained=name not in RANDOM_SHAPES,
            elsewhere=partial(cls.load, name, dtype=dtype, cache_dtype=cache_dtype, device=device),
        )

    @classmethod
    def of(cls, model: Any, tokenizer: Any, asked: str) -> Subject:
        """The subject of what a caller gave: a model with its tokenizer, the name or folder of one, or a subject.

        Args:
            model: see above.
            tokenizer: of a model that is given as an object.
            asked: what the caller asked for, such as "a fit", for the sentence of an error.

        Raises:
            KvtailorError: there is no such model, or a model object came without its tokenizer.
        """
        if isinstance(model, cls):
            return model
        if isinstance(model, str | Path):
            return cls.load(str(model))
        if tokenizer is None:
            raise KvtailorError(f"asked for {asked} of a model object without its tokenizer: give tokenizer=")
        name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
        return cls(name=name, model=model, tokenizer=tokenizer)

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return torch.device(getattr(self.model, "device", "cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, in which the model computes."""
        return getattr(self.model, "dtype", torch.float32)

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype in which caches hold keys and values, see `kvtailor.cache_for`."""
        return dtype_of_caches(self.model)

    @property
    def positions(self) -> int | None:
        """Most tokens that the model was made for; None where its config does not say."""
        found = getattr(self._config(), "max_position_embeddings", None)
        return int(found) if found else None

    def answer_for(self, asked: str) -> None:
        """Nothing for a trained model.

        Raises:
            KvtailorError: its weights are random, so that what `asked` would judge means nothing.
        """
        if not self.trained:
            raise KvtailorError(
                f"asked for {asked} on {self.name}, whose weights are random: its answers mean nothing. Give a trained "
                "model, or ask for what a plan costs: speed, memory, capacity"
            )

    def weights(self) -> tuple[int, int, int] | None:
        """Parameters, bytes of their unique storages, and the bytes that one token must read (embedding rows apart)."""
        if not hasattr(self.model, "get_input_embeddings"):
            return None
        parameters = list(self.model.parameters())
        # Of a model that several processes share, the bytes are what all of them hold and read.
        of_all = started().sum
        total = of_all(storage_bytes([local_part(each) for each in parameters]))
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        # Of a table that is only looked up, a token reads one row; one that is tied to the head is read whole.
        table = local_part(embedding.weight)
        tied = head is not None and local_part(head.weight).data_ptr() == table.data_ptr()
        return sum(p.numel() for p in parameters), total, total if tied else total - of_all(storage_bytes([table]))

    def check_finite(self) -> None:
        """Feed a few tokens to the model's own cache.

        Raises:
            KvtailorError: its logits are NaN, so that no number of any plan means anything.
        """
        rows = token_rows(self.model)
        if rows is None:
            return
        logits, _ = self.forward(torch.arange(min(8, rows))[None], self.new_cache(OWN))
        if bool(logits.isnan().any()):
            raise KvtailorError(self.not_a_number("of its first tokens"))

    def not_a_number(self, what: str) -> str:
        """Return the sentence on a model whose own logits are NaN.

        Args:
            what: whose logits they are, such as "of a text".
        """
        return not_a_number(self.model, what)

    def fingerprint(self) -> str | None:
        """See `hf.model.fingerprint.fingerprint`; None for a model without parameters.

        It is taken anew at each call, since weights may have been changed in place. Weights that cannot be read have
        one that this process alone has, so that their records stand for no others.
        """
        found = fingerprint(self.model)
        return found or (_UNREAD if hasattr(self.model, "get_input_embeddings") else None)

    def provenance(self, contestant: Contestant) -> tuple[Calibrated, ...]:
        """What a plan's calibration files for this model were made from, and what the contestant says itself.

        A plan that cannot have its calibrations says so when its cache is made.
        """
        of_files = (made for file in self._calibrations(contestant) for made in read_back(file.metadata))
        return tuple(dict.fromkeys((*contestant.calibration, *of_files)))

    def verdicts(self, contestant: Contestant) -> tuple[str, ...]:
        """What a plan's calibration files for this model say of their own worth, a sentence each."""
        told = ((file, file.facts.get("verdict")) for file in self._calibrations(contestant))
        return tuple(dict.fromkeys(f"{file.kind} of {file.model}: {said}." for file, said in told if said))

    def _calibrations(self, contestant: Contestant) -> list[Calibration]:
        """The files that a plan reads on this model; none where it cannot have them."""
        if contestant.plan is None or contestant.missing or self.make_cache is not None:
            return []
        from kvtailor.hf.model.calibrated import calibrations_of

        try:
            found = calibrations_of(contestant.plan, self.model)
        except KvtailorError:
            return []
        return [file for files in found.values() for file in files]

    def new_cache(self, contestant: Contestant) -> Any:
        """Return an empty cache; None stands for the model's own, under the model's own attention.

        `OWN` is what transformers makes. The others round what it holds as caches of ours do.

        Raises:
            KvtailorError: the model cannot have it, or the plan was never parsed.
        """
        if contestant.text is not None:
            if self.make_cache is not None:
                return self.make_cache(self.model, contestant.text)
            if contestant.plan is None:
                raise KvtailorError(
                    f"asked for a cache of {contestant.label!r}, which holds no parsed plan: make it by Contestant.of"
                )
            return _cache_for(self.model, contestant.plan)
        if self.stock_attention is not None:
            wanted = self.stock_attention
            if contestant is OTHER_ATTENTION:
                wanted = "sdpa" if wanted == "eager" else "eager"
            if self._config()._attn_implementation != wanted:
                self.model.set_attn_implementation(wanted)
        if contestant is OWN:
            return None
        from kvtailor.hf.run.stock import rounded_cache

        return rounded_cache(self.model)

    def at_whole_budget(self, contestant: Contestant) -> tuple[Contestant, ...]:
        """Return what `whole_budget` makes of a plan; nothing for the model's own cache."""
        if contestant.text is None:
            return ()
        label = f"{contestant.label} at its whole budget"
        if self.whole_budget is not None:
            lines = self.whole_budget(contestant.text)
            return tuple(Contestant(label=label, text=line, hash=f"whole {line}") for line in lines)
        if self.make_cache is not None or contestant.plan is None:
            return ()
        plans = at_whole_budget(contestant.plan)
        return tuple(Contestant(label=label, text=str(each), hash=f"whole {each}", plan=each) for each in plans)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Any, *, last_only: bool = False, ends: bool = False) -> tuple[Tensor, Any]:
        """Feeds ids (b, t) after what the cache has seen.

        Args:
            ids: of the tokens.
            cache: None: a new one of the model's own.
            last_only: the last token's logits alone.
            ends: the cache is not used afterwards, so that its plan need not compress these tokens.

        Returns:
            logits (b, t, V), or (b, 1, V) with `last_only`, and the cache (a new one where it was None).
        """
        given = hand_cache(cache) if cache is not None else {}
        if ends and _is_ours(cache):
            cache.engine.switch.stop()
        out = self.model(input_ids=ids.to(self.device), use_cache=True, logits_to_keep=1 if last_only else 0, **given)
        return out.logits, read_cache(out)

    @torch.inference_mode()
    def prefill(self, ids: Tensor, cache: Any, *, last_only: bool = False) -> tuple[Tensor, Any]:
        """`forward` for a prompt (b, n) on an empty cache: read twice where the plan wants that.

        With `kept` the cache is filled from the prompt as it has gone through the model before, where it can be.
        """
        twice = _reads_twice(cache)
        instruction = None
        if twice:
            from kvtailor.hf.run.prefill import instruction_of

            instruction = instruction_of(self.tokenizer)
        if self.kept is not None and cache is not None:
            here = ids.to(self.device)
            logits = self.kept.filled(self.model, here, cache, last_only=last_only, instruction=instruction)
            if logits is not None:
                return logits, cache
        if not twice:
            return self.forward(ids, cache, last_only=last_only)
        from kvtailor.hf.run.prefill import read

        return read(self.model, cache, ids, instruction=instruction, last_only=last_only), cache

    @torch.inference_mode()
    def follow(self, ids: Tensor, following: Tensor, cache: Any) -> Tensor:
        """Return logits (1, t, V) of tokens behind a prompt that a cache has seen; it is not to be used afterwards.

        With `kept`, layers that would give what they gave on the uncompressed cache are not computed again.

        Args:
            ids: (1, n) of the prompt.
            following: (1, t) of the tokens.
            cache: of one plan.
        """

        def forward(given: Any) -> Tensor:
            return self.forward(following, given, ends=True)[0]

        if self.kept is None:
            return forward(cache)
        return self.kept.followed(self.model, ids.to(self.device), following, cache, forward)

    def decode(self, following: Tensor, cache: Any, tokens: int, *, graphs: bool = False) -> Any:
        """Feeds so many greedy tokens, of which `following` (b, 1) are the first, and waits for the device.

        Args:
            graphs: by steps that are replayed, see `hf.graphs.replay`; not for the model's own cache.

        Returns:
            the cache (a new one where it was None).
        """
        if graphs:
            from kvtailor.hf.graphs.replaying import greedy

            greedy(self.model, cache, following, tokens)
        else:
            for _ in range(tokens):
                logits, cache = self.forward(following, cache, last_only=True)
                following = logits[:, -1:].argmax(-1)
        self.wait()
        return cache

    def begin(self, ids: Tensor, cache: Any, mask: Tensor | None = None) -> None:
        """Before the model's own `generate` with a prompt (b, n) and an empty cache, see `hf.run.prefill.begin`."""
        from kvtailor.hf.run.prefill import begin

        if self.kept is not None:
            self.kept.not_filled(cache, "transformers' own generate() feeds the prompt")
        begin(self.model, cache, ids, mask, tokenizer=self.tokenizer)

    def wait(self) -> None:
        """Returns when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prompt(self, text: str) -> Tensor:
        """(n,) int64 ids of a prompt, with the special tokens that the tokenizer puts before one."""
        return torch.tensor(self._start() + self._ids(text), dtype=torch.int64)

    def message(self, text: str, *, system: str | None = None, template: Mapping[str, Any] | None = None) -> Tensor:
        """(n,) int64 ids of one message of the user in the tokenizer's chat template; see `hf.run.chat.Prompt`.

        Raises:
            KvtailorError: there is no chat template, or it cannot write what was asked.
        """
        from kvtailor.hf.run.chat import Prompt

        prompt = Prompt(self.tokenizer, system=system, template=dict(template or {}))
        if not prompt.templated:
            raise KvtailorError(
                f"asked for a chat with {self.name}, whose tokenizer has no chat template: leave --chat out, or give "
                "the chat model of this name (often with -Instruct or -it at its end)"
            )
        return torch.tensor(self._known(prompt.whole(text).tolist()), dtype=torch.int64)

    def count(self, text: str) -> int:
        """Tokens of a text, special ones apart."""
        return len(self._ids(text))

    def tokens(self, text: str) -> Tokens:
        """The tokens of a long text, special ones apart."""
        if getattr(self.tokenizer, "is_fast", False):
            coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            ends = _byte_ends(text, [end for _, end in coded["offset_mapping"]])
            return Tokens(torch.tensor(self._known(coded["input_ids"])), text, ends)
        return Tokens(torch.tensor(self._ids(text)), text, None)

    def start(self) -> Tensor:
        """(n,) int64 special tokens that begin a prompt; often none or one."""
        return torch.tensor(self._start(), dtype=torch.int64)

    def text(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens left out."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def _config(self) -> Any:
        config: Any = getattr(self.model, "config", None)
        return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config

    def _ids(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise KvtailorError(f"asked for tokens of a text, but {self.name} has no tokenizer: give one")
        check_characters(text)
        return self._known(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _start(self) -> list[int]:
        from kvtailor.hf.run.chat import start_ids

        return self._known(start_ids(self.tokenizer))

    def _known(self, ids: Sequence[int]) -> list[int]:
        """The ids, of which the model has a row for each."""
        check_ids(self.model, torch.tensor(ids, dtype=torch.int64))
        return list(ids)


def _dtype(name: str | None) -> torch.dtype | None:
    """The dtype of a name that a user gave."""
    if name is not None and name not in _DTYPES:
        raise KvtailorError(f"asked for dtype {name!r}: give float32, bfloat16 or float16")
    return None if name is None else _DTYPES[name]


def _is_ours(cache: Any) -> bool:
    from kvtailor.hf.cache import KvCache

    return isinstance(cache, KvCache)


def _reads_twice(cache: Any) -> bool:
    return _is_ours(cache) and bool(cache.engine.needs.reconstruction)


def _cache_for(model: Any, plan: Plan) -> Any:
    from kvtailor.hf.make_cache import cache_for

    return cache_for(model, plan)


def _byte_ends(text: str, ends: Sequence[int]) -> tuple[int, ...]:
    found, at, size = [], 0, 0
    for end in ends:
        size += len(text[at:end].encode()) if end > at else 0
        at = max(at, end)
        found.append(size)
    return tuple(found)


_ALL_TOKENS = 2**40


def plans_at_whole_budget(text: str) -> tuple[str, ...]:
    """Return what `at_whole_budget` makes of a plan in one line, each in one line.

    Raises:
        PlanError: `text` is no plan.
    """
    return tuple(str(each) for each in at_whole_budget(Plan.parse(text)))


def at_whole_budget(plan: Plan) -> tuple[Plan, ...]:
    """Return what a plan becomes where it may keep and read everything; nothing where it does so anyway.

    Its way to evict (score, allocate, select) is tried at keep=1.0 without its codec, which may lose something by
    itself, and without a selector that drops tokens of its own accord. A way to read that has a budget in tokens is
    tried with one that no text fills, on its own codec, which it needs for its pages; any other goes with the way to
    evict.
    """
    found = []
    if plan.evicts:
        whole = Plan(score=plan.score, allocate=plan.allocate, slack=plan.slack, keep=1.0)
        whole = replace(whole, select=plan.select) if plan.select.exact else whole
        reads = plan.attend.needs_codec is None and not plan.attend.has_token_budget
        found.append(replace(whole, attend=plan.attend) if reads else whole)
    attend: Any = plan.attend
    if plan.attend.has_token_budget:
        found.append(Plan(encode=plan.encode, attend=replace(attend, tokens=_ALL_TOKENS)))
    return tuple(found)
