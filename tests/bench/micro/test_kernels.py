"""`kvtailor bench kernels`: what it prints, and that a wrong kernel gets no time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from kvtailor.bench.micro import kernels
from kvtailor.cli import main
from kvtailor.ops.cpu.library import built

pytestmark = pytest.mark.skipif(not built(), reason="the C++ kernels were not built: no compiler")


def test_it_runs_and_ends_with_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "APART", 1)
    found = CliRunner().invoke(main, ["bench", "kernels", "--contexts", "512", "--rounds", "1"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.stdout.splitlines()[-1])
    assert {title.split(",")[0] for title in told["tables"]} >= {"grouped heads", "single heads", "ragged heads"}
    (grouped,) = [rows for title, rows in told["tables"].items() if title.startswith("grouped")]
    assert {"kvtailor int8", "kvtailor kivi 2 bits", "DynamicCache + sdpa"} <= {row["name"] for row in grouped}
    assert "RED" not in found.stdout


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = kernels.attend_coded

    def wrong(query: Any, keys: Any, values: Any, **how: Any) -> Any:
        out, lse = right(query, keys, values, **how)
        return (out * 1.05 if getattr(keys, "bits", None) == 8 else out), lse

    monkeypatch.setattr(kernels, "APART", 1)
    monkeypatch.setattr(kernels, "attend_coded", wrong)
    tables = kernels.measure([512], 1)
    assert "kvtailor int8                      relative error 5.0e-02  RED: not timed" in capsys.readouterr().out
    for title, rows in tables.items():
        assert "kvtailor int8" not in {row["name"] for row in rows}, title


def test_options_of_plans_are_refused() -> None:
    found = CliRunner().invoke(main, ["bench", "kernels", "--windows", "3"])
    assert found.exit_code == 2 and "--windows is not for kernels" in found.output
