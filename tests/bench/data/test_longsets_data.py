import gzip
import hashlib
import json
import sys
import zipfile
from types import SimpleNamespace

import pytest
from tests.support.bench.dummy import RecallModel, subject
from tests.support.bench.longset_rows import ChatTokenizer, lines_to, longbench_row, scrolls_row

from kvtailor.bench.data.longsets import BENCHMARKS, long_set, read_examples
from kvtailor.bench.data.longsets.prompts import zeroscrolls_ids
from kvtailor.bench.tasks.longcontext import LongContext
from kvtailor.errors import KvtailorError, UnknownName

# Of LongBench/config/dataset2prompt.json at 2e00731f8d0b, as JSON with sorted keys.
OFFICIAL_PROMPTS = "e7d865d712fe45e2455f5e864ac474001d7758d68d349e76ffbcdd382483358f"


def test_the_official_templates_are_there_to_the_letter():
    prompts = {name: each.prompt for name, each in BENCHMARKS["longbench"].items()}
    coded = json.dumps(prompts, sort_keys=True, ensure_ascii=False).encode()
    assert len(prompts) == 21 and hashlib.sha256(coded).hexdigest() == OFFICIAL_PROMPTS
    assert len(BENCHMARKS["zeroscrolls"]) == 10
    plain = {name for name, each in BENCHMARKS["longbench"].items() if not each.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_a_zeroscrolls_document_loses_its_end(tmp_path):
    lines_to(tmp_path / "zero_scrolls" / "musique" / "validation.jsonl", [scrolls_row("a", "D" * 500, "Who?", "Anna")])
    chosen, [example] = long_set("zeroscrolls", "musique"), read_examples("zeroscrolls", "musique", tmp_path)[0]
    given, text = subject(RecallModel()), example.fields["input"]
    assert bytes(zeroscrolls_ids(given, chosen, example, None).tolist()).decode() == text
    assert bytes(zeroscrolls_ids(given, chosen, example, len(text)).tolist()).decode() == text
    ending = "... [The rest of the text is omitted]\n\nWho?\n\nAnswer:\n"
    made = bytes(zeroscrolls_ids(given, chosen, example, 200).tolist()).decode()
    assert made == text[: 200 - len(ending)] + ending and len(made) == 200
    with pytest.raises(KvtailorError, match=f"query of example a of musique alone has {len(ending)}"):
        zeroscrolls_ids(given, chosen, example, len(ending))
    object.__setattr__(given, "tokenizer", ChatTokenizer())
    made = bytes(zeroscrolls_ids(given, chosen, example, None).tolist()).decode()
    body = text[text.index("\n\n") : text.index("\n\nAnswer:")]
    asked = "You are given a text. Answer the question. Do not provide any explanation."
    assert made == f"<u>{asked}{body}</u>"
    made = bytes(zeroscrolls_ids(given, chosen, example, 200).tolist()).decode()
    ending = "... [The rest of the text is omitted]\n\nWho?"
    assert made == f"<u>{(asked + body)[: 200 - len(ending)]}{ending}</u>"
    made = bytes(zeroscrolls_ids(given, long_set("zeroscrolls", "qmsum"), example, None).tolist()).decode()
    assert made == f"<u>{text[: text.index('Answer:') - 2]}</u>"


def test_what_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(UnknownName, match="did you mean 'longbench'"):
        LongContext(benchmark="longbensh", subset="qasper")
    with pytest.raises(UnknownName, match="did you mean 'narrativeqa'"):
        LongContext(benchmark="longbench", subset="narrative_qa")
    with pytest.raises(ValueError, match="examples is 0: .* equal to 1"):
        LongContext(benchmark="longbench", subset="qasper", examples=0)
    with pytest.raises(ValueError, match="max_tokens is 1: .* equal to 2"):
        LongContext(benchmark="longbench", subset="qasper", max_tokens=1)
    for benchmark, file in (("longbench", "qasper.dev.jsonl"), ("zeroscrolls", "qasper/validation.jsonl")):
        with pytest.raises(KvtailorError, match=f"'qasper' of {benchmark}.*none of .*{file}"):
            read_examples(benchmark, "qasper", tmp_path)
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
        with pytest.raises(KvtailorError, match="pip install huggingface_hub"):
            read_examples(benchmark, "qasper", None)
        lines_to(tmp_path / file, [])
        with pytest.raises(KvtailorError, match="has no examples"):
            read_examples(benchmark, "qasper", tmp_path)
        lines_to(tmp_path / file, [{"input": "x"}])
        with pytest.raises(KvtailorError, match="row 0 lacks (context, answers|query_start_index)"):
            read_examples(benchmark, "qasper", tmp_path)
    lines_to(tmp_path / "qasper" / "validation.jsonl", [scrolls_row("a", "D", "Who?", None)])
    with pytest.raises(KvtailorError, match="no right answer.*public"):
        read_examples("zeroscrolls", "qasper", tmp_path)


NAMES = {
    "longbench": (
        "qasper.jsonl",
        "qasper.json",
        "qasper.jsonl.gz",
        "qasper.json.gz",
        "qasper.parquet",
        "qasper.dev.jsonl",
        "qasper.first100.jsonl.gz",
        "longbench/qasper.test.json",
        "LongBench/qasper.jsonl.gz",
        "qasper/test.jsonl",
        "qasper/test.dev.jsonl",
        "qasper-00000-of-00001.parquet",
        "data/qasper/test-00000-of-00001.parquet",
    ),
    "zeroscrolls": (
        "qasper/validation.jsonl",
        "qasper/validation.json.gz",
        "zero_scrolls/qasper/validation.dev.jsonl",
        "qasper/validation.parquet",
        "qasper/qasper/validation.jsonl.gz",
    ),
}


@pytest.mark.parametrize(("benchmark", "name"), [(each, name) for each, names in NAMES.items() for name in names])
def test_any_name_that_the_other_loaders_take_is_taken(benchmark, name, tmp_path):
    row = longbench_row("D", ["Anna"]) if benchmark == "longbench" else scrolls_row("a", "D", "Who?", "Anna")
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        line = (json.dumps(row) + "\n").encode()
        file.write_bytes(gzip.compress(line) if file.suffix == ".gz" else line)
    [example], origin = read_examples(benchmark, "qasper", tmp_path)
    assert example.references == ("Anna",) and origin == str(file)


def test_several_files_of_one_set_are_not_mixed(tmp_path):
    for part in ("dev", "test"):
        lines_to(tmp_path / f"qasper.{part}.jsonl", [longbench_row("D", ["Anna"])])
    with pytest.raises(KvtailorError, match=r"several files of it: qasper.dev.jsonl, qasper.test.jsonl; keep one"):
        read_examples("longbench", "qasper", tmp_path)
    lines_to(tmp_path / "qasper.jsonl", [longbench_row("D", ["Anna"])])
    assert read_examples("longbench", "qasper", tmp_path)[1].endswith("qasper.jsonl")


def test_archives_are_read_from_a_folder_and_from_the_hub(tmp_path, monkeypatch):
    asked = []
    rows = {
        "data.zip": ("data/passage_retrieval_en.jsonl", longbench_row("c", ["Paragraph 1"])),
        "musique.zip": ("musique/validation.jsonl", scrolls_row("a", "D", "Who?", "x")),
    }
    for name, (member, row) in rows.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(member, json.dumps(row) + "\n")
            archive.writestr(f"__MACOSX/._{member.split('/')[1]}", "nonsense")

    def download(name, file, *, repo_type, revision):
        asked.append((name, file, repo_type, revision))
        return str(tmp_path / file)

    api = SimpleNamespace(dataset_info=lambda name: SimpleNamespace(sha="c0ffee"))
    hub = SimpleNamespace(HfApi=lambda: api, hf_hub_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for benchmark, subset, archive, right in (
        ("longbench", "passage_retrieval_en", "data.zip", "Paragraph 1"),
        ("zeroscrolls", "musique", "musique.zip", "x"),
    ):
        for data, where in ((tmp_path, str(tmp_path / archive)), (None, "@c0ffee")):
            [example], origin = read_examples(benchmark, subset, data)
            assert example.references == (right,) and origin.endswith(where)
    assert asked == [
        ("THUDM/LongBench", "data.zip", "dataset", "c0ffee"),
        ("tau/zero_scrolls", "musique.zip", "dataset", "c0ffee"),
    ]
    with pytest.raises(KvtailorError, match="qasper.jsonl.*has 0 files of that name"):
        read_examples("longbench", "qasper", tmp_path)
    (tmp_path / "data.zip").write_text("no archive")
    with pytest.raises(KvtailorError, match="cannot be read"):
        read_examples("longbench", "qasper", tmp_path)
    hub.hf_hub_download = lambda *given, **more: (_ for _ in ()).throw(ConnectionError("no engine"))
    with pytest.raises(KvtailorError, match=r"no engine.*data="):
        read_examples("longbench", "qasper", None)
