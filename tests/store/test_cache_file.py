"""Files of saved caches: whole or not at all, beside whatever else is in the folder."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.store.test_segment_file import TENSORS, child, failing_after

from kvtailor.errors import CacheFileError
from kvtailor.store.cache_file import read_cache_file, write_cache_file

ABOUT = {"plan": "full", "text": 'with "quotes" and \u00e4'}
BIG = {"a": torch.arange(1 << 17, dtype=torch.int64)}
CAPACITY = 256 << 10


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_written_is_read_here_and_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    write_cache_file(path, TENSORS, ABOUT)
    found = read_cache_file(path)
    assert found.checked and found.about == ABOUT and names(tmp_path) == ["cache"]
    for read in (found.tensors, load_file(path)):
        assert read.keys() == TENSORS.keys()
        assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in TENSORS.items())
    storages = {t.untyped_storage().data_ptr() for t in found.tensors.values() if t.numel()}
    assert len(storages) == sum(1 for t in TENSORS.values() if t.numel())


def test_files_of_a_user_stay(tmp_path: Path) -> None:
    """Whatever they are called."""
    for name in ("e.partial", "e.tmp", ".kvtailor-1.partial", ".kvtailor-1-0123456789abcdef.partial.txt"):
        (tmp_path / name).write_text("of a user")
    before = names(tmp_path)
    write_cache_file(tmp_path / "e", TENSORS, ABOUT)
    read_cache_file(tmp_path / "e")
    assert names(tmp_path) == sorted([*before, "e"])
    assert all((tmp_path / name).read_text() == "of a user" for name in before)


@pytest.mark.parametrize("name,call", [("pwrite", 0), ("pwrite", 1), ("fsync", 0), ("replace", 0), ("open", 0)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_leaves_what_was_there(
    name: str, call: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    write_cache_file(path, TENSORS, ABOUT)
    before = path.read_bytes()
    monkeypatch.setattr(os, name, failing_after(name, call, number))
    with pytest.raises(
        CacheFileError,
        match=rf"cannot write the saved cache to '{re.escape(str(path))}', \d{{7}} bytes: {os.strerror(number)}; "
        r"its file system has \d+ bytes free.*as it was",
    ):
        write_cache_file(path, BIG, ABOUT)
    monkeypatch.undo()
    assert path.read_bytes() == before and names(tmp_path) == ["cache"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of `CAPACITY` bytes."""
    place = tmp_path / "small"
    place.mkdir()
    if shutil.which("mount") is None or os.getuid() != 0:
        pytest.skip("to mount a file system of a given size needs root")
    asked = ["mount", "-t", "tmpfs", "-o", f"size={CAPACITY}", "tmpfs", str(place)]
    if subprocess.run(asked, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let a file system be mounted")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_with_the_space_it_has(small_disk: Path) -> None:
    path = small_disk / "cache"
    write_cache_file(path, TENSORS, ABOUT)
    with pytest.raises(
        CacheFileError, match=r"'.*small/cache', (\d+) bytes: No space left on device.* (\d+) bytes free"
    ) as told:
        write_cache_file(path, BIG, ABOUT)
    needed, free = (int(each) for each in re.findall(r"(\d+) bytes", str(told.value)))
    assert 1 << 20 < needed < (1 << 20) + 4096 and CAPACITY - 16384 <= free < CAPACITY
    assert names(small_disk) == ["cache"] and read_cache_file(path).checked


def test_a_limit_of_the_process_is_named(tmp_path: Path) -> None:
    def work(_, say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        try:
            write_cache_file(tmp_path / "cache", BIG, ABOUT)
        except CacheFileError as error:
            say(f"{error} {names(tmp_path)}")

    with child(work) as (_, lines, process):
        line = lines.readline()
        assert "cannot write the saved cache" in line and os.strerror(errno.EFBIG) in line and line.endswith("[]\n")
        os.waitpid(process, 0)


def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    def work(ask, say) -> None:
        real = os.pwrite

        def pwrite(file: int, data: bytes, offset: int) -> int:
            real(file, data[: len(data) // 2], offset)
            say("writing")
            if ask().strip() == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return real(file, data, offset)

        os.pwrite = pwrite
        write_cache_file(tmp_path / "cache", BIG, ABOUT)
        say("done")

    with child(work) as (to_die, dying, one), child(work) as (to_live, living, other):
        assert dying.readline() == living.readline() == "writing\n"
        assert len(names(tmp_path)) == 2
        to_die.write("die\n")
        assert os.WTERMSIG(os.waitpid(one, 0)[1]) == signal.SIGKILL
        assert len(names(tmp_path)) == 2
        write_cache_file(tmp_path / "other", TENSORS, ABOUT)
        left = names(tmp_path)
        assert len(left) == 2 and left[0].startswith(f".kvtailor-{other}-") and left[1] == "other"
        to_live.write("on\non\n")
        assert living.readline() == "writing\n" and living.readline() == "done\n"
        os.waitpid(other, 0)
    assert names(tmp_path) == ["cache", "other"] and read_cache_file(tmp_path / "cache").checked


def test_two_writers_of_one_path_leave_one_whole_file(tmp_path: Path) -> None:
    def work(ask, say) -> None:
        value = int(ask())
        for _ in range(20):
            write_cache_file(tmp_path / "cache", {"a": torch.full((50_000,), value)}, {"who": str(value)})
        say("done")

    with child(work) as (to, lines, one), child(work) as (other_to, other_lines, other):
        to.write("1\n"), other_to.write("2\n")
        found, ended = set(), 0
        while not ended:
            ended, _ = os.waitpid(one, os.WNOHANG)
            if (tmp_path / "cache").exists():
                file = read_cache_file(tmp_path / "cache")
                assert file.tensors["a"].unique().tolist() == [int(file.about["who"])]
                found.add(file.about["who"])
        assert lines.readline() == other_lines.readline() == "done\n"
        os.waitpid(other, 0)
    assert names(tmp_path) == ["cache"] and found and found <= {"1", "2"}


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CacheFileError, match="absent/cache.*No such file or directory"):
        write_cache_file(tmp_path / "absent" / "cache", TENSORS, ABOUT)
    with pytest.raises(CacheFileError, match="absent.*No such file or directory"):
        read_cache_file(tmp_path / "absent")
    with pytest.raises(CacheFileError, match="is a folder and no regular file"):
        read_cache_file(tmp_path)


@pytest.mark.parametrize("data", [b"", b"x", bytes(8), b"\xff" * 64, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{}"])
def test_what_is_no_cache_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(data)
    with pytest.raises(CacheFileError, match="cache' is damaged or was changed|not a saved cache of this kvtailor"):
        read_cache_file(tmp_path / "cache")
