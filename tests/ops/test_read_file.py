"""Files that methods read: what they held, and a sentence where there is none."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kvtailor.ops.files import read_file


def test_gives_bytes_their_hash_and_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00one")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in (str(tmp_path / "a.bin"), "a.bin", "~/a.bin"):
        found = read_file(path, "x: file")
        assert (found.name, found.data, found.hash) == ("a.bin", b"\x00one", hashlib.sha256(b"\x00one").hexdigest())


def test_what_is_not_there_is_said_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^x: file is 'no.json', and there is no file {tmp_path}/no.json: name one"):
        read_file("no.json", "x: file")
    for path in (str(tmp_path), "a\0b", "a" * 5000):
        with pytest.raises(ValueError, match=r"^x: file is '.*', which cannot be read: "):
            read_file(path, "x: file")
