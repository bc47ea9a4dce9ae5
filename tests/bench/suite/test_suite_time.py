"""How long a suite takes: against a plain count of products and bytes, of a model whose weights are not loaded."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.support.bench.suite_case import small_suite, write_text

from kvtailor.bench.subject import Subject
from kvtailor.bench.suite.estimate import Rates, _readings, estimate, rates_of_line
from kvtailor.bench.suite.run import prepare
from kvtailor.cli import bench
from kvtailor.errors import KvtailorError
from kvtailor.hf.model.loading import load_bare
from kvtailor.plan import Plan


def test_it_is_what_a_plain_count_of_products_and_bytes_gives(tmp_path):
    suite = small_suite(tmp_path, write_text(tmp_path))
    model = load_bare("demo")
    found = estimate(
        prepare(suite, Subject(name="demo", model=model), data=tmp_path),
        Rates(flops=1e9, bandwidth=1e8, source="made up"),
    )
    body = sum(p.numel() for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n)
    head, layers, heads, size, wide = 5120 * 256, 6, 4, 64, 2 * 2 * 64 * 2 * 6

    def attention(tokens):
        return 2 * layers * heads * size * tokens**2

    # Two plans that share a prompt, and the model's own cache; six windows of 90 + 21 tokens, and two for the checks.
    ppl = next(part for part in found.parts if part.asked.startswith("perplexity") and part.seconds is not None)
    prompt = max(2 * (body * 90 + head) + attention(90), 10 * 2 * body)
    following = 2 * 21 * (body + head) + attention(111) - attention(90)
    assert (ppl.plans, ppl.prompts) == (3, 16)
    assert ppl.seconds == pytest.approx(8 * (2 * prompt + 3 * following) / 1e9)
    needle = next(part for part in found.parts if part.asked.startswith("needle"))
    prompt = max(2 * (body * 200 + head) + attention(200), 10 * 2 * body)
    each = 32 * (2 * (body + head) + wide * 200) / 1e8
    assert needle.prompts == 4 and needle.seconds == pytest.approx(4 * (prompt / 1e9 + needle.plans * each))
    assert found.seconds == pytest.approx(sum(part.seconds or 0 for part in found.parts))
    assert found.cache == wide * 200 and found.weights == 2 * model.num_parameters()
    # What this kvtailor does not have, and a text that is not to be had, are named and not counted.
    silent = [each for each in found.assumed if each.startswith("Without an estimate: ")]
    assert any("telepathy" in each for each in silent) and any("c4" in each for each in silent)
    assert found.assumed[0].startswith("1e+09 operations")


def test_plans_share_a_prompt_where_they_read_it_alike():
    plans = [
        None,
        *map(
            Plan.parse,
            [
                "full",
                "snapkv @ keep=0.5",
                "h2o @ keep=0.5",
                "h2o @ keep=0.2",
                "reference",
                "kvzip @ keep=0.5",
                "kvzip @ keep=0.2",
            ],
        ),
    ]
    # The model's own cache, all without a mass, those with one, and `reference`; one repetition.
    assert _readings(plans, shared=True) == (4, 1)
    assert _readings(plans, shared=False) == (8, 2)


@pytest.mark.parametrize("line", ["", "flops=4e14", "flops=4e14, bytes=much", "flops=1, bytes=0", "flops=1, bytes=inf"])
def test_rates_that_are_none_are_refused(line):
    with pytest.raises(KvtailorError, match="such as 'flops=4e14, bytes=3.3e12'"):
        rates_of_line(line)


def test_no_weight_is_loaded_and_nothing_is_measured(tmp_path, monkeypatch):
    small_suite(tmp_path, write_text(tmp_path))
    monkeypatch.setattr("kvtailor.bench.subject.Subject.load", lambda *_, **__: pytest.fail("the model was loaded"))
    [suite] = tmp_path.glob("*.toml")
    words = ["--suite", str(suite), "--data", str(tmp_path), "--estimate", "flops=1e9, bytes=1e8"]
    result = CliRunner().invoke(bench.command, [*words, "--model", "demo"])
    assert result.exit_code == 0 and "at least, for all of suite" in result.output, result.output
    whole = json.loads(CliRunner().invoke(bench.command, [*words, "--json"]).stdout.splitlines()[-1])
    assert whole["seconds"] > 0 and whole["tasks"][0]["plans"] > 1
    assert "say which suite" in CliRunner().invoke(bench.command, ["--estimate"]).output
