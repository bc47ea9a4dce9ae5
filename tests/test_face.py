"""Python's face: one order of arguments, and what does not fit is refused in a sentence, found by itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvtailor
from kvtailor.errors import ArgumentError, KvtailorError, UnknownName
from kvtailor.fitting.progress import Progress
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
            r"load_cache.*path must be str or os.PathLike.*load_cache\(model, path\)",
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
