"""The embedded model: it loads fast, its tokenizer round-trips, its recipe is deterministic, it retrieves."""

from pathlib import Path

import pytest
import torch

from kvtailor.bench.data.synthetic.documents import make_document
from kvtailor.hf.model.loading import load, new_model
from recipes import demo
from recipes.demo.evaluate import table
from recipes.demo.measures import agreement, bits_per_byte, continues_with, retrieval
from recipes.demo.schedule import Phase, parse_phases, phase_at, rate_at

TEXTS = [
    "The quick brown fox, 48213 times.\n\n  Two spaces",
    " a=b;\t\r\n",
    "naïve café — “quotes” 日本語 \U0001f600 \u0000\u200d",
]

TEXT = (Path(__file__).parents[1] / "data" / "gettysburg.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def loaded():
    return load("demo", dtype=torch.float32)


@pytest.mark.parametrize("name", demo.NAMES)
def test_loads_in_half_precision_ready_to_generate(name):
    model, tokenizer = load(name, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16 and not model.training
    assert model.config.max_position_embeddings == 4096
    assert tokenizer.padding_side == "left" and 4000 <= len(tokenizer) <= 8192


def test_the_two_models_are_what_the_card_says():
    sizes = {}
    for name in demo.NAMES:
        model, _ = load(name)
        sizes[name] = sum(parameter.numel() for parameter in model.parameters())
        card = (demo.path(name) / "README.md").read_text(encoding="utf-8")
        assert f"{sizes[name]:,}" in card
        if name == "demo":
            config = model.config
            assert config.model_type == "llama" and config.num_hidden_layers >= 6 and config.head_dim == 64
            assert config.num_attention_heads > config.num_key_value_heads == 2
        else:
            assert model.config.model_type == "gpt_neox"
    assert 6_000_000 <= sizes["demo"] <= 16_000_000 and 4 * sizes["demo-draft"] <= sizes["demo"]
    files = [(demo.path(name) / "tokenizer.json").read_bytes() for name in demo.NAMES]
    assert files[0] == files[1]


def test_weights_are_small_and_have_a_card():
    files = [file for name in demo.NAMES for file in demo.path(name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 32_000_000
    assert max(file.stat().st_size for file in files) <= 16 * 2**20
    for name in demo.NAMES:
        names = {file.name for file in demo.path(name).iterdir()}
        assert {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
        assert any(each.endswith(".safetensors") for each in names)


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_round_trips_every_text(loaded, text):
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_tokenizer_splits_digits_starts_with_bos_and_has_its_own_pad(loaded):
    tokenizer = loaded[1]
    ids = tokenizer("48213")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == 6
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3


@pytest.mark.parametrize("task", ["needle", "key_value", "characters", "copy_span", "variables"])
def test_prompt_and_answer_tokenize_as_their_concatenation(loaded, task):
    tokenizer = loaded[1]
    for state in range(5):
        document = make_document(task, state=state, length=1200)
        whole = tokenizer(document.prompt + document.answer)["input_ids"]
        assert whole == (
            tokenizer(document.prompt)["input_ids"] + tokenizer(document.answer, add_special_tokens=False)["input_ids"]
        )


def test_retrieves_from_a_thousand_tokens_clearly_above_chance(loaded):
    model, tokenizer = loaded
    results = list(retrieval(model, tokenizer, ["needle", "passkey"], [256, 1024], [0.0, 0.5, 1.0], 1))
    scores = [score for result in results for score in result.scores]
    assert sum(scores) >= 0.9 * len(scores), table(results, [256, 1024])


@pytest.mark.long
def test_retrieves_from_four_thousand_tokens(loaded):
    results = list(retrieval(*loaded, ["needle"], [4096], [0.0, 0.4, 0.8], 1))
    assert sum(sum(result.scores) for result in results) >= 2, table(results, [4096])


def test_the_draft_foresees_the_model(loaded):
    """Far more often than two models that only know which tokens are frequent."""
    model, tokenizer = loaded
    draft, _ = load("demo-draft", dtype=torch.float32)
    windows = [tokenizer(TEXT[i : i + 1500])["input_ids"] for i in (0, 700)]
    same, overlap, _ = agreement(model, draft, windows)
    assert same > 0.3 and overlap > 0.3


def test_drafting_changes_no_token(loaded):
    model, tokenizer = loaded
    draft, _ = load("demo-draft", dtype=torch.float32)
    inputs = tokenizer(TEXT[:600], return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    alone = model.generate(**inputs, **options)
    assert torch.equal(alone, model.generate(**inputs, **options, assistant_model=draft))


def test_one_pass_retrieval_agrees_with_generating(loaded):
    model, tokenizer = loaded
    for state in range(4):
        document = make_document("needle", state=state, length=900)
        inputs = tokenizer(document.prompt, return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert continues_with(model, tokenizer, document.prompt, document.answer) == tokenizer.decode(made).startswith(
            document.answer
        )


def test_speaks_better_than_the_best_guess_without_context(loaded):
    file = demo.data_folder() / "wikitext2" / "test.raw.txt"
    if not file.is_file():
        pytest.skip(f"no {file}: set KVTAILOR_DATA to a folder that has wikitext2/test.raw.txt")
    value, windows = bits_per_byte(*loaded, file.read_text(encoding="utf-8"), 512, 4)
    assert windows == 4 and value < 2.6


def test_schedule_covers_all_steps_and_ends_low():
    phases = parse_phases("256:512:3:0.1,512:512:2:0.5")
    assert [phase_at(step, phases).length for step in range(5)] == [256, 256, 256, 512, 512]
    assert phases[0] == Phase(256, 512, 3, 0.1)
    rates = [rate_at(step, 10, 2, 0.5) for step in range(10)]
    assert rates[0] == 0.5 and max(rates) == 1.0 and rates[-1] == pytest.approx(0.2)
    with pytest.raises(ValueError, match="tokens a multiple of length"):
        parse_phases("256:500:3:0.1")


def test_new_models_follow_the_random_state():
    tiny = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 100_000.0,
    }
    weights = []
    for state in (0, 0, 1):
        torch.manual_seed(state)
        model = new_model("llama", **tiny)
        weights.append(model.model.layers[0].self_attn.q_proj.weight)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    assert model.config.rope_parameters["rope_theta"] == 100_000.0


def test_a_missing_model_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*give an existing folder, a hub name, or 'demo'"):
        load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load(tmp_path)


def test_untrained_models_have_the_shape_of_their_name(monkeypatch):
    """The large ones are made where and as they are asked for, since there is no room for another copy of them."""
    from kvtailor.bench.subject import Subject
    from kvtailor.hf.model import loading
    from kvtailor.hf.model.config import RANDOM_SHAPES, config_of

    assert config_of("random-llama3-8b").num_key_value_heads == 8
    assert sum(p.numel() for p in _on_meta("random-llama3-8b").parameters()) == 8_030_261_248
    assert sum(p.numel() for p in _on_meta("random-llama2-7b").parameters()) == 6_738_415_616
    asked = []
    made = loading.new_model
    monkeypatch.setattr(loading, "new_model", lambda kind, **how: asked.append(how["dtype"]) or made(kind, **how))
    monkeypatch.setitem(RANDOM_SHAPES, "random-llama3-8b", RANDOM_SHAPES["random-llama"])
    subject = Subject.load("random-llama3-8b", dtype="bfloat16")
    assert not subject.trained and subject.model.dtype == torch.bfloat16 and asked == [torch.bfloat16]
    small = Subject.load("random-llama", dtype="bfloat16")
    assert asked[-1] == torch.float32
    # In 16 bits the angles of late positions would be wrong.
    for model in (subject.model, small.model):
        assert {each.dtype for each in model.buffers() if each.is_floating_point()} == {torch.float32}


def _on_meta(name):
    from transformers import AutoModelForCausalLM

    from kvtailor.hf.model.config import config_of

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name))
