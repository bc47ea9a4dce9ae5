"""What the command line says of a model that caches latents, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.support.seam.latent_zoo import latent_configs

from kvtailor.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> str:
    latent_configs()["deepseek_v3"].save_pretrained(tmp_path)
    return str(tmp_path)


def said(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(words))
    return result.exit_code, result.output


def test_show_counts_the_bytes_of_latents(folder: str) -> None:
    code, text = said(
        "show", "vector(bits=8)", "--model", folder, "--cache-dtype", "float32", "--tokens", "1000", "--json"
    )
    assert code == 0, text
    assert "latents of 36, rotated keys of 8, float32" in text
    found = json.loads(text.strip().splitlines()[-1])
    # 36 + 8 numbers in float32, and in 8 bits with a scale in float32 for each of the two.
    assert found["closed_form"]["full_bytes_per_token_and_kv_head"] == 44 * 4
    assert found["closed_form"]["bytes_per_token_and_kv_head"] == 44 + 2 * 4
    assert found["closed_form"]["full_bytes_per_token"] == 3 * 44 * 4
    assert found["holding"]["full_bytes"] == 1000 * 3 * 44 * 4


def test_check_says_what_cannot_be(folder: str) -> None:
    code, text = said("check", "snapkv @ tokens=64", "--model", folder)
    assert code == 0, text
    code, text = said("check", "keydiff + rolling @ tokens=64", "--model", folder)
    assert code == 2
    for name in ("keydiff", "rolling"):
        assert f"{name} does not serve layers that hold latents" in text
