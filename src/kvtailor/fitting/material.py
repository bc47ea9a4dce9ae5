"""What plans are judged on: pieces of the user's texts, and documents with answers. One half searches, one half proves.

Pieces of text are windows that do not overlap. The second half of every text is kept for the proof, and no piece of
the search comes from it. Documents are generated, or read from a file of JSON lines; generated ones of the search are
of the split "calibration", so that the proof, which has those of "evaluation", never meets one again.
The user's own questions are a file of JSON lines with `prompt` and `answer`. Questions about one document stay on one
side: prompts that share a fifth of their runs of 13 words are of one document.
Whatever the proof would refuse is refused, or left out with a note, here: before the search.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch

from kvtailor.bench.checks import distinct_8grams
from kvtailor.bench.data.overlap import Sketch, shared
from kvtailor.bench.data.synthetic.documents import ALL_TASKS, SPLITS, TASKS, make_document
from kvtailor.bench.data.texts import BETWEEN, generated_documents, named_texts, read_text
from kvtailor.bench.measure.statistics import FEWEST
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.needle import code_document
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName
from kvtailor.fitting.pieces import CONTINUATION, TEXT, Piece, answered

__all__ = [
    "Material",
    "ProofText",
    "check_positions",
    "generated",
    "halves",
    "material_of",
    "named_texts",
    "read_questions",
]

_LEAST_ANSWERS = 10
_ONE_DOCUMENT = 0.2
_RUNS = 4096


def read_questions(subject: Subject, path: Path, context: int, notes: list[str]) -> tuple[list[Piece], list[Piece]]:
    """Return the pieces that search and those that prove.

    Args:
        subject: the model, with its tokenizer.
        path: of the file.
        context: tokens; longer prompts are left out.
        notes: sentences about what is left out are added.

    Raises:
        KvtailorError: a line that is no question, or too few of them.
    """
    pieces: list[Piece] = []
    left, twice, met = 0, 0, set[str]()
    for number, line in enumerate(read_text(path).split("\n")):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
            prompt, answer = found["prompt"], found["answer"]
            if not isinstance(prompt, str) or not isinstance(answer, str):
                raise ArgumentError("prompt and answer must be text")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise KvtailorError(
                f'line {number + 1} of {path} is {line[:60]!r}: write {{"prompt": "...", "answer": "..."}} ({error})'
            ) from error
        if prompt in met:
            twice += 1
            continue
        met.add(prompt)
        ids, whole = subject.prompt(prompt), subject.prompt(prompt + answer)
        behind = whole[ids.numel() :]
        if not torch.equal(whole[: ids.numel()], ids):
            behind = subject.prompt(answer)[subject.start().numel() :]
        piece = answered(ids, behind, path.name, path.name, prompt)
        if ids.numel() > context or piece is None:
            left += 1
        else:
            pieces.append(piece)
    if left:
        notes.append(
            f"{left} questions of {path.name} are left out: longer than the context of {context} tokens, or with an "
            "answer of one token, which no cache is read for."
        )
    if twice:
        notes.append(f"{twice} questions of {path.name} stand there more than once and count once.")
    short = sum(piece.context.numel() < context // 2 for piece in pieces)
    if short:
        notes.append(
            f"{short} prompts of {path.name} have less than half of the context of {context} tokens: what drops tokens "
            "drops fewer of theirs, or none."
        )
    if len(pieces) < _LEAST_ANSWERS:
        raise KvtailorError(
            f"{path} has {len(pieces)} questions that fit a context of {context} tokens: give {_LEAST_ANSWERS} at least"
        )
    return halves(pieces, path.name, notes)


def halves(pieces: Sequence[Piece], name: str, notes: list[str]) -> tuple[list[Piece], list[Piece]]:
    """Deal questions into two halves, those about one document to one of them; within each the order stays.

    Args:
        pieces: with their prompts as `text`.
        name: of the file.
        notes: where most questions are about one document, no such halves are there, and a sentence says so.
    """
    groups = _by_document([piece.text for piece in pieces])
    if max(map(len, groups)) > 2 * len(pieces) / 3:
        notes.append(
            f"Most questions of {name} are about one document, so those that judge are about what the search has read."
        )
        return list(pieces[::2]), list(pieces[1::2])
    sides: tuple[list[int], list[int]] = ([], [])
    for group in groups:
        # Of equal sides the first gets it; so single questions go to both in turns.
        min(sides, key=len).extend(group)
    return [pieces[n] for n in sorted(sides[0])], [pieces[n] for n in sorted(sides[1])]


def _by_document(prompts: Sequence[str]) -> list[list[int]]:
    """Numbers of prompts in groups that share text, each group by its first number."""
    owners: dict[int, int] = {}
    group_of: list[int] = []
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        runs = Sketch.of([prompt], _RUNS).hashes
        met = Counter(owners[run] for run in runs if run in owners)
        # Runs belong to the first prompt that had them; its group is what this one joins.
        shared = Counter[int]()
        for owner, count in met.items():
            shared[group_of[owner]] += count
        most = shared.most_common(1)
        group = most[0][0] if most and most[0][1] >= _ONE_DOCUMENT * len(runs) else number
        group_of.append(group)
        groups.setdefault(group, []).append(number)
        for run in runs:
            owners.setdefault(run, number)
    return list(groups.values())


FEWEST_TO_SEARCH = 4
_SEARCH_KINDS = ("needle", "key_value")
_PROOF_KINDS = ("variables", "passkey")
_STATES = 900_000
_HALVES_MAY_SHARE = 0.05
_LEAST_DISTINCT = 0.3


@dataclass(frozen=True, kw_only=True)
class ProofText:
    """The halves of the texts that the search never saw.

    Attributes:
        text: all of them, joined.
        source: their names.
        starts: where each begins, in characters.
        windows: how many windows they have room for.
    """

    text: str
    source: str
    starts: tuple[int, ...]
    windows: int


@dataclass(frozen=True, kw_only=True)
class Material:
    """What the search sees, and what the proof has.

    Attributes:
        search: pieces in the order in which they are taken, groups in turns.
        proof: the text of the proof.
        kinds: families of the search.
        unseen: families of generated documents that only the proof has.
        asked: pieces of the user's own tasks that only the proof has.
        notes: whole sentences: what is not as it was asked.
        sizes: counts by name.
        distinct: the least share of different runs of 8 words that the text of the proof may have: the bench's usual
            one, or less where the user's own text repeats itself; then a note says so.
    """

    search: tuple[Piece, ...]
    proof: ProofText
    kinds: tuple[str, ...]
    unseen: tuple[str, ...]
    asked: tuple[Piece, ...] = ()
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    distinct: float = Perplexity.least_distinct

    def first(self, texts: int, documents: int) -> tuple[Piece, ...]:
        """Return the first pieces: so many windows of text, and so many documents of each family."""
        wanted, taken = {TEXT: texts}, dict.fromkeys({piece.group for piece in self.search}, 0)
        found = []
        for piece in self.search:
            if taken[piece.group] < wanted.get(piece.group, documents):
                taken[piece.group] += 1
                found.append(piece)
        return tuple(found)


def material_of(
    subject: Subject,
    texts: Mapping[str, str],
    *,
    context: int,
    kinds: Sequence[str] | None = None,
    unseen: Sequence[str] | None = None,
    answers: Sequence[Path] = (),
    search_texts: int = 16,
    search_documents: int = 12,
) -> Material:
    """Return the material of a search.

    Args:
        subject: the model, with its tokenizer.
        texts: by their names.
        context: tokens of each prompt.
        kinds: families of generated documents for the search; None: `needle` and `key_value`.
        unseen: families that only the proof has; None: `variables` and `passkey`, as far as the search has them not.
        answers: files of JSON lines with `prompt` and `answer`.
        search_texts: most windows of text that the search takes.
        search_documents: most documents of each family that it takes.

    Raises:
        KvtailorError: the texts are too short, the model has too few positions, or a family is not known.
    """
    check_positions(subject, context)
    kinds = _SEARCH_KINDS if kinds is None else tuple(dict.fromkeys(kinds))
    unseen = tuple(kind for kind in _PROOF_KINDS if kind not in kinds) if unseen is None else tuple(unseen)
    for kind in (*kinds, *unseen):
        if kind not in ALL_TASKS:
            raise UnknownName("kind of document", kind, ALL_TASKS)
    if both := sorted({*kinds} & {*unseen}):
        raise KvtailorError(
            f"asked for {', '.join(both)} in the search and as what the search never saw: name another family for one"
        )
    if len(set(texts.values())) < len(texts):
        raise KvtailorError(f"asked for {len(texts)} texts, of which two are the same: give each once")
    notes: list[str] = []
    windows, proof = _split_texts(subject, texts, context, notes)
    distinct = _distinct(windows, proof, notes)
    unseen = tuple(kind for kind in unseen if _can_be_made(subject, kind, context, notes))
    groups = [_spread(windows, search_texts)]
    if len({path.name for path in answers}) < len(answers):
        raise KvtailorError(
            f"asked for tasks from {len(answers)} files, of which two have one name: rename one of them"
        )
    for kind in kinds:
        groups.append(_documents(subject, kind, context, search_documents, notes))
    asked: list[Piece] = []
    for path in answers:
        searched, proved = read_questions(subject, path, context, notes)
        groups.append(searched[:search_documents])
        asked += proved
    search = tuple(piece for turn in zip_longest(*groups) for piece in turn if piece is not None)
    return Material(
        search=search,
        proof=proof,
        kinds=tuple(dict.fromkeys(piece.group for piece in search if piece.group != TEXT)),
        unseen=unseen,
        asked=tuple(asked),
        notes=tuple(notes),
        sizes={"windows to search": len(windows), "windows that judge": proof.windows},
        distinct=distinct,
    )


def check_positions(subject: Subject, context: int) -> None:
    """Raise where the model has no room for a context and what is scored behind it.

    Raises:
        KvtailorError: it has not.
    """
    if subject.positions is not None and context + CONTINUATION > subject.positions:
        raise KvtailorError(
            f"asked for a context of {context}, and {CONTINUATION} tokens that are scored behind it, but "
            f"{subject.name} has {subject.positions} positions: give a context of at most "
            f"{subject.positions - CONTINUATION}"
        )


def generated(context: int, windows: int) -> dict[str, str]:
    """Return generated text with room for so many windows, for a model at hand without a text of the user's."""
    kinds = [kind for kind in TASKS if kind not in _PROOF_KINDS]
    documents = generated_documents(6 * (context + CONTINUATION) * windows, kinds=kinds)
    return {"generated text": BETWEEN.join(documents)}


def _split_texts(
    subject: Subject, texts: Mapping[str, str], context: int, notes: list[str]
) -> tuple[list[Piece], ProofText]:
    """The windows of the first halves, and the second halves."""
    start = subject.start()
    stride = context + CONTINUATION - start.numel()
    if stride <= CONTINUATION:
        raise KvtailorError(f"asked for a context of {context} tokens, which the beginning tokens fill: ask for more")
    windows: list[Piece] = []
    halves: list[str] = []
    fits, longest, odd, short = 0, 0, 0, []
    for name, text in texts.items():
        coded = subject.tokens(text)
        longest = max(longest, coded.ids.numel())
        count = coded.ids.numel() // stride
        if not count:
            short.append(name)
        # Of an odd number of windows the proof has one more, and the next time the search.
        own = (count + odd) // 2
        odd = (odd + count) % 2
        for number in range(own):
            ids = coded.ids[number * stride : (number + 1) * stride]
            windows.append(
                Piece(
                    context=torch.cat([start, ids[:-CONTINUATION]]),
                    targets=ids[-CONTINUATION:],
                    group=TEXT,
                    source=name,
                    text=subject.text(ids.tolist()),
                )
            )
        if count:
            at = own * stride
            cut = text.encode()[coded.ends[at - 1] if at else 0 :].decode(errors="ignore") if coded.ends else ""
            halves.append(cut or subject.text(coded.ids[at:].tolist()))
            fits += count - own
    if len(windows) < FEWEST_TO_SEARCH or fits < FEWEST:
        needed = 2 * max(FEWEST_TO_SEARCH, FEWEST)
        raise KvtailorError(
            f"asked for a context of {context} tokens, of which the texts have {len(windows)} windows to search and "
            f"{fits} that judge ({context} + {CONTINUATION} tokens each; the longest text has {longest} tokens): at "
            f"least {FEWEST_TO_SEARCH} and {FEWEST} are needed to tell plans apart at all, about {needed} in all. Give "
            "longer or more texts, or a shorter context"
        )
    if short:
        notes.append(f"Shorter than a window of {context + CONTINUATION} tokens, and left out: {', '.join(short)}.")
    starts, at = [], 0
    for half in halves:
        starts.append(at)
        at += len(half) + len(BETWEEN)
    return windows, ProofText(
        text=BETWEEN.join(halves),
        source=" + ".join(name for name in texts if name not in short),
        starts=tuple(starts),
        windows=fits,
    )


def _distinct(windows: Sequence[Piece], proof: ProofText, notes: list[str]) -> float:
    """The least share of different runs of 8 words for this text, see `Material`.

    Raises:
        KvtailorError: much of what judges stands in what is searched too, or the text hardly says anything new.
    """
    common = shared(Sketch.of([piece.text for piece in windows]), Sketch.of([proof.text])).of_second or 0.0
    if common > _HALVES_MAY_SHARE:
        raise KvtailorError(
            f"{common:.0%} of the runs of 13 words in the halves of the texts that judge stand in those that are "
            f"searched too, and {_HALVES_MAY_SHARE:.0%} are allowed: such a proof would know the answer. Leave out "
            "texts that are given twice, or give others"
        )
    share = distinct_8grams([proof.text])
    if share is None or share >= Perplexity.least_distinct:
        return Perplexity.least_distinct
    if share < _LEAST_DISTINCT:
        raise KvtailorError(
            f"only {share:.0%} of the runs of 8 words in the texts are different, and at least {_LEAST_DISTINCT:.0%} "
            "are needed: any cache looks good on a text that repeats itself. Give another text"
        )
    notes.append(
        f"Only {share:.0%} of the runs of 8 words in the texts are different (novels: more than 95 %): what repeats "
        "itself is easily told, so that losses on other text may be larger."
    )
    # Single windows repeat themselves more than the whole does.
    return share / 2


def _can_be_made(subject: Subject, kind: str, context: int, notes: list[str]) -> bool:
    """Whether documents of a family fit the context; the proof's own are of other states."""
    try:
        make_document(
            kind,
            state=SPLITS["calibration"].start + _STATES,
            split="calibration",
            depth=0.5,
            length=context - subject.start().numel(),
            count_tokens=subject.count,
        )
    except ValueError as error:
        notes.append(f"{kind} is left out of the proof: {error}.")
        return False
    return True


def _documents(subject: Subject, kind: str, context: int, count: int, notes: list[str]) -> list[Piece]:
    """Documents of a family, of the split that no evaluation has."""
    # Calibrations draw from the beginning of the same split; plans that have one must not meet its facts again.
    first = SPLITS["calibration"].start + _STATES
    found = []
    for number in range(count):
        try:
            # Depths in an order of which each beginning is spread: 0.5, 0.0, 1.0, 0.25, 0.75 ...
            depth = (0.5, 0.0, 1.0, 0.25, 0.75, 0.1, 0.9, 0.4, 0.6)[number % 9]
            document = make_document(
                kind,
                state=first + number,
                split="calibration",
                length=context - subject.start().numel(),
                depth=depth,
                count_tokens=subject.count,
            )
        except ValueError as error:
            notes.append(f"{kind} is left out: {error}.")
            return []
        within, question, answer = code_document(subject, document)
        piece = answered(torch.cat([within, question]), answer, kind, f"generated {kind} documents", document.prompt)
        if piece is None:
            notes.append(f"A document of {kind} is left out: its answer is one token, which no cache is read for.")
        else:
            found.append(piece)
    return found


def _spread(pieces: Sequence[Piece], count: int) -> list[Piece]:
    """At most so many, evenly spread, and each beginning of them spread as well."""
    count = min(count, len(pieces))
    places = [i * len(pieces) // count for i in range(count)]
    # Every other one first: the first half of the list is as spread as the whole.
    return [pieces[i] for i in (*places[::2], *places[1::2])]
