"""What is searched on, and what judges: nothing of the one is in the other."""

import json

import pytest
import torch

from kvtailor.bench.data.synthetic.documents import SPLITS
from kvtailor.bench.data.texts import generated_text
from kvtailor.bench.subject import Subject
from kvtailor.errors import KvtailorError
from kvtailor.fitting.material import generated, halves, material_of, named_texts
from kvtailor.fitting.pieces import CONTINUATION, TEXT, Piece

CONTEXT = 192


@pytest.fixture(scope="module")
def demo():
    return Subject.load("demo", dtype="float32")


@pytest.fixture(scope="module")
def texts():
    return {"one": generated_text(30_000, 1), "other": generated_text(24_000, 2)}


def ids_of(subject, text):
    return subject.tokens(text).ids.tolist()


def test_the_proof_has_no_window_of_the_search(demo, texts):
    found = material_of(demo, texts, context=CONTEXT)
    judging = found.proof.text
    windows = [piece for piece in found.search if piece.group == TEXT]
    assert len(windows) >= 8 and {piece.source for piece in windows} == {"one", "other"}
    for piece in windows:
        assert piece.text[40:400] in texts[piece.source] and piece.text[40:400] not in judging
        assert piece.context.numel() == CONTEXT and piece.targets.numel() == CONTINUATION
    # The halves hold what is left of each text, whole.
    for name, text in texts.items():
        assert text[-2000:] in judging, name
    assert [judging[start : start + 20] for start in found.proof.starts] == [
        half for half in (texts["one"], texts["other"]) for half in [_found(half, judging)]
    ]


def _found(text, judging):
    """The beginning of the longest end of `text` that is in `judging`."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if text[middle:] in judging else (middle + 1, high)
    return text[low : low + 20]


def test_windows_do_not_overlap(demo, texts):
    found = material_of(demo, texts, context=CONTEXT)
    seen = set()
    for piece in found.search:
        if piece.group == TEXT:
            ids = tuple(piece.targets.tolist())
            assert ids not in seen
            seen.add(ids)


def test_documents_of_the_search_are_of_another_split(demo, texts):
    from kvtailor.bench.data.synthetic.documents import make_document

    found = material_of(demo, texts, context=CONTEXT, kinds=["needle"], search_documents=3)
    documents = [piece for piece in found.search if piece.group == "needle"]
    assert len(documents) == 3
    first = make_document(
        "needle",
        state=SPLITS["calibration"].start + 900_000,
        split="calibration",
        depth=0.5,
        length=CONTEXT - demo.start().numel(),
        count_tokens=demo.count,
    )
    assert documents[0].text == first.prompt
    assert torch.equal(documents[0].context, demo.prompt(first.prompt))


def test_the_first_pieces_are_the_beginning_of_more(demo, texts):
    found = material_of(demo, texts, context=CONTEXT)
    few, more = found.first(2, 1), found.first(5, 3)
    assert [piece.group for piece in few].count(TEXT) == 2
    assert all(any(piece is other for other in more) for piece in few)
    assert len(more) == 5 + 3 * len(found.kinds)


def test_the_users_questions_are_parted_too(demo, texts, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": f"Number {n} is {1000 + 7 * n}. Number {n} is", "answer": f" {1000 + 7 * n}."} for n in range(24)
    ]
    rows.append({"prompt": "word " * 1000, "answer": " too long"})
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = material_of(demo, texts, context=CONTEXT, kinds=[], answers=[path])
    searched = {piece.text for piece in found.search if piece.group == "mine.jsonl"}
    proved = {piece.text for piece in found.asked}
    assert len(searched) == len(proved) == 12 and not searched & proved
    assert any("1 questions of mine.jsonl are left out" in note for note in found.notes)
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(KvtailorError, match="line 1 of"):
        material_of(demo, texts, context=CONTEXT, kinds=[], answers=[path])


def question(number, document, prompt):
    ids = torch.arange(4)
    return Piece(context=ids, targets=ids, group="mine", source="mine", text=f"{document} {prompt} {number}?")


def test_questions_about_one_document_stay_on_one_side():
    documents = [" ".join(f"word{n}of{d}" for n in range(60)) for d in range(9)]
    asked = [question(n, documents[n % 9], f"What is number {n}") for n in range(27)]
    notes = []
    searched, proved = halves(asked, "mine", notes)
    assert sorted(piece.text for piece in [*searched, *proved]) == sorted(piece.text for piece in asked)
    assert not {piece.text.split()[0] for piece in searched} & {piece.text.split()[0] for piece in proved}
    assert abs(len(searched) - len(proved)) <= 3 and not notes
    # Instructions that all have in common are no document.
    preamble = "Read what follows and answer in one word , without an explanation or anything else please . "
    told = [question(n, preamble + " ".join(f"word{k}of{n}" for k in range(200)), "so") for n in range(12)]
    assert [len(half) for half in halves(told, "mine", notes)] == [6, 6] and not notes


def test_questions_about_a_single_document_are_told():
    one = " ".join(f"word{n}" for n in range(100))
    notes = []
    searched, proved = halves([question(n, one, f"number {n}") for n in range(10)], "mine", notes)
    assert len(searched) == len(proved) == 5 and "about one document" in notes[0]


def test_what_the_proof_would_refuse_is_known_before_the_search(demo, texts):
    short = material_of(demo, texts, context=64, kinds=[], unseen=["variables", "characters", "passkey"])
    left = [kind for kind in ("variables", "characters", "passkey") if kind not in short.unseen]
    assert left and all(any(f"{kind} is left out of the proof" in note for note in short.notes) for kind in left)
    one = texts["one"]
    with pytest.raises(KvtailorError, match="two are the same"):
        material_of(demo, {"one": one, "again": one}, context=CONTEXT)
    # One text that begins anew in its middle: each half is the other.
    with pytest.raises(KvtailorError, match="stand in those that are searched too"):
        material_of(demo, {"twice": one[:15_000] + "\n\n" + one[:15_000]}, context=CONTEXT)
    with pytest.raises(KvtailorError, match="are different, and at least"):
        material_of(demo, {"one": one, "dull": "It was the same again on that day as well. " * 3000}, context=CONTEXT)
    lines = [f"entry {n} : the pump of hall seven was switched on by the guard ." for n in range(1500)]
    repeated = material_of(demo, {"log": "\n".join(lines)}, context=CONTEXT, kinds=[])
    assert repeated.distinct < 0.9 and any("runs of 8 words" in note for note in repeated.notes)


@pytest.mark.parametrize(
    "more, sentence",
    [
        ({"context": 4000}, "has 4096 positions"),
        ({"context": 3000}, "at least 4 and 5 are needed"),
        ({"context": CONTEXT, "kinds": ["nedle"]}, "did you mean 'needle'"),
        ({"context": CONTEXT, "kinds": ["needle"], "unseen": ["needle"]}, "name another family"),
    ],
)
def test_what_cannot_be_measured_is_refused(demo, texts, more, sentence):
    with pytest.raises(KvtailorError, match=sentence):
        material_of(demo, texts, **more)


def test_texts_come_by_path_or_as_they_are(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("from a file")
    assert named_texts(str(path)) == {"notes.txt": "from a file"}
    assert named_texts(["a text\nof its own", path, path]) == {
        "text 1": "a text\nof its own",
        "notes.txt": "from a file",
        "notes.txt (2)": "from a file",
    }
    assert named_texts({"mine": "text"}) == {"mine": "text"}
    for nothing in ([], None, 3, "  "):
        with pytest.raises(KvtailorError):
            named_texts(nothing)


def test_generated_text_has_the_windows_that_were_asked_for(demo):
    found = material_of(demo, generated(CONTEXT, 12), context=CONTEXT, kinds=[])
    assert found.sizes["windows to search"] + found.sizes["windows that judge"] >= 12
