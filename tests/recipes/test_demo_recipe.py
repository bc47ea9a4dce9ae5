"""The recipe of the embedded models, each step on a few kilobytes: rows, resuming, shards, export, orders."""

import json
import sys

import numpy as np
import pytest
import torch

from kvtailor.bench.data.synthetic import words
from kvtailor.bench.data.synthetic.documents import make_document, random_source
from kvtailor.bench.schema import Record
from kvtailor.errors import FileError
from kvtailor.hf.model.loading import load, new_model
from recipes import demo
from recipes.demo import checkpoint, measures, schedule, separate, tokenizer, train
from recipes.demo.architecture import ARCHITECTURES
from recipes.demo.corpus import as_wikitext
from recipes.demo.export import export
from recipes.demo.mixture import ANSWER_WEIGHT, Mixture

TINY = "32:64:3:0.5,64:128:2:0.5"


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder as steps 1 and 2 leave it."""
    folder = tmp_path_factory.mktemp("work")
    rng = random_source("corpus", 2_000_000, "train")
    sentences = [words.sentence(rng) for _ in range(400)]
    made = tokenizer.train(iter([*sentences, *tokenizer.generated(30)]), 400)
    made.save(str(folder / "tokenizer.json"))
    ids = [np.array([0, *made.encode(text, add_special_tokens=False).ids, 1], dtype=np.uint16) for text in sentences]
    np.save(folder / "corpus.npy", np.concatenate(ids))
    (folder / "corpus.json").write_text(json.dumps({"book_tokens": sum(map(len, ids[:200]))}))
    (folder / "sentences.json").write_text(json.dumps(sentences))
    return folder


def train_with(monkeypatch, work, **options):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["train", f"--work={work}", "--phases", TINY, "--threads=1", *words])
    train.main()


def test_a_row_is_a_function_of_its_state_and_fills_its_length(work):
    mixture = Mixture(work)
    for length in (64, 257, 1024):
        for natural in (0.0, 0.5, 1.0):
            rows = [mixture.row(state, length, natural) for state in (3, 3, 4)]
            assert all(row.tokens.shape == (length + 1,) and row.weights.shape == (length,) for row in rows)
            assert np.array_equal(rows[0].tokens, rows[1].tokens)
            assert not np.array_equal(rows[0].tokens, rows[2].tokens)
    assert set(np.unique(mixture.row(1, 64, 1.0).weights)) == {1.0}


def test_answers_and_nothing_else_weigh_most(work):
    """Each run of answer tokens follows a question and, put after it, is found in the row's own context."""
    mixture, found = Mixture(work), 0
    for state in range(40):
        row = mixture.row(state, 1024, 0.0)
        text = mixture.tokenizer.decode(row.tokens.tolist())
        heavy = np.flatnonzero(row.weights == ANSWER_WEIGHT)
        for run in np.split(heavy, np.flatnonzero(np.diff(heavy) > 1) + 1) if heavy.size else []:
            before = mixture.tokenizer.decode(row.tokens[: run[0] + 1].tolist())
            answer = mixture.tokenizer.decode(row.tokens[run + 1].tolist()).strip()
            assert "Answer:" in before[-400:] and "Question" not in answer
            assert answer.split(",")[0].split(" = ")[-1].split()[0] in text
            found += 1
    assert found > 100


@pytest.mark.long
def test_training_in_pieces_gives_what_training_at_once_gives(work, monkeypatch):
    for name in demo.NAMES:
        train_with(monkeypatch, work, model=name, run=f"{name}-once")
        for _ in range(6):  # the last finds nothing left to do
            train_with(monkeypatch, work, model=name, run=f"{name}-pieces", minutes=0)
        once, pieces = (checkpoint.load_checkpoint(work / f"{name}-{how}") for how in ("once", "pieces"))
        assert once[1]["step"] == pieces[1]["step"] == 5 and once[1]["tokens"] == pieces[1]["tokens"] == 448
        assert once[0].keys() == pieces[0].keys()
        for tensor in once[0]:
            torch.testing.assert_close(once[0][tensor], pieces[0][tensor], rtol=0, atol=0)
        log = [json.loads(line) for line in (work / f"{name}-pieces.jsonl").read_text().splitlines()]
        assert [line["step"] for line in log] == [1, 2, 3, 4, 5]


@pytest.mark.long
def test_two_processes_train_what_one_does(work, monkeypatch):
    train_with(monkeypatch, work, run="alone")
    train_with(monkeypatch, work, run="together", processes=2)
    alone, together = (checkpoint.load_checkpoint(work / name) for name in ("alone", "together"))
    assert alone[1]["step"] == together[1]["step"] == 5
    logs = [
        [json.loads(line) for line in (work / f"{n}.jsonl").read_text().splitlines()] for n in ("alone", "together")
    ]
    for one, two in zip(*logs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=0.02)
    one, two = (found[0]["model.model.layers.5.mlp.down_proj.weight"] for found in (alone, together))
    assert torch.nn.functional.cosine_similarity(one.flatten(), two.flatten(), dim=0) > 0.995


def test_more_processes_than_rows_are_refused(work, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        train_with(monkeypatch, work, run="crowd", processes=3)
    assert "--processes is 3, but a step has as few as 2 rows: give 1 to 2" in capsys.readouterr().err


def test_a_teacher_is_followed(work, monkeypatch, tmp_path):
    train_with(monkeypatch, work, run="teacher", minutes=0)
    export("demo", work / "teacher", work / "tokenizer.json", tmp_path / "teacher")
    model = new_model(**ARCHITECTURES["demo-draft"], vocab_size=400)
    teacher, _ = load(tmp_path / "teacher", dtype=torch.float32)
    tokens, weights = train.batch_at(Mixture(work), 0, schedule.Phase(64, 128, 1, 1.0))
    optimizers = train.optimizers_of(model, 5e-3, 0.01)
    seen = []
    for _ in range(12):
        seen.append(train.means(train.backward(model, tokens, weights, teacher))["loss"])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same, overlap, count = measures.agreement(teacher, model.eval(), tokens.tolist())
    assert seen[-1] < seen[0] and count == tokens.numel() and 0 < same <= 1 and 0 < overlap < 1
    assert measures.agreement(teacher, teacher, tokens.tolist())[:2] == (1.0, pytest.approx(1.0))


def test_gradients_do_not_depend_on_how_many_rows_go_through_at_once(work, monkeypatch):
    torch.manual_seed(0)
    model = new_model(**ARCHITECTURES["demo"], vocab_size=400)
    tokens, weights = train.batch_at(Mixture(work), 0, schedule.Phase(64, 256, 1, 0.5))
    found = []
    for at_once in (64, 4096):
        monkeypatch.setattr(train, "MICRO_TOKENS", {"cpu": at_once})
        seen = train.means(train.backward(model, tokens, weights))
        found.append((seen, model.model.layers[0].mlp.down_proj.weight.grad.clone()))
        model.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-2)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.05, atol=2e-4)


@pytest.mark.parametrize("name", demo.NAMES)
def test_export_writes_shards_that_load_as_the_same_model(work, monkeypatch, tmp_path, name):
    train_with(monkeypatch, work, model=name, run=f"{name}-export", minutes=0)
    export(name, work / f"{name}-export", work / "tokenizer.json", tmp_path / name)
    model, made = load(tmp_path / name)
    saved = checkpoint.load_checkpoint(work / f"{name}-export")[0]
    for key, value in model.named_parameters():
        assert torch.equal(value, saved[f"model.{key}"].to(torch.bfloat16))
    assert made("a")["input_ids"][0] == made.bos_token_id == model.config.bos_token_id
    assert max(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")) <= 8_100_000
    with pytest.raises(FileError, match="does not exist: run the recipe's earlier steps"):
        export(name, work / "absent", work / "tokenizer.json", tmp_path / "absent")


def test_a_checkpoint_survives_a_kill_at_any_moment(tmp_path):
    first, second = {"a": torch.arange(4.0)}, {"a": torch.arange(4.0) + 1}
    place = tmp_path / "run"
    assert checkpoint.load_checkpoint(place) is None
    checkpoint.save_checkpoint(place, first, {"step": 1})
    place.rename(tmp_path / "run.old")
    checkpoint.save_checkpoint(tmp_path / "run.part", second, {"step": 2})
    tensors, facts = checkpoint.load_checkpoint(place)
    assert facts == {"step": 1} and torch.equal(tensors["a"], first["a"])
    checkpoint.save_checkpoint(place, second, {"step": 2})
    assert checkpoint.load_checkpoint(place)[1] == {"step": 2} and [f.name for f in tmp_path.iterdir()] == ["run"]


def test_a_checkpoint_is_cut_into_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 1000)
    tensors = {str(i): torch.randn(100) for i in range(7)}
    checkpoint.save_checkpoint(tmp_path / "run", tensors, {})
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 4
    found, _ = checkpoint.load_checkpoint(tmp_path / "run")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match="asked to save large of 1,200 bytes, but a shard holds 1,000"):
        checkpoint.save_checkpoint(tmp_path / "run", {"large": torch.randn(300)}, {})
    assert checkpoint.load_checkpoint(tmp_path / "run")[0].keys() == tensors.keys()


def test_wikitext_is_spelled_as_the_benchmark_spells_it():
    text = "History.\nIt cost 1,000.5 dollars (then a well-known sum), \"they\" said. Smith's aide didn't."
    assert as_wikitext("A Title", text) == (
        " = A Title = \n \n \n = = History = = \n \n"
        " It cost 1 @,@ 000 @.@ 5 dollars ( then a well @-@ known sum ) , \" they \" said . Smith 's aide did n't . "
    )


class Fixed(torch.nn.Module):
    """A model whose next token is what a function of the ids says."""

    device = torch.device("cpu")

    def __init__(self, next_of, size=50):
        super().__init__()
        self.next_of, self.size = next_of, size

    def forward(self, input_ids, use_cache=False, logits_to_keep=0):
        ids = torch.tensor([[self.next_of(row[: i + 1]) for i in range(len(row))] for row in input_ids.tolist()])
        logits = 20.0 * torch.nn.functional.one_hot(ids, self.size).float()
        return type("Out", (), {"logits": logits[:, -logits_to_keep:] if logits_to_keep else logits})


def test_a_longer_context_is_worth_what_it_tells():
    """The last tokens repeat what stands 40 places before: a context that reaches there knows them, a shorter not."""
    row = list(range(40)) + list(range(40))
    model = Fixed(lambda ids: ids[-40] if len(ids) >= 41 else 49)
    short, long = measures.nats_by_context(model, 48, row, [20, 60], scored=8)
    assert short > 15 and long < 1e-3


def test_a_quiz_asks_for_all_it_tells():
    made = measures.quiz(0, 600, lambda text: len(text.split()))
    context, *questions = made.split("\nQuestion: ")
    assert len(made.split()) >= 590 and len(questions) >= 6
    for question in questions:
        asked, answer = question.split(" Answer: ")
        assert answer.removesuffix(".").split(" ")[-1].split(":")[-1] in context
    assert made == measures.quiz(0, 600, lambda text: len(text.split())) != measures.quiz(1, 600, len)


def test_recall_counts_parts_in_any_order():
    class Words:
        bos_token_id = 0

        def __call__(self, text, add_special_tokens=True, return_tensors=None):
            ids = text.split()
            return Batch(input_ids=torch.zeros(1, len(ids), dtype=torch.long)) if return_tensors else {"input_ids": ids}

        def decode(self, ids, skip_special_tokens):
            return self.said

    class Batch(dict):
        def to(self, device):
            return self

    class Model:
        device = "cpu"

        def generate(self, input_ids, max_new_tokens, do_sample):
            return torch.zeros(1, input_ids.shape[1] + max_new_tokens)

    document, words = make_document("multi_value", state=0, length=900), Words()
    words.said = f" {document.parts[2]}, {document.parts[0]}, 1"
    assert measures.recall(Model(), words, document) == 0.5


def record(label, task, values):
    return Record(
        run="r",
        started="s",
        model="m",
        label=label,
        plan=label,
        plan_hash=label,
        task=task,
        task_version=1,
        values=values,
    )


def test_orders_are_judged_by_paired_intervals_and_broken_ones_are_found():
    order = separate.Order("good", "bad", "perplexity")
    noise = [0.1 * (i % 7) for i in range(30)]
    good = record("good", "perplexity", {"nll": tuple(2 + x for x in noise)})
    bad = record("bad", "perplexity", {"nll": tuple(2.5 + x + 0.01 * (i % 3) for i, x in enumerate(noise))})
    ((_, _, found),) = separate.compare([good, bad], order)
    assert found.low > 0.49 and found.value == pytest.approx(0.51)
    ((_, _, reverse),) = separate.compare([good, bad], separate.Order("bad", "good", "perplexity"))
    assert reverse.high < 0
    with pytest.raises(ValueError, match="'worse' on perplexity: it was not measured"):
        separate.compare([good], separate.Order("good", "worse", "perplexity"))
    with pytest.raises(ValueError, match="no room"):
        separate.samples(
            [record("a", "needle", None).__class__(**{**good.__dict__, "error": "no room"})],
            "good",
            "perplexity",
            "nll",
        )


def test_the_tables_have_every_plan_and_keep():
    plans = ["full", *separate.QUANTISED, *(f"{p} @ keep={k}" for p in separate.EVICTING for k in separate.KEEPS)]
    records = [
        record(label, task, {"hit": (1.0, 0.0, 1.0, 1.0, 0.0, float(i > 3)), "nll": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0 + i)})
        for i, label in enumerate(plans)
        for task in ("needle", "perplexity")
    ]
    text = separate.tables(records)
    assert all(text.count(f"| {plan} |") == 3 for plan in (*separate.EVICTING, *separate.QUANTISED))
    assert "full cache 50" in text and "NaN" not in text
    assert len(separate.compare(records, separate.EXPECTED[0])) == len(separate.KEEPS)


def test_an_unknown_embedded_model_is_refused():
    with pytest.raises(ValueError, match="'demo-large', but there are demo, demo-draft"):
        demo.path("demo-large")
