import gzip
import hashlib
import json
import sys
from types import SimpleNamespace

import pytest

from kvtailor.bench.data import corpora
from kvtailor.bench.data.corpora import CORPORA, corpus
from kvtailor.errors import KvtailorError, UnknownName
from recipes import demo

LINES = [" ", " = A heading = ", " ", " One line of text\u2028with a separator . ", " Another , the last . "]


@pytest.fixture
def standard(monkeypatch):
    """A made-up WikiText-2, known to the module by its digest."""
    raw = "".join(f"{line}\n" for line in LINES)
    monkeypatch.setattr(corpora, "_WIKITEXT2_SHA256", hashlib.sha256(raw.encode()).hexdigest())
    return raw


def hub(monkeypatch, rows, refuses=None):
    """Stands for `datasets` and `huggingface_hub`; gives the list of what was asked of them."""
    asked = []

    def load_dataset(name, config, *, split, revision, streaming):
        asked.append((name, config, split, revision))
        if refuses:
            raise refuses
        return iter(rows)

    api = SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha="c0ffee"))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    return asked


def books(folder, sizes):
    folder.mkdir(parents=True)
    for name, size in sizes.items():
        (folder / f"{name}.txt").write_text(name[0] * size)


def documents(path, count, opened=open):
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "wt") as lines:
        lines.writelines(json.dumps({"text": f"{path.name} {i}", "url": "x"}) + "\n" for i in range(count))


@pytest.mark.parametrize("place", ["wikitext2/wiki.test.raw", "wikitext-2-raw-v1/wiki.test.raw", "test.raw.txt"])
def test_wikitext2_is_joined_as_the_field_does_from_file_and_hub(tmp_path, monkeypatch, standard, place):
    rows = [{"text": f"{line}\n" if line.strip() else ""} for line in LINES]
    by_hand = "\n\n".join(row["text"] for row in rows)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_bytes(standard.encode())
    local = corpus("wikitext2", data=tmp_path)
    assert local.text == by_hand and local.source == "wikitext2"
    assert local.origin == f"{tmp_path / place} sha256:{hashlib.sha256(standard.encode()).hexdigest()}"
    asked = hub(monkeypatch, rows)
    distant = corpus("wikitext2")
    assert distant.text == by_hand and asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", "c0ffee")]
    assert distant.origin.startswith("hub:Salesforce/wikitext@c0ffee sha256:")


def test_a_parquet_file_is_read_as_well(tmp_path, standard):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "wikitext2").mkdir()
    rows = [{"text": f"{line}\n" if line.strip() else ""} for line in LINES]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "wikitext2" / "test-00000-of-00001.parquet")
    assert corpus("wikitext2", data=tmp_path).text == "\n\n".join(row["text"] for row in rows)


def test_another_text_under_wikitext2s_name_is_refused(tmp_path, standard):
    (tmp_path / "test.raw.txt").write_text(standard.replace("One", "<unk>"))
    with pytest.raises(KvtailorError, match="not the raw test split.*original file"):
        corpus("wikitext2", data=tmp_path)


@pytest.mark.parametrize(("wanted", "parts"), [(1, 1), (len("validation.jsonl 0") + 1, 2), (None, 40)])
def test_c4_is_cut_after_a_whole_document(tmp_path, wanted, parts):
    documents(tmp_path / "c4_en" / "validation.jsonl", 40)
    found = corpus("c4", data=tmp_path, characters=wanted)
    assert all(found.text[at - 2 : at] == "\n\n" for at in found.starts[1:]) and found.starts[0] == 0
    assert len(found.starts) == found.text.count("\n\n") + 1
    assert found.text == "\n\n".join(f"validation.jsonl {i}" for i in range(parts))
    assert found.origin == str(tmp_path / "c4_en" / "validation.jsonl")


def test_c4_reads_the_hubs_packed_files_in_order(tmp_path, monkeypatch):
    for number in (1, 0):
        documents(tmp_path / "en" / f"c4-validation.0000{number}-of-00008.json.gz", 2, gzip.open)
    text = corpus("c4", data=tmp_path).text
    names = [f"c4-validation.0000{n}-of-00008.json.gz {i}" for n in (0, 1) for i in (0, 1)]
    assert text == "\n\n".join(names)
    asked = hub(monkeypatch, [{"text": each} for each in names])
    assert corpus("c4", characters=60).text == "\n\n".join(names[:2])
    assert asked == [("allenai/c4", "en", "validation", "c0ffee")]


@pytest.mark.parametrize("name", ["c4", "pg19"])
def test_files_of_another_set_are_no_corpus(tmp_path, name):
    """Names such as test.jsonl say nothing outside of a folder of the corpus' name."""
    books(tmp_path / "mine", {"900": 30})
    documents(tmp_path / "mine" / "test.jsonl", 40)
    documents(tmp_path / "mine" / "lambada" / "test.jsonl", 40)
    with pytest.raises(KvtailorError, match=f"{name}.* which has none of"):
        corpus(name, data=tmp_path / "mine")
    (tmp_path / "mine").rename(tmp_path / f"{name}-part")
    assert corpus(name, data=tmp_path / f"{name}-part").source == name


def test_pg19_gives_whole_books_by_number(tmp_path):
    books(tmp_path / "pg19" / "test", {"900": 30, "1000": 30, "20": 30})
    found = corpus("pg19", data=tmp_path, characters=31)
    assert found.text == "2" * 30 + "\n\n" + "9" * 30 and found.source == "pg19"
    assert corpus("pg19", data=tmp_path).text.endswith("1" * 30)


def test_other_books_are_named_as_what_they_are(tmp_path):
    books(tmp_path / "books_eval", {"B": 9, "A": 9})
    for folder in (tmp_path, tmp_path / "books_eval"):
        found = corpus("pg19", data=folder)
        assert found.source == "books_eval" and found.text == "A" * 9 + "\n\n" + "B" * 9


def test_a_network_that_breaks_off_is_an_error_and_no_shorter_text(monkeypatch):
    def breaks_off():
        yield {"text": "the first document"}
        raise TimeoutError("read timed out")

    hub(monkeypatch, breaks_off())
    with pytest.raises(KvtailorError, match=r"corpus 'c4'.*read timed out.*data="):
        corpus("c4", characters=100)


def test_what_is_not_there_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(UnknownName, match="did you mean 'wikitext2'"):
        corpus("wikitext")
    for name in CORPORA:
        with pytest.raises(KvtailorError, match="which is no folder"):
            corpus(name, data=tmp_path / "nowhere")
        with pytest.raises(KvtailorError, match=rf"none of .*{'txt' if name == 'pg19' else 'test'}.*no folder for the"):
            corpus(name, data=tmp_path)
        hub(monkeypatch, [], refuses=ConnectionError("no engine to host"))
        with pytest.raises(KvtailorError, match=r"no engine to host.*data="):
            corpus(name)
        hub(monkeypatch, [])
        with pytest.raises(KvtailorError, match="no rows"):
            corpus(name)
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(KvtailorError, match="pip install datasets"):
            corpus(name)
    documents(tmp_path / "c4" / "test.jsonl", 3)
    with pytest.raises(KvtailorError, match="asked for 1000 characters of c4.*has 40"):
        corpus("c4", data=tmp_path, characters=1000)
    with pytest.raises(KvtailorError, match="at least 1"):
        corpus("c4", data=tmp_path, characters=0)
    (tmp_path / "c4" / "test.jsonl").write_text('{"title": "x"}\n')
    with pytest.raises(KvtailorError, match="no field 'text'"):
        corpus("c4", data=tmp_path)
    (tmp_path / "c4" / "test.jsonl").write_text('{"text": "x"}\nnonsense\n')
    with pytest.raises(KvtailorError, match="line 2 is no JSON"):
        corpus("c4", data=tmp_path)
    (tmp_path / "c4" / "test.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(KvtailorError, match="cannot be read"):
        corpus("c4", data=tmp_path)


@pytest.mark.parametrize(("name", "size"), [("wikitext2", 1_294_000), ("c4", 1_100_000), ("pg19", 4_000_000)])
def test_the_shared_data_is_read(name, size):
    data = demo.data_folder()
    if not data.is_dir():
        pytest.skip(f"no {data}: set KVTAILOR_DATA to a folder with the corpora")
    found = corpus(name, data=data)
    assert size < len(found.text) < 1.3 * size
    assert (
        corpus(name, data=data, characters=1000).text
        == found.text[: len(corpus(name, data=data, characters=1000).text)]
    )
