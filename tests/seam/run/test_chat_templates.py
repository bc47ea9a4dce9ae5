"""Chat templates: every face writes what was asked as the tokenizer itself does, or refuses it in a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import kvtailor
from kvtailor.cli.run import command
from kvtailor.errors import ArgumentError, CacheMisuse, KvtailorError, UnknownName
from kvtailor.hf.run.chat import Prompt

PLAN = "snapkv(window=4) @ tokens=24"
TEXT = "The ferry left the island twice a day. The code of the harbour is 48213."
SYSTEM = "Be brief."
FIRST = "{% set ns = namespace(first=messages[0]['role'] == 'system') %}"
END = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
TURNS = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}</s>\n{% endfor %}"
# As those of Qwen 3, of Gemma 2, of one that insists on a system, of one that forgets it, and of Qwen2-VL.
TEMPLATES = {
    "thinking": TURNS + END + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "refuses a system": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + TURNS + END,
    "needs a system": FIRST
    + "{% if not ns.first %}{{ raise_exception('a system message comes first') }}{% endif %}"
    + TURNS
    + END,
    "forgets the system": "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}" + END,
    "parts": "{% for m in messages %}<|{{ m['role'] }}|>{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</s>\n{% endfor %}" + END,
    "parts or nothing": "{% for m in messages %}{{ m['role'] + ': ' + m['content'][0]['text'] }}{% endfor %}" + END,
    "nothing": "no message",
    "broken": "{% for m in messages %}{{ m['content'] }",
}
NEITHER = "make the token ids yourself"
# A template, what is asked of it, and the sentence; None: it works.
CASES: list[tuple[str | None, dict[str, Any], str | None]] = [
    ("thinking", {}, None),
    ("thinking", {"system": SYSTEM}, None),
    ("thinking", {"template": {"enable_thinking": False}}, None),
    ("thinking", {"template": {"enable_thinking": True}, "system": SYSTEM}, None),
    ("thinking", {"template": {"enable_thinkin": False}}, "no variable of .* did you mean 'enable_thinking'"),
    ("thinking", {"template": {"messages": []}}, "kvtailor itself gives messages"),
    ("thinking", {"system": " "}, "system's message is empty"),
    ("refuses a system", {}, None),
    ("refuses a system", {"system": SYSTEM}, "System role not supported.*leave system= "),
    ("needs a system", {"system": SYSTEM}, None),
    ("needs a system", {}, "a system message comes first.*give system="),
    ("forgets the system", {}, None),
    ("forgets the system", {"system": SYSTEM}, "leaves the system's message out"),
    ("parts", {"system": SYSTEM}, None),
    ("parts or nothing", {}, None),
    ("nothing", {}, f"(writes the user's message 0 times|leaves the user's message out).*{NEITHER}"),
    ("broken", {}, f"refuses a message of the user.*{NEITHER}"),
    (None, {"system": SYSTEM}, "asked for system='Be brief.', .* has none"),
    (None, {"template": {"enable_thinking": False}}, "asked for template=.* has none"),
]


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return kvtailor.load_model("demo", dtype=torch.float32)


def with_template(tokenizer: Any, name: str | None) -> Any:
    made = copy.deepcopy(tokenizer)
    made.chat_template = None if name is None else TEMPLATES[name]
    return made


def written(tokenizer: Any, message: str, asked: dict[str, Any]) -> list[int]:
    """The ids of the tokenizer's own way, after the user's guide of transformers."""
    told = [("system", asked.get("system")), ("user", message)]
    parts = "parts" in str([name for name, text in TEMPLATES.items() if text == tokenizer.chat_template])
    chat = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in told if text
    ]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **asked.get("template", {}))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("place", ["after", "inside", "before"])
@pytest.mark.parametrize(("name", "asked", "said"), CASES)
def test_a_context_and_a_question(demo: Any, name: Any, asked: dict[str, Any], said: Any, place: Any) -> None:
    model, tokenizer = demo[0], with_template(demo[1], name)

    def ask() -> Any:
        return kvtailor.ask(model, tokenizer, TEXT, "Who?", plan=PLAN, question=place, max_new_tokens=2, **asked)

    if said is None:
        message = f"Who?\n\n{TEXT}" if place == "before" else f"{TEXT}\n\nWho?"
        assert ask().prompt_tokens[0] == pytest.approx(len(written(tokenizer, message, asked)), abs=1), (
            "tokens may be cut otherwise where the context ends, and nowhere else"
        )
        prompt = Prompt(tokenizer, None, "", asked.get("system"), asked.get("template", {}))
        assert prompt.whole(message).tolist() == written(tokenizer, message, asked)
        head, after = prompt.split(TEXT)
        both = tokenizer.decode([*head.tolist(), *prompt.question("Who?", after).tolist()])
        assert both == tokenizer.decode(written(tokenizer, f"{TEXT}\n\nWho?", asked))
    else:
        with pytest.raises(KvtailorError, match=said):
            ask()


@pytest.mark.parametrize(("name", "asked", "said"), CASES)
def test_the_command(
    demo: Any, monkeypatch: pytest.MonkeyPatch, name: Any, asked: dict[str, Any], said: str | None
) -> None:
    model, tokenizer = demo[0], with_template(demo[1], name)
    monkeypatch.setattr("kvtailor.hf.model.loading.load", lambda *_, **__: (model, tokenizer))
    words = ["--chat", "--prompt", TEXT, "--max-new-tokens", "2", "--json"]
    words += ["--system", asked["system"]] if "system" in asked else []
    for key, value in asked.get("template", {}).items():
        # As a person who writes Python would: a text "False" would be true in a template.
        words += ["--template", f"{key}={value}"]
    found = CliRunner().invoke(command, words)
    if said is None:
        assert found.exit_code == 0, found.output
        assert json.loads(found.stdout.splitlines()[-1])["prompt_tokens"] == len(written(tokenizer, TEXT, asked))
    else:
        assert found.exit_code == 1 and isinstance(found.exception, SystemExit), found.exception
        with pytest.raises(KvtailorError, match=said):
            raise KvtailorError(found.output)


def test_the_command_without_a_chat_or_a_template(demo: Any) -> None:
    for words, said in (
        (["--chat"], "tokenizer has no chat template: leave --chat out"),
        (["--system", SYSTEM], "--system is written by the model's chat template: give --chat too"),
        (["--template", "enable_thinking=false"], "--template is written by the model's chat template"),
        (["--chat", "--template", "enable_thinking"], "'enable_thinking' is no NAME=VALUE"),
    ):
        found = CliRunner().invoke(command, ["--prompt", TEXT, *words])
        assert found.exit_code in (1, 2) and said in " ".join(found.output.split()), found.output


def by_session(model: Any, tokenizer: Any, ids: Any, **words: Any) -> Any:
    with kvtailor.session(model, PLAN, tokenizer) as s:
        return s.generate(ids, max_new_tokens=2, do_sample=False, **words)


def by_generate(model: Any, tokenizer: Any, ids: Any, **words: Any) -> Any:
    return kvtailor.generate(model, ids, plan=PLAN, max_new_tokens=2, **words).sequences


@pytest.mark.parametrize("by", [by_session, by_generate])
def test_who_takes_ids_says_where_words_of_a_template_stand(demo: Any, by: Callable[..., Any]) -> None:
    model, tokenizer = demo[0], with_template(demo[1], "thinking")
    chat = [{"role": "user", "content": TEXT}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = whole["input_ids"]
    assert by(model, tokenizer, ids).shape[1] == ids.shape[1] + 2
    for word, value in (("enable_thinking", False), ("system", SYSTEM), ("messages", chat), ("tools", [])):
        with pytest.raises(CacheMisuse, match=f"{word} is of the chat template, .*apply_chat_template"):
            by(model, tokenizer, ids, **{word: value})
    with pytest.raises(UnknownName, match="did you mean 'do_sample'"):
        by(model, tokenizer, ids, do_sampl=True)
    for wrong in (chat, whole, TEXT):
        with pytest.raises(ArgumentError, match=r"\*\*inputs|must be Tensor"):
            by(model, tokenizer, wrong)


def test_a_question_says_that_a_variable_is_of_the_context(demo: Any) -> None:
    model, tokenizer = demo[0], with_template(demo[1], "thinking")
    with pytest.raises(CacheMisuse, match=r"kvtailor.ask with template=\{'enable_thinking': \.\.\.\}"):
        kvtailor.read(model, tokenizer, TEXT, plan=PLAN).ask("Who?", enable_thinking=False)


def test_one_of_several_templates_is_taken(demo: Any) -> None:
    model, tokenizer = demo[0], with_template(demo[1], "thinking")
    tokenizer.chat_template = {"default": TEMPLATES["thinking"], "tool_use": "tools: {{ messages[0]['content'] }}"}
    asked = {"template": {"enable_thinking": False}}
    assert "<think>" in kvtailor.read(model, tokenizer, TEXT, plan=PLAN, **asked).after
    tokenizer.chat_template = {"rag": TEMPLATES["thinking"]}
    with pytest.raises(CacheMisuse, match="several chat templates and none is named 'default'"):
        kvtailor.read(model, tokenizer, TEXT, plan=PLAN)
