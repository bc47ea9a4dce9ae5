"""Speculation: decoding with a draft beside the same plan's plain decoding, and beside the model's own cache.

A round has its own prompt and its own random state. In it every plan decodes plainly and then with the draft, and the
model decodes with its own cache; whose turn it is first changes from round to round. Prompts are read before the clock
starts, with all that compressing them costs; so what is timed is the tokens after the first. A sample during which
other programs took processor time is left out of times and speed-ups, and rounds are added for it.

Timings: `generation` (seconds with the draft), `plain` (seconds without, the same plan). Values, by round:
`generation`, `plain`, `disturbed` (1: either of both was), `acceptance`, `emitted_per_verification`, `identical` (1: a
greedy draft changed no token); and, of undisturbed rounds alone, `speed_up` (plain over generation) and `speed_up_own`
(the model's own cache over generation).

Metrics, None where a part is not known:
`tokens_per_second`, `plain_tokens_per_second`: by the medians;
`acceptance`: accepted of proposed, over all rounds, counted to the first rejection of each verification;
`emitted_per_verification`: between 1 and gamma + 1;
`inner_acceptance`: what the middle cache accepted of the draft model's tokens, in a hierarchy;
`speed_up`, `speed_up_own`: geometric means of the values;
`identical`: share of rounds without a changed token, greedy only (in 16 bits a tie may fall the other way);
`device_bytes`, `plain_device_bytes`: what all caches hold on the device at the end, drafts' included, and the target's
alone; `draft_weight_bytes`: of a draft model;
`resident_hits`, `bytes_read`: with a draft, share of looks at a layer that found it on the device, and what came back
from a tier.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge

from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.measure.turns import rounds_in_turns
from kvtailor.bench.tasks.contract import AllAtOnce, Sample, Scored, Turns, hash_of
from kvtailor.bench.tasks.settings import (
    CONTEXTS,
    NEW_TOKENS,
    ROUNDS,
    STATE,
    STATES_APART,
    Column,
    Count,
    Metric,
    Option,
    Shown,
    Whole,
    setting,
)
from kvtailor.errors import ArgumentError, KvtailorError

if TYPE_CHECKING:
    from torch import Tensor

    from kvtailor.bench.measure.draft_rounds import DraftRounds
    from kvtailor.bench.measure.machine import Neighbours
    from kvtailor.bench.subject import Subject
    from kvtailor.hf.run.generate import Generated
    from kvtailor.plan import Plan

__all__ = ["Speculation"]


@dataclass(frozen=True, kw_only=True)
class Speculation(AllAtOnce):
    """Interleaved rounds; see the module.

    Attributes:
        text: what the prompts' tokens come from; round i reads its own piece, from the start again where it ends.
        source: its name.
        context: tokens of the prompt.
        tokens: tokens decoded, the first included.
        rounds: undisturbed random states wanted of each plan.
        warmup: rounds before the first that counts.
        patience: where samples are disturbed, rounds are added until there are so many times `rounds`.
        draft, draft_plan, middle_plan, gamma, inner_gamma, refresh: see `kvtailor.generate`.
        min_gain: the same; None, as here, always speculates, so that a draft which does not pay is seen.
        temperature: 0: greedy.
        top_p: see `kvtailor.generate`.
        state: random state of round 0.
    """

    name: ClassVar[str] = "speculation"
    one_process: ClassVar[bool] = True
    version: ClassVar[int] = 1
    order: ClassVar[int] = 7
    reads_text: ClassVar[bool] = True
    own_cache: ClassVar[bool] = True
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(name="tokens_per_second", unit="tokens per second", higher_is_better=True),
        Metric(name="plain_tokens_per_second", unit="tokens per second", higher_is_better=True),
        Metric(name="acceptance", unit="share", higher_is_better=True),
        Metric(name="emitted_per_verification", unit="tokens", higher_is_better=True),
        Metric(name="inner_acceptance", unit="share", higher_is_better=True),
        Metric(name="speed_up", unit="ratio", higher_is_better=True, meaning="over the same plan without a draft"),
        Metric(name="speed_up_own", unit="ratio", higher_is_better=True, meaning="over the model's own cache"),
        Metric(name="identical", unit="share", higher_is_better=True, meaning="rounds without a changed token"),
        Metric(name="device_bytes", unit="bytes", higher_is_better=False),
        Metric(name="plain_device_bytes", unit="bytes", higher_is_better=False),
        Metric(name="draft_weight_bytes", unit="bytes", higher_is_better=False),
        Metric(name="resident_hits", unit="share", higher_is_better=True),
        Metric(name="bytes_read", unit="bytes", higher_is_better=False),
    )
    shown: ClassVar[Shown] = Shown(
        terminal=(
            Column("accepted", "acceptance", 0, 100, unit=" %", interval=True),
            Column("emitted", "emitted_per_verification", 2, interval=True),
            Column("speed-up", "speed_up", 2, unit="×", interval=True),
        ),
        title="Speculation",
        note=(
            "With a draft beside the same plan's plain decoding, interleaved; intervals over random states. "
            "Acceptance: of judged tokens. On the device: all caches that are at work, drafts' included. "
            "Same text: greedy rounds in which no token differs."
        ),
        own=(
            Column("on the device", "device_bytes", form="bytes"),
            Column("plain, on the device", "plain_device_bytes", form="bytes"),
            Column("acceptance, %", "acceptance", 2, 100, interval=True, ends=True),
            Column("emitted per verification", "emitted_per_verification", 2, interval=True, ends=True),
            Column("inner acceptance, %", "inner_acceptance", scale=100),
            Column("tokens/s", "tokens_per_second"),
            Column("plain tokens/s", "plain_tokens_per_second"),
            Column("speed-up", "speed_up", 2, interval=True, ends=True),
            Column("speed-up over the model's own cache", "speed_up_own", 2, interval=True, ends=True),
            Column("same text, %", "identical", scale=100),
        ),
    )
    values: ClassVar[tuple[str, ...]] = (
        "generation",
        "plain",
        "acceptance",
        "emitted_per_verification",
        "identical",
        "speed_up",
        "speed_up_own",
    )
    timings: ClassVar[tuple[str, ...]] = ("generation", "plain")
    text: str
    source: str
    context: Count = setting(512, option=CONTEXTS, each=True, counts_tokens=True)
    tokens: Annotated[int, Ge(2)] = setting(64, option=NEW_TOKENS, each=True, counts_tokens=True)
    rounds: Count = setting(5, option=ROUNDS)
    warmup: Whole = setting(1)
    patience: Count = setting(2)
    draft: str | None = setting(
        None, option=Option(flag="--draft", help="For speculation: a draft model, by name or folder.")
    )
    draft_plan: str | None = setting(
        None,
        option=Option(
            flag="--draft-plan",
            help="For speculation: plan of the draft's cache; alone, the same weights draft.",
        ),
    )
    middle_plan: str | None = setting(
        None,
        option=Option(
            flag="--middle-plan",
            help="For speculation: plan of the cache between a draft model and the plan's own.",
        ),
    )
    gamma: Count | str = setting(4, option=Option(flag="--gamma", default=4, help="Tokens drafted at once."))
    inner_gamma: Count = setting(2)
    refresh: Count | None = setting(None)
    min_gain: float | None = setting(None)
    temperature: Annotated[float, Ge(0)] = setting(0.0)
    top_p: float = setting(1.0)
    state: Whole = setting(0, option=STATE, times=STATES_APART)

    def __post_init__(self) -> None:
        from kvtailor.plan import Plan

        super().__post_init__()
        if self.draft is None and self.draft_plan is None:
            raise ArgumentError(
                "there is no draft: give draft (a model) or draft_plan (the same weights over another cache)"
            )
        for name in ("draft_plan", "middle_plan"):
            if getattr(self, name) is not None:
                try:
                    Plan.parse(getattr(self, name))
                except KvtailorError as error:
                    raise ArgumentError(f"{name}: {error}") from error

    def steps(self) -> int:
        return self.patience * self.rounds + self.warmup

    def samples(self, subject: Subject, contestants: Sequence[Contestant]) -> Iterator[Sample]:
        if subject.make_cache is not None:
            raise KvtailorError("asked for speculation, which drives kvtailor's own caches, on a model with others")
        prompts = self._prompts(subject)
        names = (
            "context",
            "tokens",
            "rounds",
            "draft",
            "draft_plan",
            "middle_plan",
            "gamma",
            "inner_gamma",
            "refresh",
            "min_gain",
            "temperature",
            "top_p",
        )
        yield Sample(
            point={name: getattr(self, name) for name in names},
            text=self.source,
            text_hash=hash_of(prompts),
            state=self.state,
            steps=self.steps(),
            data=prompts,
        )

    def score_all(
        self, subject: Subject, contestants: Sequence[Contestant], sample: Sample, turns: Turns
    ) -> Mapping[str, Scored]:
        from kvtailor.bench.measure.draft_rounds import DraftRounds
        from kvtailor.bench.measure.machine import Neighbours
        from kvtailor.hf.model.loading import load

        small = None
        if self.draft is not None:
            small, _ = load(
                self.draft, dtype=subject.dtype, cache_dtype=subject.cache_dtype, device=str(subject.device)
            )
        sides = {contestant.hash: DraftRounds() for contestant in contestants}
        meter = Neighbours()

        def enough(contestant: Contestant) -> bool:
            return not turns.live(contestant) or sides[contestant.hash].clean >= self.rounds

        for index, contestant in rounds_in_turns(
            contestants, self.rounds, warmup=self.warmup, patience=self.patience, enough=enough
        ):
            with turns(contestant) as going:
                if going:
                    prompt, side = sample.data[index + self.warmup], sides[contestant.hash]
                    self._sample(subject, contestant, small, prompt, meter, side, index)
        # Where the model's own cache failed before, nothing is told over it.
        own = sides.get(OWN.hash, DraftRounds())
        return {
            contestant.hash: self._scored(sides[contestant.hash], own, small, meter)
            for contestant in contestants
            if turns.live(contestant)
        }

    def _prompts(self, subject: Subject) -> Tensor:
        """(all rounds, context) token ids, warm-up first."""
        import torch

        start, ids = subject.start(), subject.tokens(self.text).ids
        if not ids.numel():
            raise KvtailorError(f"asked for prompts from {self.source}, which is empty: give a text")
        rest = max(0, self.context - start.numel())
        count = self.warmup + self.patience * self.rounds
        at = (torch.arange(count)[:, None] * rest + torch.arange(rest)) % ids.numel()
        return torch.cat([start.expand(count, -1), ids[at]], 1)[:, : self.context]

    def _sample(
        self,
        subject: Subject,
        contestant: Contestant,
        small: Any,
        prompt: Tensor,
        meter: Neighbours,
        side: DraftRounds,
        index: int,
    ) -> None:
        if contestant.plan is None:
            # The model's own cache: there are no others, see `samples`.
            seconds, disturbed = self._own(subject, contestant, prompt, meter)
            if index >= 0:
                side.plain.append(seconds)
                side.disturbed.append(disturbed)
            return
        drafts = {
            "draft": small,
            "draft_plan": self.draft_plan,
            "middle_plan": self.middle_plan,
            "gamma": self.gamma,
            "inner_gamma": self.inner_gamma,
            "refresh": self.refresh,
        }
        both: dict[bool, Generated] = {}
        disturbed = False
        # Either goes first in every second round.
        for drafting in (False, True) if index % 2 else (True, False):
            meter.start()
            given = drafts if drafting else {}
            both[drafting] = self._generated(subject, contestant.plan, prompt, given, self.state + index)
            disturbed |= meter.disturbed()
        if index < 0:
            return
        plain, drafted = both[False], both[True]
        side.add(plain, drafted, disturbed)

    def _generated(
        self, subject: Subject, plan: Plan, prompt: Tensor, drafts: Mapping[str, Any], state: int
    ) -> Generated:
        import torch

        from kvtailor.hf.run.generate import generate

        generator = torch.Generator(subject.device).manual_seed(max(0, state))
        return generate(
            subject.model,
            prompt[None],
            plan=plan,
            min_gain=self.min_gain,
            max_new_tokens=self.tokens,
            do_sample=self.temperature > 0,
            temperature=self.temperature or 1.0,
            top_p=self.top_p,
            generator=generator,
            eos_token_id=[],
            **drafts,
        )

    def _own(self, subject: Subject, contestant: Contestant, prompt: Tensor, meter: Neighbours) -> tuple[float, bool]:
        cache = subject.new_cache(contestant)
        meter.start()
        logits, cache = subject.prefill(prompt[None], cache, last_only=True)
        token = logits[:, -1:].argmax(-1)
        subject.wait()
        begin = time.perf_counter()
        subject.decode(token, cache, self.tokens - 1)
        return time.perf_counter() - begin, meter.disturbed()

    def _scored(self, side: DraftRounds, own: DraftRounds, small: Any, meter: Neighbours) -> Scored:
        return Scored(
            samples=side.clean,
            values=side.values(own, greedy=not self.temperature),
            metrics=side.metrics(own, self.tokens - 1, self.rounds, small, greedy=not self.temperature),
            timings=side.timings(self.rounds),
            notes=meter.notes(),
            held=side.weight,
        )
