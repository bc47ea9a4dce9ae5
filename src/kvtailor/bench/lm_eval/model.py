"""The model `kvtailor` of the lm-evaluation-harness: every request is answered from a compressed cache.

It derives from the harness's own `hf` model, so that texts are cut into tokens, truncated, templated and stopped in
exactly its way. What `hf` computes in one forward over context and continuation is replaced here:

- *loglikelihood*: the context is prefilled and compressed under the plan; its last logits score the first token of the
  continuation, and the compressed cache all others. Requests with the same context share one prefill, each going on
  from its own copy of the cache.
- *loglikelihood_rolling*: a window of the text is cut in the middle. The first half is the prefill, scored from its own
  logits; the second half is scored on what the compressed cache then holds.
- *generate_until*: the model's own `generate` with an empty cache of the plan for every batch.

Importing this file needs lm_eval, and puts the model into its registry.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm

from kvtailor.bench.checks import check_calibration
from kvtailor.bench.contestant import Contestant
from kvtailor.bench.lm_eval.held import AfterPrefill, HeldSummary
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError, suggest
from kvtailor.hf.model.config import base_of, source_of
from kvtailor.hf.versions import hand_cache
from kvtailor.presets import FULL

__all__ = ["HarnessModel"]

_PASSED_ON = (
    "add_bos_token",
    "chat_template_args",
    "enable_thinking",
    "max_length",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
)
_OWN = ("pretrained", "plan", "dtype", "device", "batch_size", "chunk", "outside")


@register_model("kvtailor")
class HarnessModel(HFLM):
    """A causal language model whose context is compressed by a plan.

    Attributes:
        subject: the model.
        contestant: the plan.
        chunk: so many tokens of a continuation are fed at a time, so that eviction while decoding acts between them;
            None: all at once.
        outside: so many tokens at the end of a context of a log-likelihood are not prefilled but fed afterwards, on
            the compressed cache. With 0 a continuation of one token is scored from the prefill alone, which no plan
            changes.
        held: what the caches held; a new `HeldSummary` starts a new count.
        advance: called with the number of requests that have just been answered.
        quiet: no progress bars of the harness.
    """

    def __init__(
        self,
        pretrained: str | Subject = "demo",
        plan: str | Contestant = FULL,
        *,
        dtype: str | None = None,
        device: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        chunk: int | None = None,
        outside: int = 0,
        **settings: Any,
    ):
        """Loads the model, unless one is given.

        Args:
            pretrained: "demo", "demo-draft", a folder, a hub name, or a `Subject`.
            plan: one line, or the path of a TOML file.
            dtype: of the weights, such as "bfloat16"; None or "auto": that of the checkpoint.
            device: such as "cuda:0"; None: the first accelerator if there is one, as `hf` does.
            batch_size: of `generate_until`, "auto" is 1; contexts of log-likelihoods are prefilled one at a time.
            max_batch_size: for the harness, which always gives it; has no effect.
            chunk: see the class.
            outside: see the class.
            **settings: add_bos_token, chat_template_args, enable_thinking, max_length, prefix_token_id, softmax_dtype,
                think_end_token, truncation: as the harness's `hf` takes them.

        Raises:
            KvtailorError: an unknown setting, a plan with faults, or a model that cannot be loaded.
        """
        for name in settings:
            if name not in _PASSED_ON:
                raise KvtailorError(
                    f"the model 'kvtailor' has no argument {name.strip()!r}{suggest(name.strip(), _PASSED_ON + _OWN)} "
                    "(a plan with a comma outside of brackets needs quotes inside --model_args: "
                    "plan='snapkv @ keep=0.25, slack=0.1')"
                )
        if str(batch_size).startswith("auto"):
            # The harness would look for the largest, by forwards that read no cache of ours.
            logging.getLogger("lm_eval.kvtailor").warning("batch_size=%s is 1 here: give a number for more", batch_size)
            batch_size = 1
        try:
            batch = int(batch_size or 1)
        except ValueError as error:
            raise KvtailorError(
                f"asked for batch_size={batch_size!r}: 'kvtailor' takes a number, or auto, which is 1"
            ) from error
        if (chunk is not None and chunk < 1) or outside < 0:
            raise KvtailorError(f"asked for chunk={chunk}, outside={outside}: give at least 1 and 0 tokens")
        contestant = plan if isinstance(plan, Contestant) else Contestant.named(plan)
        if isinstance(pretrained, Subject):
            self.subject, tokenizer = pretrained, pretrained.tokenizer
        else:
            self.subject = Subject.load(pretrained, dtype=None if dtype == "auto" else dtype, device=_device(device))
            # By name, so that the harness makes it with the settings that it would give to `hf`; not from a GGUF file
            # or of an adapter, where it does not look for one.
            source = source_of(pretrained)
            alone = base_of(source) == source and not Path(source).is_file()
            tokenizer = source if alone else self.subject.tokenizer
        self.subject.answer_for("the lm-evaluation-harness")
        self.chunk, self.outside, self.held = chunk, outside, HeldSummary()
        self.contestant = replace(contestant, calibration=self.subject.provenance(contestant))
        self.advance: Callable[[int], None] = lambda requests: None
        self.quiet = False
        super().__init__(pretrained=self.subject.model, tokenizer=tokenizer, batch_size=batch, **settings)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See `lm_eval.api.model.LM`."""
        self._refuse_calibrated(requests)
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.quiet)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See `lm_eval.api.model.LM`."""
        self._refuse_calibrated(requests)
        found: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm or self.quiet)
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See `lm_eval.api.model.LM`."""
        self._refuse_calibrated(requests)
        found: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm or self.quiet)
        return found

    def _refuse_calibrated(self, requests: list[Any]) -> None:
        if self.contestant.calibration:
            asked = [text for request in requests for text in map(str, request.args)]
            check_calibration(self.contestant.calibration, asked, "the harness's requests")

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and mask (b, n) of texts, as `hf` makes them; counts those that lose their beginning."""
        ids, mask = super().tok_batch_encode(strings, padding_side, None, truncation)
        if left_truncate_len:
            self.held.truncated += int((mask.sum(1) > left_truncate_len).sum())
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes beside its results: the plan, and what the caches held, which is also logged."""
        logging.getLogger("lm_eval.kvtailor").warning("kvtailor, plan %s: %s", self.contestant.label, self.held)
        return {
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": self.model.dtype,
            "model_revision": self.revision,
            "plan": self.contestant.text,
            "plan_hash": self.contestant.hash,
            "truncated": self.held.truncated,
            "contexts": self.held.contexts,
            "contexts_compressed": self.held.compressed,
            "contexts_read_compressed": self.held.read,
            "heaviest_cache": self.held.heaviest,
        }

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities, and whether greedy decoding gives it, for each (texts, context, continuation).

        The texts of a window of a rolling log-likelihood are None.
        """
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        shared: dict[tuple[object, ...], list[int]] = {}
        for index, (texts, _, _) in enumerate(requests):
            key = (index,) if texts is None else ("context", *cut[index][0])
            shared.setdefault(key, []).append(index)
        answers: dict[int, tuple[float, bool]] = {}
        quiet = disable_tqdm or self.quiet or override_bs is not None
        with tqdm(total=len(requests), disable=quiet, desc=f"kvtailor: {self.contestant.label}") as bar:
            for indices in shared.values():
                first = indices[0]
                if requests[first][0] is None:
                    found = [self._score_window(*cut[first])]
                else:
                    found = self._score(cut[first][0], [cut[index][1] for index in indices])
                for index, answer in zip(indices, found, strict=True):
                    answers[index] = answer
                    if (texts := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answer)
                bar.update(len(indices))
                self.advance(len(indices))
        return [answers[index] for index in range(len(requests))]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], list[int]]:
        """Context and continuation, of which the model's positions hold all but the last token: cut as `hf` cuts."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise KvtailorError(
                f"asked to score {len(continuation)} tokens after {len(context)}: there must be at least one of each, "
                f"and the model takes {self.max_length}"
            )
        whole = [*context, *continuation][-(self.max_length + 1) :]
        self.held.truncated += len(whole) < len(context) + len(continuation)
        return whole[: -len(continuation)], whole[-len(continuation) :]

    def _score(self, context: list[int], continuations: Sequence[list[int]]) -> list[tuple[float, bool]]:
        """Answers for continuations of one context, which is prefilled once."""
        inside = max(1, len(context) - self.outside)
        logits, cache = self._prefill(context[:inside], last_only=True)
        smaller = self.held.add(cache)
        late = self._feed(context[inside:], cache)
        first = late[-1][-1:] if late else logits
        found = []
        for index, continuation in enumerate(continuations):
            rows = [first]
            if len(continuation) > 1:
                mine = cache if index + 1 == len(continuations) else copy.deepcopy(cache)
                rows += self._feed(continuation[:-1], mine)
            found.append(self._answer(rows, continuation))
        self.held.scored += sum(map(len, continuations))
        self.held.read += smaller and (bool(late) or any(len(each) > 1 for each in continuations))
        return found

    def _score_window(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Answer for a window of a text, of which the first half (at least the context) is the prefill."""
        fed = context + continuation[:-1]
        half = max(len(context), (len(fed) + 1) // 2)
        logits, cache = self._prefill(fed[:half])
        smaller = self.held.add(cache)
        self.held.scored += len(continuation)
        self.held.read += smaller and half < len(fed)
        return self._answer([logits[len(context) - 1 :], *self._feed(fed[half:], cache)], continuation)

    def _prefill(self, ids: list[int], *, last_only: bool = False) -> tuple[Tensor, Any]:
        """Logits (t, V), or (1, V), of tokens that become a compressed cache, and the cache."""
        cache = self.subject.new_cache(self.contestant)
        logits, cache = self.subject.prefill(torch.tensor([ids]), cache, last_only=last_only)
        return logits[0], cache

    def _feed(self, ids: list[int], cache: Any) -> list[Tensor]:
        """Logits (t, V) of tokens after what the cache has seen, for each piece that is fed at once."""
        step = self.chunk or max(1, len(ids))
        return [self.subject.forward(piece[None], cache)[0][0] for piece in torch.tensor(ids).split(step) if ids]

    def _answer(self, rows: Sequence[Tensor], continuation: list[int]) -> tuple[float, bool]:
        scores = log_softmax(torch.cat(list(rows)), dim=-1, dtype=self.softmax_dtype)
        targets = torch.tensor(continuation, device=scores.device)
        greedy = bool((scores.argmax(-1) == targets).all())
        return float(scores.gather(1, targets[:, None])[:, 0].sum()), greedy

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        """Tokens (b, n + t) of prompts (b, n), padded on the left, and what follows them."""
        if settings.get("num_beams", 1) != 1:
            raise KvtailorError(f"asked for num_beams={settings['num_beams']}: 'kvtailor' generates without beams")
        cache = self.subject.new_cache(self.contestant)
        if cache is not None:
            self.subject.begin(context, cache, settings.get("attention_mask"))
            settings |= {**hand_cache(cache), "streamer": AfterPrefill(cache, self.held)}
        made: Tensor = super()._model_generate(context=context, max_length=max_length, stop=stop, **settings)
        self.advance(context.shape[0])
        return made

    def _model_call(self, *args: Any, **kwargs: Any) -> Tensor:
        raise KvtailorError("the harness asked for a forward without a cache, where no plan can act")


def _device(asked: str | None) -> str:
    """The device for a model. The harness's command line takes "cuda:0" by default."""
    if asked is not None and not asked.startswith("cuda"):
        return asked
    if torch.cuda.is_available():
        return asked or "cuda"
    logging.getLogger("lm_eval.kvtailor").info("There is no CUDA device: kvtailor runs on the CPU.")
    return "cpu"
