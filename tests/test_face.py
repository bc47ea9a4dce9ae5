"""Python's face: one order of arguments, and what does not fit is refused in a sentence, found by itself."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.bench.stages import Progress
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName
from kvtailor.hf.model.loading import new_model
from kvtailor.plan.calls import _hints, check_call

PLAN = "snapkv(window=4) @ tokens=16"


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every function of the face, and the methods of what they give that are no dunders."""
    for name in kvtailor.__all__:
        found = getattr(kvtailor, name)
        if inspect.isfunction(found):
            yield name, found


FUNCTIONS = dict(functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_model_comes_first_and_a_plan_follows_what_is_read(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    order = list(parameters)
    assert order[0] == "model"
    read = {"input_ids", "context", "texts"} & {
        key for key, each in parameters.items() if each.kind != each.KEYWORD_ONLY
    }
    for plan in {"plan", "plans"} & set(order):
        assert (parameters[plan].kind == parameters[plan].KEYWORD_ONLY) == bool(read), (
            "a plan is given by name where something is read, and second where nothing is"
        )
        assert read or order[1] == plan
    if "tokenizer" in order and parameters["tokenizer"].kind != inspect.Parameter.KEYWORD_ONLY:
        assert order.index("tokenizer") == (2 if "plan" in order[:2] else 1)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_annotations_can_be_read(name: str) -> None:
    """What cannot be evaluated would be held to nothing."""
    assert _hints(inspect.unwrap(FUNCTIONS[name]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m, ids: kvtailor.prefill(m, PLAN, ids), r"input_ids must be Tensor.*prefill\(model, input_ids.*plan"),
        (lambda m, ids: kvtailor.prefill(m, kvtailor.cache_for(m, PLAN), ids), "input_ids must be Tensor, and is a"),
        (
            lambda m, ids: kvtailor.load_cache("file", m),
            r"load_cache: model must be a model of transformers, and is 'file'.*load_cache\(model, path\)",
        ),
        (
            lambda m, ids: kvtailor.calibrate("qfilters", m, out="x"),
            r"kind must be str, and is a .*calibrate\(model, kind",
        ),
        (lambda m, ids: kvtailor.evaluate("demo", ["full"], "text"), "takes|too many|missing"),
        (lambda m, ids: kvtailor.evaluate("demo", ["full"]), "missing.*plan is given by name"),
        (lambda m, ids: kvtailor.read(m, len, "a text", PLAN), "too many.*plan is given by name"),
        (lambda m, ids: kvtailor.ask(m, len, "a text", "a question", PLAN), "too many.*plan is given by name"),
        (lambda m, ids: kvtailor.prefill(m, ids), "takes a plan=.*or the cache=.*neither"),
    ],
)
def test_the_order_of_before_is_refused_in_a_sentence(call: Callable[..., Any], said: str) -> None:
    model, _ = kvtailor.load_model("demo")
    with pytest.raises(ArgumentError, match=said):
        call(model, torch.arange(20)[None])


def test_an_unknown_argument_has_neighbours() -> None:
    with pytest.raises(UnknownName, match="kvtailor.cache_for named 'graph'; did you mean 'graphs'"):
        kvtailor.cache_for(None, PLAN, graph=True)  # type: ignore[call-arg]
    assert issubclass(ArgumentError, KvtailorError)


def test_a_protocol_is_met_by_its_names() -> None:
    class Tells:
        def expect(self, stages: object, seconds: float | None) -> None: ...

        def tell(self, sentence: str) -> None: ...

        def stage(self, name: str, steps: int) -> object: ...

        def finish(self, record: object) -> None: ...

    @check_call
    def taking(progress: Progress | None = None) -> bool:
        return progress is not None

    assert taking(progress=Tells()) and not taking()
    for wrong in (3, "often", object()):
        with pytest.raises(ArgumentError, match="progress must be"):
            taking(progress=wrong)


# Of every kind that an argument may be by mistake, and of every size.
HOSTILE: list[object] = [
    None,
    -1,
    0,
    math.nan,
    math.inf,
    "",
    "nobody",
    [],
    [-1],
    1.5,
    object(),
    True,
    {},
    b"x",
    (),
    10**30,
    2**62,
    torch.zeros(0),
    torch.tensor(1),
    torch.nn.Linear(2, 2),
    Path("nobody"),
]
WORDS = ["harbour", "ferry", "island", "storm", "night", "code", "mill", "road", "letter", "captain", "bread", "stone"]
TEXT = " ".join(random.Random(0).choices(WORDS, k=5000))
# Work that is as long as it was asked for.
LONG = {("ask", "max_new_tokens"), ("generate", "max_new_tokens")}


class Began(KvtailorError):
    """What the model of a long work says when it is asked for the first time."""


def calls(model: Any, stopped: Any, tokenizer: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Right arguments of every function of the face, those that must be given and the others."""
    ids, short = torch.arange(3, 27)[None], "The code is 48213. " * 3
    of_plan = {"model": model, "plan": PLAN}
    putting = {"separator": None, "answer_prefix": "", "system": None, "template": None}
    putting |= {"chunk": None, "cache_dtype": None}
    work = {"model": stopped, "tokenizer": tokenizer}
    checked = {"texts": [TEXT], "context": 48, "margin": 0.01, "out": None, "again": False, "progress": None}
    cells: dict[str, Any] = {"executor": None, "resources": None, "share": True}
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": None, "top_p": 1.0, "generator": None}
    drafted = {"draft": None, "draft_plan": None, "middle_plan": None, "gamma": 2, "inner_gamma": 2, "min_gain": None}
    ends = {"eos_token_id": None, "pad_token_id": None, "streamer": None, "max_new_tokens": 2, "refresh": None}
    asked = {"memory": "25%", "bytes_per_token": None, "keep_bytes": None, "loss": None, "points": None, "tpot": None}
    return {
        "ask": of_plan
        | putting
        | {
            "tokenizer": tokenizer,
            "context": short,
            "questions": "What?",
            "question": "after",
            "max_new_tokens": 2,
        },
        "cache_for": of_plan | {"graphs": False, "cache_dtype": None},
        "cache_size": of_plan | {"context": 100, "batch": 1, "new_tokens": 0, "dtype": None},
        "calibrate": work
        | {
            "kind": "qfilters",
            "texts": {"a": TEXT},
            "out": folder / "file.safetensors",
            "tokens": 128,
            "context": 64,
            "state": 0,
            "again": True,
            "name": None,
        },
        "check_engine": work | checked | {"engine": "sglang", "workers": 1},
        "check_model": work | checked | {"plans": [PLAN], "workers": 1},
        "evaluate": work
        | cells
        | {
            "texts": [TEXT],
            "plans": [PLAN],
            "tasks": ["perplexity"],
            "data": None,
            "out": None,
            "again": False,
            "allow": (),
            "margin": 0.02,
            "margin_points": 10.0,
            "sinks": (),
            "on_record": None,
        },
        "fit": work
        | cells
        | asked
        | {
            "texts": [TEXT],
            "context": 64,
            "batch": 1,
            "tasks": None,
            "proof_tasks": None,
            "without": (),
            "state": 0,
            "effort": "quick",
            "stages": ("layers",),
            "timed": False,
            "out": None,
            "workers": 1,
            "progress": None,
        },
        "generate": of_plan
        | drawn
        | drafted
        | ends
        | {
            "input_ids": ids,
            "attention_mask": None,
            "chunk": None,
            "graphs": False,
            "cache_dtype": None,
        },
        "load_cache": {"model": model, "path": folder / "cache.safetensors", "graphs": False},
        "load_model": {"model": "demo", "dtype": None, "cache_dtype": None, "device": None},
        "prefill": of_plan
        | {
            "input_ids": ids,
            "attention_mask": None,
            "cache": None,
            "chunk": None,
            "hold": False,
            "tokenizer": None,
            "instruction": None,
            "cache_dtype": None,
        },
        "read": of_plan | putting | {"tokenizer": tokenizer, "context": short, "hold": False},
        "session": of_plan | {"tokenizer": None, "graphs": False, "cache_dtype": None},
    }


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    folder, (_, tokenizer) = tmp_path_factory.mktemp("face"), kvtailor.load_model("demo")

    def tiny() -> Any:
        torch.manual_seed(0)
        size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return new_model("llama", **size, num_key_value_heads=2, head_dim=8, vocab_size=len(tokenizer)).eval()

    def begins(*_: object, **__: object) -> None:
        raise Began("the work began")

    model, stopped = tiny(), tiny()
    stopped.forward = begins
    kvtailor.prefill(model, torch.arange(3, 27)[None], plan=PLAN).save(folder / "cache.safetensors")
    return calls(model, stopped, tokenizer, folder)


def call(name: str, given: dict[str, Any]) -> None:
    function = FUNCTIONS[name]
    parameters = inspect.signature(function).parameters
    unsaid = {key for key, value in given.items() if value is None and parameters[key].default is None}
    if name == "session":
        with function(**{key: value for key, value in given.items() if key not in unsaid}) as opened:
            opened.prefill(torch.arange(3, 27)[None])
    else:
        function(**{key: value for key, value in given.items() if key not in unsaid})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name == "fit" else name for name in FUNCTIONS]
)
@pytest.mark.filterwarnings("ignore")
def test_no_foreign_error_crosses_the_face(
    right: Mapping[str, dict[str, Any]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each argument in turn is each of the wrong values: it works, or is refused by an error of ours."""
    monkeypatch.chdir(tmp_path)
    given = right[name]
    parameters = inspect.signature(FUNCTIONS[name]).parameters
    left = {key for key, each in parameters.items() if each.kind != each.VAR_KEYWORD} - set(given)
    assert left <= {"progress", "processes"}, "a new argument: give it a right value here"
    try:
        call(name, given)
    except Began:
        assert given["model"] is right["fit"]["model"]
    foreign = []
    for key in given:
        for value in HOSTILE:
            if (name, key) in LONG and isinstance(value, int) and value > 2:
                continue
            try:
                call(name, {**given, key: value})
            except KvtailorError:
                pass
            except Exception as error:
                foreign.append(f"{key}={value!r}: {type(error).__name__}: {error}")
    assert foreign == []
