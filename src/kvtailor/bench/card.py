"""A plan card: a folder to publish beside a model, with a plan and what records say of it on that model.

`plan.toml` is the plan, `card.json` has every number of the page, and `README.md` shows them as the hub does, with a
head in YAML. Both of the first carry a checksum. Nothing in a card is measured here: it is made of the bench's records,
and of what a fit measured of each layer where there is one.
"""

from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvtailor.bench.measure.statistics import Estimate
from kvtailor.bench.recorded_losses import has_losses, layers_of, loss_of, losses_beside, pairs_with_full
from kvtailor.bench.schema import Record
from kvtailor.errors import ArgumentError, KvtailorError
from kvtailor.ops.files import file_within, make_folder, read_text, seal_json, seal_toml, unseal_json, write_whole
from kvtailor.plan import Plan
from kvtailor.plan.engines import WHO_DROPS, LayerLosses, widths_by_layer
from kvtailor.presets import FULL

__all__ = ["CARD_FILE", "Card", "CardAnswers", "CardLayer", "CardLoss", "CardSetting", "make_card"]

SCHEMA = 1
CARD_FILE = "card.json"
_PLAN_FILE, _README = "plan.toml", "README.md"
_WIDTH = 100
_VERSIONS = ("kvtailor", "commit", "torch", "transformers", "python", "processor", "accelerator")


@dataclass(frozen=True, kw_only=True)
class CardLoss:
    """What the plan loses on a text.

    Attributes:
        text: its name. text_hash: SHA-256 of all token ids that the model was given.
        dtype: in which the model computed.
        context: tokens that were compressed. continuation: tokens after them that were scored.
        loss: nats a token over the uncompressed cache on the same tokens, with its 95 % interval; count is windows.
        bytes: of the cache, over those of an uncompressed one; None where it was not weighed.
    """

    text: str
    text_hash: str
    dtype: str
    context: int | None
    continuation: int | None
    loss: Estimate
    bytes: float | None


@dataclass(frozen=True, kw_only=True)
class CardAnswers:
    """Right answers to questions on documents of one kind.

    Attributes:
        documents: their name. outside: the questions came after the cache was cut.
        right: of the plan. full: of the uncompressed cache. count: of all.
        hashes: SHA-256 of the token ids at each point.
    """

    documents: str
    outside: bool
    right: int
    full: int
    count: int
    hashes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CardLayer:
    """What one layer loses by itself at the plan's widths, as a fit measured it with kivi's codes.

    Attributes:
        layer: among those that the plan compresses.
        key_bits, value_bits: the plan's; 0: not encoded.
        keys, values: loss where that side of this layer alone has them; None where the width was not measured.
    """

    layer: int
    key_bits: float
    value_bits: float
    keys: float | None
    values: float | None


@dataclass(frozen=True, kw_only=True)
class CardSetting:
    """The nearest setting of another engine.

    Attributes:
        engine, version, setting, lacks: see `plan.engines.EngineSetting`.
        neighbour: the plan of ours that stands beside it; None where none does.
        loss: what that plan lost on the card's first text; None where it was not measured.
    """

    engine: str
    version: str
    setting: str | None
    lacks: str
    neighbour: str | None
    loss: Estimate | None


@dataclass(frozen=True, kw_only=True)
class Card:
    """A plan, and what is known of it on one model.

    Attributes:
        plan: in one line. plan_hash: of it, as records name it.
        model: its name. model_hash: of its configuration and of a sample of its weights; None where none is known.
        measured: UTC dates of the first and the last record.
        losses: by text; one or more.
        answers: by kind of documents; none where none were asked.
        unshown: tasks that were measured beside 'full' as well, and of which the card has no number.
        layers: none where no fit measured them.
        settings: of other engines.
        calibrated_on: what the plan's calibration was made from, `NAME SHA-256` each.
        versions: of what measured, and on what.
    """

    plan: str
    plan_hash: str
    model: str
    model_hash: str | None
    measured: tuple[str, str]
    losses: tuple[CardLoss, ...]
    answers: tuple[CardAnswers, ...]
    unshown: tuple[str, ...]
    layers: tuple[CardLayer, ...]
    settings: tuple[CardSetting, ...]
    calibrated_on: tuple[str, ...]
    versions: dict[str, Any]

    def save(self, folder: str | Path) -> Path:
        """Write the three files; return the folder, which is new, empty, or has a card that is written anew.

        Raises:
            KvtailorError: it has other files, and no card.
            FileError: it cannot be written.
        """
        where = Path(folder)
        there = sorted(each.name for each in where.iterdir()) if where.is_dir() else []
        if there and not (where / CARD_FILE).is_file():
            raise ArgumentError(
                f"asked to write a plan card to {where}, which has {', '.join(there[:3])} and no card: give a new "
                "folder"
            )
        if folders := [name for name in (_PLAN_FILE, _README) if (where / name).is_dir()]:
            raise ArgumentError(
                f"asked to write a plan card to {where}, where {folders[0]} is a folder: give a new one"
            )
        make_folder(where)
        write_whole(where / _PLAN_FILE, seal_toml(Plan.parse(self.plan).to_toml()))
        write_whole(where / _README, self.readme())
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, ensure_ascii=False, allow_nan=False)
        write_whole(where / CARD_FILE, seal_json(text))
        return where

    @classmethod
    def load(cls, folder: str | Path) -> Card:
        """Return what `save` wrote.

        Raises:
            KvtailorError: there is none, or it is not as it was written.
        """
        try:
            where = file_within(folder, CARD_FILE)
            if where is None:
                raise ArgumentError(f"it has no {CARD_FILE}")
            text, sealed = unseal_json(read_text(where))
            # A card of before does not say what it leaves out.
            found = {"unshown": (), **json.loads(text)}
            if not sealed or found.pop("schema") != SCHEMA or {*found} != {each.name for each in fields(cls)}:
                raise ArgumentError(f"it has no checksum or is not of schema {SCHEMA}")
            card, plan = _read(found), Plan.load(folder)
            if plan.hash != card.plan_hash:
                raise ArgumentError(f"its numbers are of another plan than {plan}")
            if not card.losses:
                raise ArgumentError("it has no loss")
            return card
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, KvtailorError) as error:
            raise KvtailorError(
                f"asked for the plan card in {folder}, which cannot be read ({error}): run `kvtailor card` again"
            ) from error

    def readme(self) -> str:
        """Return the page as the hub shows it, with its head."""
        return "\n".join([*self._head(), *self._body()]) + "\n"

    def _head(self) -> Iterator[str]:
        yield from ("---", f"base_model: {json.dumps(self.model)}", "library_name: kvtailor")
        yield from ("tags:", "- kv-cache", "- kv-cache-compression", "- kvtailor", "---", "")

    def _body(self) -> Iterator[str]:
        yield from (f"# A plan for the KV cache of {_plain(self.model)}", "", "```text", self.plan, "```", "")
        yield from ("```python", 'cache = kvtailor.cache_for(model, kvtailor.Plan.load("FOLDER"))', "```", "")
        yield from ("From a shell, with this folder:", "")
        yield from (f"    kvtailor run --model {shlex.quote(_plain(self.model))} --plan FOLDER --prompt-file FILE", "")
        yield from ("What is written here was measured on this model, and says nothing of another.", "")
        yield from (
            "## What it loses",
            "",
            "Nats a token over the uncompressed cache, on the same tokens; 95 % intervals.",
        )
        yield from ("", "| text | tokens | loss | 95 % | windows | bytes |", "|---|---|---:|---|---:|---:|")
        for each in self.losses:
            tokens = "" if each.context is None else f"{each.context} + {each.continuation}"
            size = "-" if each.bytes is None else f"{100 * each.bytes:.1f} %"
            loss = each.loss
            yield f"| {_plain(each.text)} | {tokens} | {loss.value:+.4f} | {_between(loss)} | {loss.count} | {size} |"
        if idle := [_plain(each.text) for each in self.losses if (each.loss.low, each.loss.high) == (0.0, 0.0)]:
            yield ""
            yield f"On {', '.join(idle)} the plan did nothing: each loss is the uncompressed cache's to the last bit."
        if self.answers:
            yield from ("", "## Right answers", "", "| documents | asked | right | uncompressed | of |")
            yield "|---|---|---:|---:|---:|"
            for said in self.answers:
                asked = "after the cache was cut" if said.outside else "inside the prompt"
                yield f"| {_plain(said.documents)} | {asked} | {said.right} | {said.full} | {said.count} |"
        yield from ("", "## Layers", "")
        if self.layers:
            yield from ("What each layer loses by itself at the plan's widths, measured with kivi's codes.", "")
            yield from ("| layer | bits of keys | loss | bits of values | loss |", "|---:|---:|---:|---:|---:|")
            for at in self.layers:
                sides = ((at.key_bits, at.keys), (at.value_bits, at.values))
                cells = " | ".join(f"{_bits(bits)} | {_number(loss)}" for bits, loss in sides)
                yield f"| {at.layer} | {cells} |"
        else:
            yield "What each layer loses by itself was not measured."
        yield from ("", "## Other engines", "", "The nearest settings, which were not run here.")
        if Plan.parse(self.plan).evicts:
            yield from textwrap.wrap(WHO_DROPS, _WIDTH, break_long_words=False)
        yield ""
        yield from ("| engine | setting | lacks | beside it | loss of that |", "|---|---|---|---|---:|")
        for setting in self.settings:
            told = "none" if setting.setting is None else f"`{setting.setting}`"
            near = "-" if setting.neighbour is None else f"`{setting.neighbour}`"
            beside = setting.loss
            lost = "not measured" if beside is None else f"{beside.value:+.4f} ({_between(beside)})"
            yield f"| {setting.engine} {setting.version} | {told} | {setting.lacks or '-'} | {near} | {lost} |"
        yield from ("", "## How it was measured", "")
        for line in self._measured():
            yield from textwrap.wrap(
                f"- {line}.", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )

    def _measured(self) -> Iterator[str]:
        dtypes = dict.fromkeys(each.dtype for each in self.losses)
        yield _plain(f"Between {self.measured[0]} and {self.measured[1]}, in {', '.join(dtypes)}")
        yield _plain(", ".join(f"{name} {value}" for name, value in self.versions.items() if value is not None))
        yield f"Model hash `{_plain(str(self.model_hash))}`, plan hash `{_plain(self.plan_hash)}`"
        for each in self.losses:
            yield f"Tokens of {_plain(each.text)}: SHA-256 `{_plain(each.text_hash)}`"
        for said in self.answers:
            digests = ", ".join(f"`{_plain(digest[:16])}`" for digest in said.hashes)
            yield f"Tokens of {_plain(said.documents)}: SHA-256 {digests}"
        for name in self.calibrated_on:
            yield f"The plan's calibration was made from {_plain(name)}"
        yield f"Every number of this page is in `{CARD_FILE}`"
        if self.unshown:
            tasks = ", ".join(_plain(each) for each in self.unshown)
            yield f"Measured as well, and not on this page: {tasks}. The bench's report of the same records has them"


def make_card(plan: Plan, records: Sequence[Record], layers: LayerLosses | None = None) -> Card:
    """Return what records of one model say of a plan.

    Args:
        plan: any that the records have.
        records: of the bench, on one model, with the uncompressed cache on the same tokens among them.
        layers: what each layer loses by itself, as a fit has it.

    Raises:
        KvtailorError: the plan changes nothing, or the records are of several models, or have no loss of the plan
            beside the uncompressed cache, or what a fit has is of another model's layers.
    """
    if plan == Plan():
        raise ArgumentError("asked for a card of 'full', which changes nothing: give the plan that is to be published")
    models = sorted({(each.model, each.model_hash) for each in records}, key=str)
    if len(models) != 1:
        told = ", ".join(f"{name} ({digest})" for name, digest in models)
        raise KvtailorError(f"asked for a card of one model, found records of {told or 'none'}: give those of one")
    pairs = pairs_with_full(plan, records)
    losses = tuple(_loss(ours, theirs) for ours, theirs in pairs if has_losses(ours))
    if not losses:
        scored = {each.plan for each in records if each.error is None and each.task == "perplexity"}
        measured = ", ".join(sorted(scored - {FULL})) or "none"
        there = f"those of {measured}" if FULL in scored else "no loss of 'full' to hold it against"
        raise KvtailorError(
            f"asked for a card of the plan {plan}, whose loss of text beside 'full' (the task perplexity) these "
            f"records do not have; they have {there}: run `kvtailor bench --model {models[0][0]} "
            f'--plans "{plan}" --out FOLDER`'
        )
    ours = [each for each, _ in pairs]
    first = next(each for each in ours if each.task == "perplexity")
    started = sorted(each.started for each in ours)
    return Card(
        plan=str(plan),
        plan_hash=plan.hash,
        model=models[0][0],
        model_hash=models[0][1],
        measured=(started[0][:10], started[-1][:10]),
        losses=losses,
        answers=tuple(_answers(pairs)),
        unshown=tuple(sorted({pair[0].task for pair in pairs if not has_losses(pair[0]) and not _has_answers(*pair)})),
        layers=() if layers is None else tuple(_layers(plan, layers)),
        settings=tuple(_settings(plan, records, layers)),
        calibrated_on=tuple(sorted({name for each in ours for name in each.calibrated_on})),
        versions={name: first.machine.get(name) for name in _VERSIONS},
    )


def _loss(ours: Record, theirs: Record) -> CardLoss:
    sizes = ours.bytes_held, ours.bytes_full
    context, continuation = (ours.point.get(name) for name in ("context", "continuation"))
    return CardLoss(
        text=ours.text or "a text without a name",
        text_hash=ours.text_hash or "",
        dtype=ours.dtypes or "",
        context=context if isinstance(context, int) else None,
        continuation=continuation if isinstance(continuation, int) else None,
        loss=loss_of(ours, theirs),
        bytes=None if sizes[0] is None or not sizes[1] else sizes[0] / sizes[1],
    )


def _has_answers(ours: Record, theirs: Record) -> bool:
    """Return whether both are of questions that were answered."""
    return bool(ours.values.get("hit") and theirs.values.get("hit"))


def _answers(pairs: Sequence[tuple[Record, Record]]) -> Iterator[CardAnswers]:
    """Right answers of all points together, by kind of documents and by where the questions stood."""
    groups: dict[tuple[str, bool], list[tuple[Record, Record]]] = {}
    for ours, theirs in pairs:
        if _has_answers(ours, theirs):
            key = ours.text or ours.task, bool(ours.point.get("question_outside"))
            groups.setdefault(key, []).append((ours, theirs))
    for (documents, outside), found in groups.items():
        hits = [[hit for pair in found for hit in pair[side].values["hit"]] for side in (0, 1)]
        yield CardAnswers(
            documents=documents,
            outside=outside,
            right=round(sum(hits[0])),
            full=round(sum(hits[1])),
            count=len(hits[0]),
            hashes=tuple(ours.text_hash or "" for ours, _ in found),
        )


def _layers(plan: Plan, measured: LayerLosses) -> Iterator[CardLayer]:
    widths = list(measured.widths)

    def loss(rows: Sequence[Sequence[float]], layer: int, bits: float) -> float | None:
        return rows[layer][widths.index(int(bits))] if bits in widths else None

    for layer, found in enumerate(widths_by_layer(plan.encode, len(measured.keys))):
        if found is not None:
            keys, values = (0.0 if bits == 16 else bits for bits in found)
            yield CardLayer(
                layer=layer,
                key_bits=keys,
                value_bits=values,
                keys=loss(measured.keys, layer, keys),
                values=loss(measured.values, layer, values),
            )


def _settings(plan: Plan, records: Sequence[Record], layers: LayerLosses | None) -> Iterator[CardSetting]:
    for each in plan.exports(layers=layers_of(records), measured=layers):
        beside = losses_beside(plan, each, records)
        yield CardSetting(
            engine=each.engine,
            version=each.version,
            setting=each.setting,
            lacks=each.lacks,
            neighbour=beside.neighbour,
            loss=beside.setting,
        )


def _read(found: dict[str, Any]) -> Card:
    def estimate(value: dict[str, Any] | None) -> Estimate | None:
        return None if value is None else Estimate(**value)

    return Card(
        **{
            **found,
            "measured": tuple(found["measured"]),
            "losses": tuple(CardLoss(**{**each, "loss": estimate(each["loss"])}) for each in found["losses"]),
            "answers": tuple(CardAnswers(**{**each, "hashes": tuple(each["hashes"])}) for each in found["answers"]),
            "layers": tuple(CardLayer(**each) for each in found["layers"]),
            "settings": tuple(CardSetting(**{**each, "loss": estimate(each["loss"])}) for each in found["settings"]),
            "unshown": tuple(found["unshown"]),
            "calibrated_on": tuple(found["calibrated_on"]),
        }
    )


def _plain(name: str) -> str:
    """Return a name that came from outside as one line that is no mark of Markdown and ends no cell of a table."""
    return " ".join(name.split()).replace("|", "/").replace("`", "'")


def _between(loss: Estimate) -> str:
    return loss.interval(4, signed=True) or "too few windows"


def _bits(bits: float) -> str:
    return "whole" if bits == 0 else f"{bits:g}"


def _number(loss: float | None) -> str:
    return "not measured" if loss is None else f"{loss:.5f}"
