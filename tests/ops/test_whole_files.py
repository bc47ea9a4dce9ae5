"""Files: whole or not at all, regular ones alone, and never read as other content than was written."""

from __future__ import annotations

import ast
import errno
import json
import os
import random
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import FileError, KvtailorError
from kvtailor.ops.files import (
    append_line,
    read_bytes,
    read_text,
    read_toml,
    seal_json,
    seal_toml,
    unseal_json,
    unseal_toml,
    write_whole,
)
from kvtailor.ops.tensor_file import Format, write_tensor_file

SOURCE = Path(kvtailor.__file__).parent
# Of this package, or of the system.
OWN = ("plan/registry.py", "cli/__init__.py", "calibration/contract.py", "bench/kinds.py", "cli/machine_share.py")
OWN = (*OWN, "ops/huge_pages.py", "bench/measure", "bench/report/page/")


def test_nothing_else_reads_or_writes_files() -> None:
    """Who does finds its own half of what can go wrong there: pipes, full disks, links, cut pages."""
    odd = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith((*OWN, "ops/files.py")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            # `read_text(path)` of `ops/files.py` is a name, and `path.read_text()` an attribute of a path.
            of_path = isinstance(node.func, ast.Attribute) and owner not in ("files", "formatter", "sizes")
            if of_path:
                found = called in ("read_text", "read_bytes", "write_text", "write_bytes")
            else:
                found = called == "open" and "devnull" not in ast.unparse(node)
            if (
                found
                or called in ("save_file", "load_file")
                or (called == "savefig" and "drawn" not in ast.unparse(node))
            ):
                odd.append(f"{name}:{node.lineno} {ast.unparse(node)[:60]}")
    assert not odd


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    """As root even /dev/null would give way to a file."""
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("before")
    link.symlink_to(file)
    tensors = {"x": torch.zeros(3)}
    form = Format(name="test", unchecked=None, what="test", cure="write it again")
    for write in (lambda at: write_whole(at, "new"), lambda at: write_tensor_file(at, tensors, {}, form)):
        with pytest.raises(FileError, match="what is there is no regular file, so nothing replaces it"):
            write(pipe)
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
    write_whole(link, "new")
    assert not link.is_symlink() and link.read_text() == "new" and file.read_text() == "before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "link", "pipe"]


def full(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let the disk take so many bytes more."""
    left = [after]

    def limited(write: Callable[..., int]) -> Callable[..., int]:
        def some(file: int, data: memoryview, *offset: int) -> int:
            if not left[0]:
                raise OSError(number, os.strerror(number))
            taken = write(file, bytes(data)[: left[0]], *offset)
            left[0] -= taken
            return taken

        return some

    for name in ("write", "pwrite"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))


@pytest.mark.parametrize("after", [0, 1, 40_000])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_file_is_written_whole_or_not_at_all(
    after: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    write_whole(path, "before")
    full(monkeypatch, after, number)
    with pytest.raises(FileError, match=rf"cannot write '.*page.html', 80000 bytes: {os.strerror(number)}"):
        write_whole(path, "x" * 80_000)
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["page.html"]
    monkeypatch.undo()
    write_whole(path, "after \u2028")
    assert read_text(path) == "after \u2028"


@pytest.mark.parametrize("after", [0, 1, 30])
def test_a_line_is_written_whole_or_not_at_all(after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    append_line(path, "first")
    full(monkeypatch, after)
    with pytest.raises(KvtailorError, match="No space left on device.*The lines before it are there"):
        append_line(path, "x" * 60)
    monkeypatch.undo()
    assert path.read_text() == "first\n"
    append_line(path, "second")
    assert path.read_text() == "first\nsecond\n"


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    own = tmp_path / "own.txt"
    own.write_text("of a user")
    for name in ("page", "lines"):
        (tmp_path / name).symlink_to(own)
    write_whole(tmp_path / "page", "a page")
    with pytest.raises(FileError, match="cannot write a line"):
        append_line(tmp_path / "lines", "a line")
    assert own.read_text() == "of a user"
    assert not (tmp_path / "page").is_symlink() and (tmp_path / "page").read_text() == "a page"


@pytest.mark.parametrize("read", [read_bytes, read_text, read_toml])
def test_what_is_no_regular_file_is_refused_and_not_waited_for(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), (Path("/dev/zero"), "a device")):
        with pytest.raises(FileError, match=f"is {kind} and no regular file"):
            read(path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "nothing")


def test_a_text_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a = '\xff'\n")
    for read in (read_text, read_toml):
        with pytest.raises(FileError, match="is no text in UTF-8"):
            read(tmp_path / "a")


def flips(data: bytes, count: int, state: int) -> list[bytes]:
    draw, found = random.Random(state), []
    for _ in range(count):
        changed = bytearray(data)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        found.append(bytes(changed))
    return found


def test_no_flip_in_json_is_read_as_other_content() -> None:
    """What has lost its checksum still has an entry that no reader knows."""
    content = {"a": [1, 2.5, None], "b\u2028": '\u00e4 \\ " , "checksum": "0123456789abcdef"}'}
    text = seal_json(json.dumps(content, ensure_ascii=False))
    assert json.loads(unseal_json(text)[0]) == content and unseal_json(text)[1]
    assert unseal_json(json.dumps(content)) == (json.dumps(content), False)
    for changed in flips(text.encode(), 2000, 1):
        try:
            found = json.loads(unseal_json(changed.decode())[0])
        except ValueError:
            continue
        assert found.keys() - content.keys(), changed


def test_no_flip_in_toml_is_read_as_other_content() -> None:
    text = 'a = "\u00e4"\n# a comment\n[b]\nc = 1\n'
    assert unseal_toml(seal_toml(text)) == text == unseal_toml(text)
    for changed in flips(seal_toml(text).encode(), 2000, 2):
        try:
            found = tomllib.loads(unseal_toml(changed.decode()))
        except ValueError:
            continue
        # The flip is in the checksum itself, which is a comment.
        assert found == tomllib.loads(text), changed


def test_toml_that_was_edited_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    write_whole(path, seal_toml("a = 1\n").replace("1", "2", 1))
    with pytest.raises(FileError, match="does not have the checksum.*take away its last line"):
        read_toml(path)
