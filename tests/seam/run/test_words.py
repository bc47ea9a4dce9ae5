"""Every word of `generate`, by introspection: it works beside a cache of ours, or is refused in a sentence."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

import kvtailor
from kvtailor.cli.run import command
from kvtailor.errors import CacheMisuse, KvtailorError, UnknownName
from kvtailor.hf.run.words import known_words, left_out, own_words, told

PLAN = "snapkv(window=4) @ tokens=16"
WORDS = sorted(
    {*GenerationConfig().to_dict(), *inspect.signature(GenerationMixin.generate).parameters} - {"self", "kwargs"}
)


@pytest.fixture
def demo() -> Iterator[tuple[Any, Any]]:
    yield kvtailor.load_model("demo")


def ids_of(tokenizer: Any) -> torch.Tensor:
    return tokenizer("Once upon a time there was a harbour, and its code was 52917.", return_tensors="pt").input_ids


def by_session(model: Any, tokenizer: Any, **words: Any) -> Any:
    with kvtailor.session(model, PLAN, tokenizer) as s:
        return s.generate(ids_of(tokenizer), max_new_tokens=6, do_sample=False, **words)


def by_ask(model: Any, tokenizer: Any, **words: Any) -> Any:
    reading = kvtailor.read(model, tokenizer, "The code of the harbour is 52917.", plan=PLAN)
    return reading.ask(" The code is", max_new_tokens=6, do_sample=False, **words).texts


def by_generate(model: Any, tokenizer: Any, **words: Any) -> Any:
    return kvtailor.generate(model, ids_of(tokenizer), plan=PLAN, max_new_tokens=6, **words).sequences


@pytest.mark.parametrize("word", WORDS)
def test_a_word_of_generate_is_known_to_every_face(demo: Any, word: str) -> None:
    """None is what is not said: it changes nothing; and no face calls a word of transformers unknown."""
    model, tokenizer = demo
    assert word in known_words(model)
    try:
        by_generate(model, tokenizer, **{word: None} if word not in ("max_new_tokens",) else {})
    except (KvtailorError, TypeError) as error:
        assert not isinstance(error, UnknownName), word


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


def test_words_in_config_json_are_refused_by_their_place(demo: Any) -> None:
    model, tokenizer = demo
    model.config.num_beams = 3
    with pytest.raises(CacheMisuse, match=r"config.json\) says num_beams=3"):
        by_session(model, tokenizer)


def test_an_unknown_word_has_neighbours(demo: Any) -> None:
    with pytest.raises(UnknownName, match="did you mean 'repetition_penalty'"):
        by_session(*demo, repetition_penality=1.2)


def test_kvtailors_own_generate_says_who_takes_a_word_and_what_it_leaves_out(demo: Any) -> None:
    model, tokenizer = demo
    with pytest.raises(CacheMisuse, match="has no repetition_penalty=: s.generate"):
        by_generate(model, tokenizer, repetition_penalty=1.3)
    model.generation_config.repetition_penalty = 1.3
    with pytest.warns(
        UserWarning, match=r"generation_config.json\) says repetition_penalty=1.3, which kvtailor.generate leaves"
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
