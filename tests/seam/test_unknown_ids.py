"""A tokenizer with more ids than the model has rows is refused in a sentence wherever ids come in."""

import copy
import re

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.fidelity import Fidelity
from kvtailor.bench.tasks.perplexity import Perplexity
from kvtailor.cli import main
from kvtailor.errors import CacheMisuse
from kvtailor.hf.model.loading import new_model
from kvtailor.hf.model.vocabulary import check_ids, token_rows
from tests.support.seam.zoo import build

SAID = r"a token has the id \d+, and the model has rows for 0 to \d+: the tokenizer is of another model.*resize_token"
TEXT = " ".join(f"word{i} and number {i * i} stand here." for i in range(500))


@pytest.fixture(scope="module")
def demo():
    """The embedded model with too few rows."""
    subject = Subject.load("demo", dtype="float32")
    model = copy.deepcopy(subject.model)
    model.resize_token_embeddings(300)
    return Subject(name="short", model=model, tokenizer=subject.tokenizer)


def ways(subject, folder):
    model, tokenizer = subject.model, subject.tokenizer
    ids = tokenizer(TEXT[:200], return_tensors="pt")["input_ids"]
    sizes = {"text": TEXT, "source": "t", "context": 64, "continuation": 16, "windows": 2}
    yield "prefill", lambda: kvtailor.prefill(model, ids, plan="full")
    yield "generate", lambda: kvtailor.generate(model, ids, plan="full", max_new_tokens=2)
    yield "ask", lambda: kvtailor.ask(model, tokenizer, TEXT[:200], "What?", plan="full", max_new_tokens=2)
    yield (
        "ask before",
        lambda: kvtailor.ask(model, tokenizer, TEXT[:200], "What?", plan="full", question="before", max_new_tokens=2),
    )
    yield "read", lambda: kvtailor.read(model, tokenizer, TEXT[:200], plan="full")

    def session():
        with kvtailor.session(model, "full") as s:
            s.generate(ids, max_new_tokens=2)

    yield "session", session
    for kind in (Perplexity, Fidelity):
        yield kind.name, lambda kind=kind: run(subject, contestants_of([]), [kind(**sizes)], bandwidth=False)
    yield "prompt", lambda: subject.prompt(TEXT)


def test_every_way_in_refuses(demo, tmp_path):
    for name, way in ways(demo, tmp_path):
        with pytest.raises(CacheMisuse) as caught:
            way()
        assert re.search(SAID, str(caught.value)), name


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--prompt", TEXT[:300], "--plan", "full", "--max-new-tokens", "3"],
        [
            "bench",
            "--plans",
            "full",
            "--tasks",
            "perplexity",
            "--windows",
            "2",
            "--context",
            "64",
            "--continuation",
            "16",
        ],
        ["calibrate", "lowrank", "--text", "TEXT"],
    ],
)
def test_every_command_refuses(words, demo, tmp_path):
    demo.model.save_pretrained(tmp_path / "model")
    demo.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"word{i} and number {i * i} stand here." for i in range(9000)))
    out = ["--out", str(tmp_path / "out.safetensors" if words[0] == "calibrate" else tmp_path / "out")]
    given = [str(tmp_path / "text.txt") if word == "TEXT" else word for word in words]
    done = CliRunner().invoke(main, [*given, "--model", str(tmp_path / "model"), *(out if "TEXT" in words else [])])
    assert done.exit_code in (1, 2) and re.search(SAID, " ".join(done.output.split())), done.output[-800:]


def test_negative_ids_and_models_without_a_table():
    model = build("llama")
    check_ids(model, torch.tensor([[0, token_rows(model) - 1]]))
    with pytest.raises(CacheMisuse, match="the id -100"):
        check_ids(model, torch.tensor([3, -100]))
    check_ids(object(), torch.tensor([10**9]))


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_a_table_of_positions_that_ends_is_told(kind: str) -> None:
    """torch ends in an `IndexError` that names no position."""
    common = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32}
    more = {"ffn_dim": 32, "word_embed_proj_dim": 32} if kind == "opt" else {}
    model = new_model(kind, vocab_size=100, **common, **more).eval()
    ids = torch.randint(5, 90, (1, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(CacheMisuse, match="of 40 behind 0 seen tokens needs 40 positions, and .* has a table of 32"):
        kvtailor.prefill(model, ids, plan="snapkv @ tokens=8")
    cache = kvtailor.prefill(model, ids[:, :32], plan="snapkv @ tokens=8")
    with pytest.raises(CacheMisuse, match="a forward of 1 behind 32 seen tokens needs 33 positions"):
        kvtailor.prefill(model, ids[:, 32:33], cache=cache)


def test_half_a_character_is_told(demo) -> None:
    """Python reads such from arguments that are not UTF-8, and tokenizers end in a `TypeError` that names none."""
    with pytest.raises(CacheMisuse, match="at character 6, which no UTF-8 has"):
        kvtailor.ask(demo.model, demo.tokenizer, "hello \udcff there", "What?", plan="snapkv @ tokens=64")
    words = ["run", "--model", "demo", "--plan", "full", "--prompt", "a \udcff", "--max-new-tokens", "1"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code, done.output
    assert "which no UTF-8 has" in done.output and "Traceback" not in done.output
