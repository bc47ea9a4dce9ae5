"""Files of segments: what comes back, what is refused by name, and what is left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import shutil
import signal
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
import torch
from torch import Tensor

from kvtailor.errors import TierError
from kvtailor.store.segment_file import Folder, SegmentFile, inflated

TENSORS = {
    "a": torch.arange(63 * 5, dtype=torch.int32).view(63, 5),
    "empty": torch.empty((0, 3), dtype=torch.bfloat16),
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 1, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "turned": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).T,
    "one": torch.tensor(2.5),
    "flags": torch.tensor([True, False, True]),
}


def read_process_bytes() -> int:
    """Bytes that this process has fetched from the storage itself."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    tensors = {**TENSORS, "again": TENSORS["a"], "view": TENSORS["a"][1:2]}
    file = SegmentFile(Folder(tmp_path), tensors)
    found = file.packing.views(file.read())
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        assert found[name].data_ptr() % 64 == 0 or not tensor.numel()
    assert found["again"].data_ptr() == found["a"].data_ptr() != found["view"].data_ptr()
    apart = {t.data_ptr(): t for name, t in tensors.items() if t.numel() and name != "again"}
    needed = sum(t.numel() * t.element_size() for t in apart.values())
    assert file.size() == file.header_bytes + file.packing.size == file.header_bytes + file.packing.padding + needed
    assert file.header_bytes % 4096 == 0


def header_of(file: SegmentFile) -> dict[str, object]:
    data = file.path.read_bytes()
    return json.loads(data[16 : 16 + int.from_bytes(data[8:12], "little")])


def test_a_deflated_file_has_the_bytes_that_it_says(tmp_path: Path) -> None:
    """Each tensor as the formula of DEFLATE has it, or as it is; exact lengths; one CRC-32 of what lies there."""
    noise = torch.randint(0, 256, (999,), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    alike = (torch.arange(3000, dtype=torch.float32) / 7).to(torch.bfloat16).view(3, 1000)
    tensors = {**TENSORS, "again": TENSORS["a"], "noise": noise, "alike": alike}
    folder = Folder(tmp_path)
    file, plain = SegmentFile(folder, tensors, deflate=True), SegmentFile(folder, tensors)
    found = file.packing.views(file.read())
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == each.dtype and torch.equal(found[name], each) for name, each in tensors.items())
    header, data = header_of(file), file.path.read_bytes()
    lengths = header["deflate"]["lengths"]
    assert sum(lengths) == header["deflate"]["size"] == file.stored_bytes == len(data) - file.header_bytes
    assert file.size() == len(data) < plain.size() and "deflate" not in header_of(plain)
    assert int(header["crc32"], 16) == zlib.crc32(data[file.header_bytes :])
    # In the order of the tensors: "again" lies where "a" does, and "empty" nowhere.
    of = dict(zip([name for name in tensors if name not in ("again", "empty")], lengths, strict=True))
    end = len(data) - of["alike"]
    assert of["noise"] == 999 and data[end - 999 : end] == bytes(noise.tolist()), "no smaller, so as it is"
    low_high = zlib.decompressobj(-15).decompress(data[end:])
    raw = alike.view(torch.uint8).flatten()
    assert low_high == bytes(raw[::2].tolist()) + bytes(raw[1::2].tolist()) and of["alike"] < raw.numel()


@pytest.mark.parametrize("data", [b"", b"\x00", zlib.compress(bytes(64))[2:-4] + b"x", zlib.compress(bytes(65))[2:-4]])
def test_bytes_that_are_not_what_was_deflated_are_told_apart(data: bytes) -> None:
    """Whatever a checksum says: too few, too many, no such bytes, and more behind them."""
    piece = torch.zeros(64, dtype=torch.uint8)
    assert not inflated(torch.tensor(list(data), dtype=torch.uint8), piece, 1)
    whole = torch.tensor(list(zlib.compress(bytes(range(64)))[2:-4]), dtype=torch.uint8)
    assert inflated(whole, piece, 1) and piece.tolist() == list(range(64))


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="no count of what the storage gave")
def test_it_is_the_disk_that_is_read(tmp_path: Path) -> None:
    """Right after it was written, and at every reading again."""
    large = {"a": torch.randint(0, 255, (1 << 23,), dtype=torch.uint8)}
    file = SegmentFile(Folder(tmp_path), large)
    for _ in range(2):
        before = read_process_bytes()
        file.read()
        if read_process_bytes() == before and _in_memory(tmp_path):
            pytest.skip("the folder for temporary files is memory")
        assert read_process_bytes() - before >= 1 << 23


def _in_memory(path: Path) -> bool:
    """The longest mount point above a path has no disk."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if str(path).startswith(m[0])), key=lambda m: len(m[0]))[1] in ("tmpfs", "ramfs")


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def swap(path: Path, other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(data)


FAULTS = {
    "flipped bit": (lambda f, o: damage(f.path, f.header_bytes + 70), "damaged: its tensors"),
    "flipped last bit": (lambda f, o: damage(f.path, f.size() - 1), "damaged: its tensors"),
    "flipped header": (lambda f, o: damage(f.path, 30), "damaged: its header|something else"),
    "truncated": (lambda f, o: os.truncate(f.path, f.size() - 1), r"has \d+ bytes and was written with"),
    "emptied": (lambda f, o: os.truncate(f.path, 0), "has 0 bytes"),
    "longer": (lambda f, o: f.path.write_bytes(f.path.read_bytes() + b"x"), r"has \d+ bytes"),
    "foreign": (lambda f, o: f.path.write_bytes(b"x" * f.size()), "no segment file: it begins with b'xxxxxxxx'"),
    "swapped": (lambda f, o: swap(f.path, o.path), "a segment file of something else"),
    "removed": (lambda f, o: f.path.unlink(), "cannot be opened: No such file"),
    "folder removed": (lambda f, o: shutil.rmtree(f.path.parent), "cannot be opened: No such file"),
}


@pytest.mark.parametrize("deflate", [False, True], ids=["plain", "deflated"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_refused_by_name(fault: str, deflate: bool, tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file, other = (SegmentFile(folder, TENSORS, deflate=deflate) for _ in range(2))
    spoil, message = FAULTS[fault]
    spoil(file, other)
    with pytest.raises(TierError, match=f"{re.escape(str(file.path))}.*({message}).*made again from its prompt"):
        file.read()


def failing_after(name: str, count: int, number: int):
    """A function of `os` that gives an error at its call `count`; a write, after half of that call's bytes."""
    real, calls = getattr(os, name), iter(range(10**6))

    def called(*arguments):
        if next(calls) >= count:
            if name == "pwrite":
                file, data, offset = arguments
                real(file, data[: len(data) // 2], offset)
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return called


@pytest.mark.parametrize("name,call", [("pwrite", 0), ("pwrite", 1), ("pwrite", 6), ("fsync", 0), ("replace", 0)])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_nothing(
    name: str, call: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    before = SegmentFile(folder, TENSORS)
    monkeypatch.setattr(os, name, failing_after(name, call, number))
    with pytest.raises(
        TierError, match=rf"cannot write .*00000002\.segment.*{os.strerror(number)}.*has \d+ bytes free.*disk\(folder="
    ):
        SegmentFile(folder, TENSORS)
    monkeypatch.undo()
    assert sorted(p.name for p in folder.path.iterdir()) == ["00000001.segment", "lock"]
    assert torch.equal(before.packing.views(before.read())["a"], TENSORS["a"])
    assert SegmentFile(folder, TENSORS).path.name == "00000003.segment"


@pytest.mark.parametrize("deflate", [False, True], ids=["plain", "deflated"])
def test_short_writes_and_reads_go_on(deflate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:99]], offset))
    file = SegmentFile(Folder(tmp_path), TENSORS, deflate=deflate)
    found = file.packing.views(file.read())
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@contextmanager
def child(
    work: Callable[[Callable[[], str], Callable[[object], None]], None],
) -> Iterator[tuple[IO[str], IO[str], int]]:
    """Another process that works with lines from here and gives lines back; its end is waited for."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    process = os.fork()
    if process == 0:
        # The parent's OpenMP threads are not here, and what would wait for them never ends.
        torch.set_num_threads(1)
        os.close(to_write)
        with os.fdopen(to_read) as lines, os.fdopen(from_write, "w", 1) as out:
            try:
                work(lines.readline, lambda line: print(line, file=out, flush=True))
            except BaseException as error:
                print(repr(error), file=out, flush=True)
            finally:
                os._exit(0)
    os.close(to_read)
    os.close(from_write)
    with os.fdopen(to_write, "w", 1) as to, os.fdopen(from_read) as lines:
        yield to, lines, process


BIG = {"a": torch.arange(1 << 18, dtype=torch.int32)}


def test_a_full_disk_in_another_process(tmp_path: Path) -> None:
    """The kernel refuses the bytes beyond a limit, as it does on a full disk."""

    def work(_, say) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
        folder = Folder(tmp_path)
        try:
            SegmentFile(folder, BIG)
        except TierError as error:
            say(f"{error} {sorted(os.listdir(folder.path))}")

    with child(work) as (_, lines, process):
        line = lines.readline()
        assert line.startswith("disk: cannot write") and "00000001.segment" in line and line.endswith("['lock']\n")
        os.waitpid(process, 0)


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_for_long(tmp_path: Path) -> None:
    def work(*_) -> None:
        folder, real = Folder(tmp_path), os.pwrite
        held = [SegmentFile(folder, BIG) for _ in range(2)]

        def pwrite(file: int, data: bytes, offset: int) -> int:
            real(file, data[: len(data) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            return len(held)

        os.pwrite = pwrite
        SegmentFile(folder, BIG)

    with child(work) as (_, _, process):
        assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert sorted(p.suffix for p in left.iterdir()) == ["", ".partial", ".segment", ".segment"]
    foreign = left / "notes.txt"
    foreign.write_text("not ours")
    Folder(tmp_path)
    assert list(tmp_path.rglob("*.segment")) + list(tmp_path.rglob("*.partial")) == []
    assert foreign.read_text() == "not ours"
    foreign.unlink()
    folder = Folder(tmp_path)
    assert list(tmp_path.iterdir()) == [folder.path]


def test_two_processes_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    def work(ask, say) -> None:
        folder, value = Folder(tmp_path), int(ask())
        files = [SegmentFile(folder, {"a": torch.full((1000,), value + i)}) for i in range(3)]
        say(folder.path.name)
        ask()
        found = [int(f.packing.views(f.read())["a"].unique()) for f in files]
        say(found == [value, value + 1, value + 2])
        del files, folder
        say("gone")

    with child(work) as (to, lines, one), child(work) as (other_to, other_lines, other):
        to.write("100\n"), other_to.write("200\n")
        names = {lines.readline().strip(), other_lines.readline().strip()}
        mine = Folder(tmp_path)
        assert len(names) == 2 and {p.name for p in tmp_path.iterdir()} == {*names, mine.path.name}
        to.write("\n"), other_to.write("\n")
        assert [lines.readline(), other_lines.readline()] == ["True\n", "True\n"]
        assert [lines.readline(), other_lines.readline()] == ["gone\n", "gone\n"]
        os.waitpid(one, 0), os.waitpid(other, 0)
    assert list(tmp_path.iterdir()) == [mine.path]


def test_a_child_that_was_forked_removes_nothing(tmp_path: Path) -> None:
    held = [Folder(tmp_path)]
    held.append(SegmentFile(held[0], BIG))

    def work(_, say) -> None:
        held.clear()
        gc.collect()
        say("forgotten")

    with child(work) as (_, lines, process):
        assert lines.readline() == "forgotten\n"
        os.waitpid(process, 0)
    assert torch.equal(held[1].packing.views(held[1].read())["a"], BIG["a"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"under '.*file/below'.*disk\(folder="):
        Folder(tmp_path / "file" / "below")


def test_files_go_with_whoever_held_them(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    file = SegmentFile(folder, TENSORS)
    path: Path = file.path
    run_: Tensor = file.read()
    del file
    gc.collect()
    assert not path.exists() and run_.numel()
    del folder
    gc.collect()
    assert list(tmp_path.iterdir()) == []
