"""Every word of `generate`, by introspection: it works beside a cache of ours, or is refused in a sentence.

What works is what transformers' own cache gives with the same word, since the plan "full" changes nothing.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import (
    GenerationConfig,
    MaxLengthCriteria,
    SuppressTokensLogitsProcessor,
    WatermarkingConfig,
)
from transformers.generation.utils import GenerationMixin

import kvtailor
from kvtailor.cli.run import command
from kvtailor.errors import CacheMisuse, UnknownName
from kvtailor.hf.model.loading import new_model, save
from kvtailor.hf.run.arguments import known_words, left_out, own_words, told
from kvtailor.hf.versions import hand_cache

TEXT = "Once upon a time there was a harbour, and its code was 52917."
CUT = TEXT.index(" and")
OWN = set(inspect.signature(kvtailor.generate).parameters)
PLAN = "snapkv(window=4) @ tokens=16"
WORDS = sorted(
    {*GenerationConfig().to_dict(), *inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
)


@pytest.fixture
def demo() -> Iterator[tuple[Any, Any]]:
    yield kvtailor.load_model("demo")


def ids_of(tokenizer: Any) -> torch.Tensor:
    return tokenizer(TEXT, return_tensors="pt").input_ids


def by_session(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    with kvtailor.session(model, PLAN, tokenizer) as s:
        return s.generate(ids_of(tokenizer), max_new_tokens=6, do_sample=False, **words)


def by_ask(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    reading = kvtailor.read(model, tokenizer, "The code of the harbour is 52917.", plan=PLAN)
    return reading.ask(" The code is", max_new_tokens=6, do_sample=False, **words).texts


def by_generate(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    return kvtailor.generate(model, ids_of(tokenizer), plan=PLAN, max_new_tokens=6, **words).sequences


def by_plain(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    """`model.generate` itself."""
    return model.generate(ids_of(tokenizer), **hand_cache(kvtailor.cache_for(model, PLAN)), **words)


# A value of each word that says something; None: nothing can be said there, or it stands for a service of its own.
VALUES: dict[str, Any] = {
    "_from_model_config": None,
    "assistant_confidence_threshold": 0.5,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 5,
    "assistant_model": None,
    "bad_words_ids": [[100]],
    "begin_suppress_tokens": [100],
    "bos_token_id": 3,
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": None,
    "constraints": ["word"],
    "continuous_batching_config": None,
    "custom_generate": None,
    "decoder_start_token_id": 0,
    "disable_compile": True,
    "diversity_penalty": 0.5,
    "do_sample": True,
    "dola_layers": "low",
    "early_stopping": True,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.5,
    "eos_token_id": [1, 5],
    "epsilon_cutoff": 1e-3,
    "eta_cutoff": 1e-3,
    "exponential_decay_length_penalty": (2, 1.5),
    "force_words_ids": [[100]],
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 7,
    "generation_config": None,
    "guidance_scale": 1.5,
    "inputs": None,
    "is_assistant": True,
    "length_penalty": 0.5,
    "logits_processor": [SuppressTokensLogitsProcessor(range(2500, 4100))],
    "low_memory": True,
    "max_cache_len": 200,
    "max_length": 60,
    "max_matching_ngram_size": 2,
    "max_new_tokens": 3,
    "max_time": 100.0,
    "min_length": 30,
    "min_new_tokens": 4,
    "min_p": 0.1,
    "negative_prompt_attention_mask": torch.ones(1, 3, dtype=torch.int64),
    "negative_prompt_ids": torch.full((1, 3), 30),
    "no_repeat_ngram_size": 2,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 4,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 8,
    "prefix_allowed_tokens_fn": lambda row, ids: list(range(50, 400)),
    "prompt_lookup_num_tokens": 3,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.8,
    "return_dict_in_generate": True,
    "sequence_bias": [[[100], 5.0]],
    "speculation_type": None,
    "stop_strings": ["e"],
    "stopping_criteria": [MaxLengthCriteria(24)],
    "streamer": None,
    "suppress_tokens": [100],
    "synced_gpus": False,
    "target_lookbehind": 5,
    "temperature": 0.7,
    "token_healing": True,
    "top_h": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "transformers_version": None,
    "typical_p": 0.5,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": WatermarkingConfig(),
    "assistant_tokenizer": None,
}
PLACES = {
    "argument": "an argument of this call",
    "config": "the generation_config that was given",
    "file": r"the model's generation config \(generation_config.json.*\)",
}
ARGUMENTS = set(inspect.signature(GenerationMixin.generate).parameters)


@pytest.fixture(scope="module")
def tiny(demo_tokenizer: Any) -> tuple[Any, Any]:
    """Two small layers of random weights, whose text each word still changes."""
    torch.manual_seed(3)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = new_model("llama", **size, num_key_value_heads=2, head_dim=8, vocab_size=len(demo_tokenizer)).eval()
    for parameter in model.parameters():
        parameter.data *= 4 if parameter.ndim > 1 else 1
    model.generation_config.pad_token_id = 2
    return model, demo_tokenizer


@pytest.fixture(scope="module")
def demo_tokenizer() -> Any:
    return kvtailor.load_model("demo")[1]


@contextmanager
def said(model: Any, place: str, word: str, **words: Any) -> Iterator[dict[str, Any]]:
    """The words of a call, where one of them stands in a place."""
    own, value = model.generation_config, VALUES[word]
    other = copy.deepcopy(own)
    setattr(other, word, value)
    if place == "file":
        model.generation_config = other
    try:
        yield words | {"argument": {word: value}, "config": {"generation_config": other}, "file": {}}[place]
    finally:
        model.generation_config = own


def outcome(by: Callable[..., Any], model: Any, tokenizer: Any, words: dict[str, Any]) -> Any:
    """The new tokens of each row, or the error."""
    torch.manual_seed(0)
    try:
        found = by(model, tokenizer, **words)
    except Exception as error:
        return error
    # An answer is its new tokens alone.
    if isinstance(found, kvtailor.Answers):
        return [each.tolist() for each in found.ids]
    return getattr(found, "sequences", found)[:, ids_of(tokenizer).shape[1] :].tolist()


def stock(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    return model.generate(ids_of(tokenizer), **words)


def full_session(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    with kvtailor.session(model, "full", tokenizer) as s:
        return s.generate(ids_of(tokenizer), **words)


def full_plain(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    return model.generate(ids_of(tokenizer), **hand_cache(kvtailor.cache_for(model, "full")), **words)


def full_ask(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    return kvtailor.read(model, tokenizer, TEXT[:CUT], plan="full").ask(TEXT[CUT:], **words)


# Where a face says another thing than transformers' own cache does: the place it names, or that it goes on without.
REFUSED = {
    (full_session, "cache_implementation"),
    (full_session, "use_cache"),
    (full_ask, "assistant_early_exit"),
    (full_ask, "cache_implementation"),
    (full_ask, "num_return_sequences"),
    (full_ask, "prompt_lookup_num_tokens"),
    (full_ask, "use_cache"),
    (full_ask, "use_mtp"),
}


def test_every_word_of_this_transformers_has_a_value_here() -> None:
    assert set(WORDS) - set(VALUES) == set(), "a new word: give it a value that says something"


@pytest.mark.parametrize("place", ["argument", "file", pytest.param("config", marks=pytest.mark.long)])
@pytest.mark.parametrize("word", [word for word in VALUES if VALUES[word] is not None and word in WORDS])
def test_a_word_does_what_it_does_beside_transformers_own_cache(tiny: Any, word: str, place: str) -> None:
    model, tokenizer = tiny
    if word in ARGUMENTS and place != "argument":
        pytest.skip("an argument of generate alone")
    with said(model, place, word, max_new_tokens=4, do_sample=False) as words:
        words = words if word not in ("do_sample", "max_new_tokens") or place == "argument" else {**words, word: None}
        words = {name: value for name, value in words.items() if value is not None}
        of_text = {"tokenizer": tokenizer} if word in ("stop_strings", "token_healing") else {}
        expected = outcome(stock, model, tokenizer, words | of_text)
        for by in (full_session, full_ask):
            found = outcome(by, model, tokenizer, words)
            if (by, word) in REFUSED and place == "file":
                assert isinstance(found, list) and found, f"{by.__name__}: {found!r}"
            elif (by, word) in REFUSED:
                assert isinstance(found, CacheMisuse), f"{by.__name__}: {found!r}"
                assert re.match(f"{PLACES[place]}: {word}", str(found)), found
            elif isinstance(expected, Exception):
                # Transformers itself refuses this word, in its own words.
                assert type(found) is type(expected), f"{by.__name__}: {found!r}, not {expected!r}"
            elif word != "token_healing" or by is not full_ask:
                assert found == expected, f"{by.__name__}: {found!r}, not {expected!r}"
        plain = outcome(full_plain, model, tokenizer, words | of_text)
        if word == "cache_implementation":
            # Transformers looks at its own words first.
            assert isinstance(plain, ValueError) and word in str(plain)
        elif word == "use_cache":
            assert isinstance(plain, CacheMisuse) and "use_cache=False" in str(plain)
            assert "generation_config.json" in str(plain)
        else:
            assert type(plain) is type(expected) and (isinstance(plain, Exception) or plain == expected), plain


def test_values_say_something(tiny: Any) -> None:
    """Of the words that change a greedy text, most change this one: else nothing was compared."""
    model, tokenizer = tiny
    usual = {"max_new_tokens": 4, "do_sample": False}
    plain = outcome(stock, model, tokenizer, usual)
    changed = {
        word
        for word in VALUES
        if VALUES[word] is not None
        and outcome(stock, model, tokenizer, usual | {word: VALUES[word], "tokenizer": tokenizer}) != plain
    }
    assert changed >= {"repetition_penalty", "num_beams", "max_new_tokens", "logits_processor", "forced_eos_token_id"}


@pytest.mark.parametrize("word", [word for word in VALUES if VALUES[word] is not None and word in WORDS])
def test_kvtailors_generate_takes_a_word_or_says_who_does(tiny: Any, word: str) -> None:
    model, tokenizer = tiny
    own = inspect.signature(kvtailor.generate).parameters
    usual = {"max_new_tokens": 4}
    plain = outcome(by_full, model, tokenizer, usual)
    found = outcome(by_full, model, tokenizer, usual | {word: VALUES[word]})
    if word in own:
        assert isinstance(found, list), found
    else:
        assert isinstance(found, CacheMisuse) and f"{word}" in str(found), found
        assert "s.generate(" in str(found) or "makes the cache" in str(found)
    with said(model, "file", word) as words, warnings.catch_warnings(record=True) as told_of:
        warnings.simplefilter("always")
        found = outcome(by_full, model, tokenizer, usual | words)
    ends = {"eos_token_id", "pad_token_id"}
    assert word in ends or found == plain, "the file is left out"
    silent = word in own or word in own_words_never_said() or VALUES[word] is False or word in ARGUMENTS
    assert silent or any(word in str(each.message) for each in told_of), "and says so"


def own_words_never_said() -> set[str]:
    """Words that change no text of one row, or are of the cache that is given here."""
    return {
        "bos_token_id",
        "cache_config",
        "cache_implementation",
        "decoder_start_token_id",
        "max_cache_len",
        "max_length",
        "output_attentions",
        "output_hidden_states",
        "output_logits",
        "output_scores",
        "return_dict_in_generate",
        "use_cache",
    }


def by_full(model: Any, tokenizer: Any, /, **words: Any) -> Any:
    return kvtailor.generate(model, ids_of(tokenizer), plan="full", **words).sequences


def test_a_file_that_says_how_to_sample_is_told(tiny: Any) -> None:
    model, tokenizer = tiny
    with (
        said(model, "file", "temperature"),
        pytest.warns(UserWarning, match="temperature=0.7, which kvtailor.generate"),
    ):
        by_full(model, tokenizer, max_new_tokens=2, do_sample=True)
    with said(model, "file", "temperature"), warnings.catch_warnings():
        warnings.simplefilter("error")
        by_full(model, tokenizer, max_new_tokens=2, do_sample=True, temperature=0.5)


@pytest.mark.parametrize("temperature", ["0", "0.7"])
@pytest.mark.parametrize("word", [word for word in VALUES if VALUES[word] is not None and word in WORDS])
def test_run_follows_a_models_file_or_leaves_it_out_and_says_so(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, word: str, temperature: str
) -> None:
    model, tokenizer = tiny
    if word in ARGUMENTS:
        pytest.skip("an argument of generate alone")
    monkeypatch.setattr("kvtailor.hf.model.loading.load", lambda *_, **__: (model, tokenizer))
    asked = ["--prompt", TEXT, "--max-new-tokens", "4", "--seed", "1", "--temperature", temperature]
    plain = CliRunner().invoke(command, asked).stdout
    with said(model, "file", word):
        follows = {**own_words(model), **left_out(model, float(temperature))}
        # A file that asks for several texts and does not draw them cannot be loaded.
        model.generation_config.do_sample = word == "num_return_sequences"
        found = CliRunner().invoke(command, asked)
    # Words that are code of others, or of models that draft by themselves, transformers refuses.
    if found.exit_code == 1 and temperature != "0" and word in ("constraints", "dola_layers", "force_words_ids"):
        assert "trust_remote_code" in found.output
        return
    assert found.exit_code == 0, found.output
    given = ("do_sample", "max_length", "max_new_tokens", "prefill_chunk_size", "temperature")
    changes = word in follows and word not in given
    assert not changes or f"{word}=" in " ".join(found.stderr.split()), found.stderr
    if temperature == "0":
        assert word == "eos_token_id" or found.stdout.splitlines()[0] == plain.splitlines()[0]


def test_ask_takes_the_length_of_an_answer_from_the_nearest_place(tiny: Any) -> None:
    model, tokenizer = tiny

    def length(**words: Any) -> int:
        words = {"do_sample": False, "eos_token_id": -1, **words}
        return len(full_ask(model, tokenizer, **words).ids[0])

    assert length(max_new_tokens=2) == 2
    assert length(generation_config=GenerationConfig(max_new_tokens=3)) == 3
    assert length(generation_config=GenerationConfig(max_new_tokens=3), max_new_tokens=2) == 2
    with said(model, "file", "max_new_tokens"):
        assert length() == 3
    assert length() == 256


@pytest.mark.parametrize("word", WORDS)
def test_a_word_that_says_nothing_changes_nothing(tiny: Any, word: str) -> None:
    """None is what is not said; and no face calls a word of transformers unknown."""
    model, tokenizer = tiny
    assert word in known_words(model)
    plain = outcome(by_full, model, tokenizer, {"max_new_tokens": 2})
    found = outcome(by_full, model, tokenizer, {"max_new_tokens": 2, **({word: None} if word not in OWN else {})})
    assert found == plain


@pytest.mark.parametrize("by", [by_session, by_ask])
def test_stop_strings_work_and_find_the_tokenizer(demo: Any, by: Callable[..., Any]) -> None:
    model, tokenizer = demo
    by(model, tokenizer, stop_strings=["e"])
    model.generation_config.stop_strings = ["e"]
    by(model, tokenizer)


@pytest.mark.parametrize("by", [by_session, by_ask])
@pytest.mark.parametrize(("word", "value"), [("use_cache", False), ("cache_implementation", "static")])
def test_what_a_models_file_says_of_caches_gives_way_and_a_callers_word_is_refused(
    demo: Any, by: Callable[..., Any], word: str, value: Any
) -> None:
    model, tokenizer = demo
    plain = by(model, tokenizer)
    with pytest.raises(CacheMisuse, match=f"an argument of this call: {word}="):
        by(model, tokenizer, **{word: value})
    with pytest.raises(CacheMisuse, match=f"the generation_config that was given: {word}="):
        by(model, tokenizer, generation_config=GenerationConfig(**{word: value}))
    setattr(model.generation_config, word, value)
    found = by(model, tokenizer)
    assert torch.equal(found, plain) if isinstance(found, torch.Tensor) else found == plain


def test_stop_strings_without_a_tokenizer_say_where_they_stand(demo: Any) -> None:
    model, tokenizer = demo
    model.generation_config.stop_strings = ["e"]
    with (
        kvtailor.session(model, PLAN) as s,
        pytest.raises(CacheMisuse, match="generation_config.json.*stop_strings.*tokenizer="),
    ):
        s.generate(ids_of(tokenizer), max_new_tokens=2)


@pytest.mark.parametrize("by", [by_session, by_ask, by_generate])
def test_words_in_config_json_are_refused_by_their_place(demo: Any, by: Callable[..., Any]) -> None:
    model, tokenizer = demo
    model.config.num_beams = 3
    with pytest.raises(CacheMisuse, match=r"config.json\) says num_beams=3"):
        by(model, tokenizer)


def test_run_refuses_words_in_config_json_by_their_place(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    demo[0].config.num_beams = 3
    monkeypatch.setattr("kvtailor.hf.model.loading.load", lambda *_, **__: demo)
    found = CliRunner().invoke(command, ["--prompt", TEXT])
    assert found.exit_code == 1 and "(config.json) says num_beams=3" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("word", "value"),
    [("num_beams", 3), ("repetition_penalty", 5.0), ("use_cache", False), ("stop_strings", ["e"])]
    + [("cache_implementation", "static")],
)
def test_words_in_files_on_disk(tiny: Any, tmp_path: Path, word: str, value: Any) -> None:
    """Where a folder has no generation config, transformers takes the words from config.json, and we name both."""
    save(*tiny, tmp_path)
    config, own = tmp_path / "config.json", tmp_path / "generation_config.json"
    asked = ["--model", str(tmp_path), "--prompt", TEXT, "--max-new-tokens", "4"]
    plain = CliRunner().invoke(command, asked)
    said_of = json.loads(own.read_text())
    said_of.pop("_from_model_config", None)
    own.write_text(json.dumps({**said_of, word: value}))
    in_own = CliRunner().invoke(command, asked)
    own.unlink()
    config.write_text(json.dumps({**json.loads(config.read_text()), word: value}))
    in_config = CliRunner().invoke(command, asked)
    for found in (in_own, in_config):
        assert found.exit_code == 0, found.output
        assert found.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
        where = "generation_config.json" + (", or config.json where there is none" if found is in_config else "")
        assert f"{where} this run leaves out {word}={value!r}" in " ".join(found.stderr.split())


def test_an_unknown_word_has_neighbours(demo: Any) -> None:
    with pytest.raises(UnknownName, match="did you mean 'repetition_penalty'"):
        by_session(*demo, repetition_penality=1.2)


def test_kvtailors_own_generate_says_who_takes_a_word_and_what_it_leaves_out(demo: Any) -> None:
    model, tokenizer = demo
    with pytest.raises(CacheMisuse, match="has no repetition_penalty=: s.generate"):
        by_generate(model, tokenizer, repetition_penalty=1.3)
    model.generation_config.repetition_penalty = 1.3
    with pytest.warns(
        UserWarning, match=r"generation_config.json.*\) says repetition_penalty=1.3, which kvtailor.generate leaves"
    ):
        by_generate(model, tokenizer)


def test_the_likeliest_token_is_not_punished_by_the_models_file(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = demo
    asked = ["--prompt", "One two one two one two one two one", "--max-new-tokens", "8"]
    monkeypatch.setattr("kvtailor.hf.model.loading.load", lambda *_, **__: (model, tokenizer))
    plain = CliRunner().invoke(command, asked)
    for name, value in {
        "repetition_penalty": 5.0,
        "num_beams": 3,
        "cache_implementation": "static",
        "use_cache": False,
        "stop_strings": ["e"],
    }.items():
        setattr(model.generation_config, name, value)
    assert own_words(model).keys() >= {"repetition_penalty", "num_beams", "cache_implementation", "use_cache"}
    assert "repetition_penalty" not in left_out(model, 0.7)
    assert "follows repetition_penalty=5.0" in str(told(model, 0.7))
    found = CliRunner().invoke(command, asked)
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "leaves out" in found.stderr
    assert "repetition_penalty=5.0" in found.stderr.replace("\n", " ")


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    found = []
    for encoding in ("utf-8", "utf-8-sig"):
        file = tmp_path / f"{encoding}.txt"
        file.write_text("Once upon a time", encoding=encoding)
        asked = ["--prompt-file", str(file), "--max-new-tokens", "2", "--json"]
        told_of = CliRunner().invoke(command, asked).stdout.splitlines()[-1]
        found.append(json.loads(told_of)["prompt_tokens"])
    assert found[0] == found[1]


def test_sampling_without_do_sample_is_told(demo: Any) -> None:
    ids = torch.arange(3, 20)[None]
    with pytest.warns(UserWarning, match="greedy decoding leaves temperature and top_p unread"):
        kvtailor.generate(demo[0], ids, temperature=0.5, top_p=0.9, max_new_tokens=2)
