"""Table: shares of written weights, from every kind of file, and refusals before anything is allocated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.allocate.contract import BudgetRequest
from kvtailor.allocate.inverse import Inverse
from kvtailor.allocate.table import Table
from kvtailor.cli import main
from kvtailor.errors import PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan, parse

FLAT = [3.0, 0.0, 1.0]
PER_HEAD = [[3.0, 1.0], [0.5, 2.0], [0.0, 1.5]]


def request_of(shape: tuple[int, int, int], total: int, most: int = 1000, least: int = 0) -> BudgetRequest:
    return BudgetRequest(
        total=torch.full((shape[0],), total),
        capacity=torch.full(shape, most),
        floor=torch.full(shape, least),
        layers=tuple(range(shape[1])),
        num_layers=shape[1],
    )


def budgets(table: Table, heads: int, total: int, **bounds: int) -> list[list[int]]:
    found = table.allocate(request_of((1, 3, heads), total, **bounds))
    return found[0].tolist()  # type: ignore[no-any-return]


def test_by_hand() -> None:
    assert budgets(Table(weights=(3, 0, 1)), 2, 80) == [[30, 30], [0, 0], [10, 10]]
    # 82 tokens are 41 for each head: 30.75 and 10.25, the one left over goes to the larger remainder.
    assert budgets(Table(weights=(3, 0, 1)), 2, 82) == [[31, 31], [0, 0], [10, 10]]
    assert budgets(Table(weights=(3, 0, 1)), 2, 80, least=4) == [[27, 27], [4, 4], [9, 9]]
    assert budgets(Table(weights=(3, 0, 1)), 2, 80, most=25) == [[25, 25], [0, 0], [15, 15]]
    assert budgets(Table(weights=(3, 0, 1)), 2, 110, most=25) == [[25, 25], [5, 5], [25, 25]]
    # The weights sum to 8: ten tokens for each.
    assert budgets(Table(weights=((3, 1), (0.5, 2), (0, 1.5))), 2, 80) == [[30, 10], [5, 20], [0, 15]]
    # The first layer's 40 do not fit its heads' 25 as 30 and 10, so its other head takes five more.
    assert budgets(Table(weights=((3, 1), (0.5, 2), (0, 1.5))), 2, 80, most=25) == [[25, 15], [5, 20], [0, 15]]


def test_only_the_proportions_count() -> None:
    for scale in (1e-6, 7.0, 1e6):
        flat = Table(weights=tuple(w * scale for w in FLAT))
        assert budgets(flat, 2, 77) == budgets(Table(weights=tuple(FLAT)), 2, 77)


def test_layers_alone_and_together_are_the_same() -> None:
    for weights in (tuple(FLAT), tuple(map(tuple, PER_HEAD))):
        table, whole = Table(weights=weights), request_of((2, 3, 2), 101, least=3)
        alone = [
            table.allocate(
                BudgetRequest(
                    total=whole.total,
                    capacity=whole.capacity[:, i : i + 1],
                    floor=whole.floor[:, i : i + 1],
                    layers=(i,),
                    num_layers=3,
                    row_tokens=torch.tensor([1000, 1000]),
                )
            )
            for i in range(3)
        ]
        assert torch.equal(torch.cat(alone, 1), table.allocate(whole))
        assert table.allocate(whole).sum((1, 2)).tolist() == ([100, 100] if table.even_heads else [101, 101])


def written(folder: Path, kind: str, weights: object) -> str:
    path = folder / f"profile.{kind}"
    if kind == "json":
        path.write_text(json.dumps(weights))
    elif kind == "toml":
        path.write_text(f"weights = {weights}\nnote = 'ours'")
    else:
        save_file({"weights": torch.tensor(weights, dtype=torch.float64)}, str(path))
    return str(path)


@pytest.mark.parametrize("weights", [FLAT, PER_HEAD], ids=["layers", "heads"])
@pytest.mark.parametrize("kind", ["json", "toml", "safetensors"])
def test_a_file_says_what_its_numbers_say(kind: str, weights: list, tmp_path: Path) -> None:
    inline = Table(weights=tuple(tuple(each) if isinstance(each, list) else each for each in weights))
    read = Table(file=written(tmp_path, kind, weights))
    assert read.even_heads == inline.even_heads == (weights is FLAT)
    assert budgets(read, 2, 80) == budgets(inline, 2, 80)
    plan = Plan.parse(f"snapkv + table(file={json.dumps(read.file)}) @ keep=0.5")
    assert plan.allocate == read
    again = [Plan.from_toml(plan.to_toml()), parse(str(plan)), eval(repr(plan), vars(kvtailor) | _names())]
    assert all(each == plan and each.hash == plan.hash for each in again)


def _names() -> dict[str, object]:
    from kvtailor.score.snapkv import SnapKV

    return {"Table": Table, "SnapKV": SnapKV, "Plan": Plan}


def test_the_hash_is_over_the_files_content(tmp_path: Path) -> None:
    path = written(tmp_path, "json", FLAT)
    lines = [f"snapkv + {each} @ keep=0.5" for each in (f"table(file='{path}')", f"inverse(of=table(file='{path}'))")]
    before = [parse(line) for line in lines]
    written(tmp_path, "json", [3.0, 0.0, 2.0])
    after = [parse(line) for line in lines]
    assert [str(plan) for plan in before] == [str(plan) for plan in after]
    assert all(one.hash != other.hash and one != other for one, other in zip(before, after, strict=True))
    # What was made stays what it was.
    assert budgets(before[0].allocate, 2, 80) == [[30, 30], [0, 0], [10, 10]]  # type: ignore[arg-type]
    written(tmp_path, "json", FLAT)
    assert [parse(line).hash for line in lines] == [plan.hash for plan in before]


@pytest.mark.parametrize(
    ("argument", "fault"),
    [
        ("", "table: give either file or weights, found neither"),
        ("file=a.json, weights=[1]", "table: give either file or weights, found both"),
        ("file=none.json", "table: file is 'none.json', and there is no file "),
        ("weights=3", "table: weights is 3, but it must be"),
        ("weights=[]", "table: weights must be one number for each layer, or"),
        ("weights=[[]]", "table: weights must be one number for each layer, or"),
        ("weights=[[1, 2], [3]]", "table: weights must be one number for each layer, or"),
        ("weights=[1, -2]", "table: weights must be finite, not negative and not all 0, found (1.0, -2.0)"),
        ("weights=[0, 0]", "table: weights must be finite, not negative and not all 0"),
        ("weights=[1, inf]", "table: weights must be finite, not negative and not all 0"),
    ],
)
def test_what_is_no_table_is_a_fault_of_the_plan(argument: str, fault: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(f"snapkv + table({argument}) @ keep=0.5")
    (found,) = caught.value.faults
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.json", "[1, 2", "table: a.json is not json: "),
        ("a.json", "[1, true]", "table: the weights in a.json must be one number for each layer, or for each layer a "),
        ("a.json", '{"weights": [1]}', "table: the weights in a.json must be one number for each layer, or for each "),
        ("a.json", "[1, [2]]", "table: the weights in a.json must be one number"),
        ("a.json", "[1, NaN]", "table: the weights in a.json must be finite"),
        ("a.toml", "weight = [1]", "table: a.toml has no 'weights': write weights = [...]"),
        ("a.toml", "weights = [1", "table: a.toml is not toml: "),
        ("a.safetensors", "nothing", "table: a.safetensors is not safetensors: "),
        ("a.csv", "1,2", "table: a.csv is no file of a known kind: give .json, .toml or .safetensors"),
    ],
)
def test_a_file_that_is_no_table_is_a_fault_of_the_plan(name: str, content: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PlanError) as caught:
        parse(f"snapkv + table(file='{tmp_path / name}') @ keep=0.5")
    (found,) = caught.value.faults
    assert found.startswith(fault)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("[1, 2]", "table: its weights are for 2 layers, but 3 are compressed: give one for each"),
        ("[[1, 2, 3], [1, 2, 3], [1, 2, 3]]", "table: its weights are for 3 kv heads, but each layer has 2: give one "),
    ],
)
def test_a_table_of_another_model_is_refused_early_and_late(weights: str, said: str, tmp_path: Path) -> None:
    text, model = f"snapkv + table(weights={weights}) @ keep=0.5", build("llama")
    plan = parse(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        plan.allocate.allocate(request_of((1, 3, 2), 50))
    for each in (text, f"snapkv + shuffled(of=table(weights={weights})) @ keep=0.5"):
        with pytest.raises(PlanError, match=re.escape(said)):
            kvtailor.cache_for(model, each)
        model.config.save_pretrained(tmp_path)
        found = CliRunner().invoke(main, ["check", each, "--model", str(tmp_path)])
        assert found.exit_code == 2 and f"fault: {said}" in found.stderr


def test_a_cache_holds_the_shares() -> None:
    model = build("llama")
    ids, mask = prompts((60, 41))
    cache = kvtailor.cache_for(
        model, "snapkv(window=4, kernel=3) + table(weights=[[4, 2], [1, 2], [1, 2]]) @ tokens=12"
    )
    with torch.no_grad():
        model(ids, attention_mask=mask, **hand_cache(cache))
    # 72 tokens for each row, six for each weight.
    assert cache.held().tolist() == [[[24, 12], [6, 12], [6, 12]]] * 2


def test_within_another_allocator() -> None:
    table = Table(weights=((3, 1), (0.5, 2), (0, 1.5)))
    found = Inverse(of=table).allocate(request_of((1, 3, 2), 80))
    assert found[0].tolist() == [[0, 15], [5, 20], [30, 10]]
