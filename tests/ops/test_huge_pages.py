"""For which memory huge pages are asked for, and that nothing else changes with them."""

from __future__ import annotations

import gc
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from kvtailor.ops import huge_pages

PAGE = 1 << 21
MIB = 1 << 20


@pytest.fixture(autouse=True)
def own_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAILOR_HUGE_PAGES", raising=False)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """On any system: address and size of each advice, on a system that leaves huge pages to programs."""
    seen: list[tuple[int, int]] = []

    def advise(mapping: mmap.mmap, first: int, size: int) -> None:
        assert first >= 0 and first + size <= len(mapping), "outside of the mapping"
        seen.append((huge_pages._address(mapping) + first, size))

    monkeypatch.setattr(huge_pages, "_setting", lambda: "madvise")
    monkeypatch.setattr(huge_pages, "_page_bytes", lambda: PAGE)
    monkeypatch.setattr(huge_pages, "_advise", advise)
    return seen


@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 5 * PAGE + 4097, 33 * MIB + 3])
def test_whole_huge_pages_inside_the_tensor_are_asked_for(size: int, advised: list[tuple[int, int]]) -> None:
    made = huge_pages.empty((size,), torch.uint8)
    ((first, count),) = advised
    assert first % PAGE == 0 and count == size // PAGE * PAGE
    assert first == made.data_ptr() and first + count <= made.data_ptr() + size
    # What the ledger reads: not a byte more than the tensor has.
    assert made.untyped_storage().nbytes() == size and made.shape == (size,)
    made.fill_(7)
    assert int(made.to(torch.int64).sum()) == 7 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8])
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_is_a_tensor_like_any_other(mode, dtype: torch.dtype, advised: list[tuple[int, int]]) -> None:
    with mode():
        made, plain = huge_pages.empty((4, 1024, 1024), dtype), torch.empty((4, 1024, 1024), dtype=dtype)
    assert len(advised) == 1
    for name in ("shape", "dtype", "device", "requires_grad", "is_leaf", "nbytes"):
        assert getattr(made, name) == getattr(plain, name), name
    assert made.is_inference() == plain.is_inference() and made.is_contiguous() and type(made) is torch.Tensor


def test_nothing_is_asked_for_what_is_small_or_lies_elsewhere(advised: list[tuple[int, int]]) -> None:
    small = torch.ones(PAGE - 1, dtype=torch.uint8)
    large = torch.ones(PAGE, dtype=torch.uint8)
    huge_pages.empty((PAGE - 1,), torch.uint8)
    huge_pages.empty((0,), torch.uint8)
    huge_pages.new_empty(large, (PAGE - 1,))
    huge_pages.copied(small)
    huge_pages.picked(small.view(1, -1), (torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None]))
    assert huge_pages.new_empty(large.to("meta"), (PAGE,)).device.type == "meta"
    assert huge_pages.copied(large.to("meta")).device.type == "meta"
    assert type(huge_pages.new_empty(torch.nn.Parameter(torch.ones(2)), (PAGE,))) is torch.Tensor
    with FakeTensorMode() as fake:
        assert type(huge_pages.empty((PAGE,), torch.uint8)) is not torch.Tensor
        assert type(huge_pages.copied(fake.from_tensor(large))) is not torch.Tensor
    assert advised == []


def test_what_is_read_once_stays_with_the_allocator_until_that_would_map_it_anew(advised: list) -> None:
    like = torch.ones(1, dtype=torch.uint8)
    assert huge_pages.read_buffer(like, (32 * MIB,)).shape == (32 * MIB,) and advised == []
    assert huge_pages.read_buffer(like, (32 * MIB + 1,)).shape == (32 * MIB + 1,) and len(advised) == 1


@pytest.mark.parametrize("refused", ["the advice", "the memory"])
def test_where_the_system_refuses_nothing_changes(refused: str, monkeypatch: pytest.MonkeyPatch, advised: list) -> None:
    def refuse(*given: object, **named: object) -> None:
        advised.append((0, 0))
        raise OSError(22, "Invalid argument")

    if refused == "the advice":
        monkeypatch.setattr(huge_pages, "_advise", refuse)
    else:
        monkeypatch.setattr(huge_pages.mmap, "mmap", refuse)
    states = torch.randn(4, 2048, 128)
    at = torch.arange(4)[:, None], torch.randint(0, 2048, (4, 2000))
    assert torch.equal(huge_pages.copied(states), states) and torch.equal(huge_pages.picked(states, at), states[at])
    assert huge_pages.new_empty(states, states.shape).shape == states.shape
    assert huge_pages.empty((PAGE,), torch.uint8).untyped_storage().nbytes() == PAGE
    assert len(advised) == 4, "it was asked for"


def test_an_advice_that_really_fails_is_an_error_of_the_system() -> None:
    """-1 from the system call: an address that does not begin a page."""
    with pytest.raises(OSError):
        huge_pages._advise(mmap.mmap(-1, PAGE), 1, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_copies_and_picks_are_those_of_torch(dtype: torch.dtype, advised: list[tuple[int, int]]) -> None:
    states = torch.randint(0, 255, (6, 9000, 128)).to(dtype)[1:5, :8500]
    at = torch.tensor([3, 0, 0, 2, 1])[:, None], torch.randint(0, 8500, (5, 8111))
    for found, expected in (
        (huge_pages.copied(states), states.clone(memory_format=torch.contiguous_format)),
        (huge_pages.picked(states, at), states[at]),
        (huge_pages.picked(states, (at[0].expand_as(at[1]), at[1])), states[at]),
    ):
        assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert len(advised) == 3
    with pytest.raises(IndexError):
        huge_pages.picked(states, (at[0], torch.full_like(at[1], 8500)))


def test_picks_of_nothing_are_nothing() -> None:
    states, none = torch.zeros(2, 0, 64), torch.zeros(2, 0, dtype=torch.int64)
    assert huge_pages.picked(states, (none, none)).shape == (2, 0, 64)


def test_what_autograd_follows_is_left_to_torch(advised: list[tuple[int, int]]) -> None:
    states = torch.randn(4, 2048, 128, requires_grad=True)
    at = torch.arange(4)[:, None], torch.arange(2048).expand(4, -1)
    found = huge_pages.picked(states, at)
    found.sum().backward()
    assert states.grad is not None and advised == []


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"enabled": "always [madvise] never", "hpage_pmd_size": "2097152"}, ("madvise", PAGE)),
        ({"enabled": "[always] madvise never", "hpage_pmd_size": "2097152"}, ("always", None)),
        ({"enabled": "always madvise [never]", "hpage_pmd_size": "2097152"}, ("never", None)),
        ({}, (None, None)),
        ({"enabled": "always [madvise] never"}, ("madvise", None)),
        ({"enabled": "always [madvise] never", "hpage_pmd_size": "33554432"}, ("madvise", 1 << 25)),
        ({"enabled": "nonsense", "hpage_pmd_size": "much"}, (None, None)),
        (
            {
                "enabled": "always [madvise] never",
                "hpage_pmd_size": "2097152",
                "hugepages-2048kB/enabled": "always [inherit] madvise never",
            },
            ("madvise", PAGE),
        ),
        (
            {
                "enabled": "always madvise [never]",
                "hpage_pmd_size": "2097152",
                "hugepages-2048kB/enabled": "always inherit [madvise] never",
            },
            ("madvise", PAGE),
        ),
        (
            {
                "enabled": "always [madvise] never",
                "hpage_pmd_size": "2097152",
                "hugepages-2048kB/enabled": "always inherit madvise [never]",
            },
            ("never", None),
        ),
    ],
)
def test_the_setting_of_the_system_decides(
    files: dict[str, str], expected: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    setting, size = huge_pages._setting.__wrapped__, huge_pages._page_bytes.__wrapped__
    monkeypatch.setattr(huge_pages.sys, "platform", "linux")
    monkeypatch.setattr(huge_pages, "_setting", setting)
    monkeypatch.setattr(huge_pages, "_page_bytes", size)
    assert (setting(), size()) == expected
    said = huge_pages.explained()
    assert said.startswith("asked for") is (expected[1] is not None)
    assert expected[0] in ("madvise", None) or f"({expected[0]})" in said
    monkeypatch.setattr(huge_pages.sys, "platform", "darwin")
    assert setting() is None and huge_pages.size_asked_for() is None


def test_the_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    huge_pages.size_asked_for()
    monkeypatch.setattr(huge_pages, "_read", lambda name: pytest.fail("a file was read again"))
    for _ in range(3):
        huge_pages.size_asked_for()
        huge_pages.empty((PAGE,), torch.uint8)


def test_the_switch(monkeypatch: pytest.MonkeyPatch, advised: list[tuple[int, int]]) -> None:
    def asks() -> bool:
        advised.clear()
        huge_pages.empty((PAGE,), torch.uint8)
        return bool(advised)

    for text, expected in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("KVTAILOR_HUGE_PAGES", text)
        assert asks() is expected and (huge_pages.size_asked_for() is not None) is expected
    assert huge_pages.explained() == "not asked for: KVTAILOR_HUGE_PAGES is 0"
    with huge_pages.asking(True):
        assert asks()
        with huge_pages.asking(False):
            assert not asks()
        assert asks()
    monkeypatch.setenv("KVTAILOR_HUGE_PAGES", "yes")
    with pytest.raises(ValueError, match="KVTAILOR_HUGE_PAGES is 'yes': write 0 .* or 1"):
        huge_pages.size_asked_for()
    # Nothing is looked up for what is small.
    huge_pages.empty((1,), torch.uint8)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such advice")
def test_the_advice_is_the_one_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []

    class Mapping:
        def madvise(self, *arguments: int) -> None:
            given.append(arguments)

    huge_pages._advise(Mapping(), 12, 34)  # type: ignore[arg-type]
    assert given == [(mmap.MADV_HUGEPAGE, 12, 34)]


def test_memory_goes_back_with_the_last_view(advised: list[tuple[int, int]]) -> None:
    made = huge_pages.empty((4, PAGE), torch.uint8)
    place, view = made.data_ptr(), made[3, 5:]
    del made
    gc.collect()
    view.fill_(1)
    assert _mapped(place)
    del view
    gc.collect()
    assert not _mapped(place)


def test_what_counts_the_bytes_of_operations_counts_these(advised: list[tuple[int, int]]) -> None:
    with LiveBytes() as count:
        made = huge_pages.empty((PAGE,), torch.uint8)
        other = huge_pages.copied(made.fill_(1))
        assert count.now == 2 * PAGE
        del made, other
        torch.zeros(10, dtype=torch.uint8)
        assert count.now == 10 and count.peak == 2 * PAGE
    assert len(advised) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_has_a_copy_of_its_own(advised: list[tuple[int, int]]) -> None:
    made = huge_pages.empty((PAGE,), torch.uint8)
    array = made.numpy()
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] = 2
        os._exit(0 if int(array[0]) == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert int(made.max()) == 1


@pytest.fixture
def granted() -> Iterator[None]:
    if huge_pages._page_bytes() is None:
        pytest.skip(f"huge pages are {huge_pages.explained()}")
    yield


def test_the_system_gives_huge_pages_to_what_is_large(granted: None) -> None:
    page = huge_pages._page_bytes()
    made = huge_pages.empty((4 * page + 12345,), torch.uint8)
    assert _advised_part(made, "AnonHugePages") == _advised_part(made, "Rss") == 0, "it takes no memory yet"
    before = _resident()
    made.fill_(1)
    grown = _resident() - before
    given = _advised_part(made, "AnonHugePages")
    if given == 0:
        pytest.skip("this system granted no huge page: its memory may be in small pieces")
    assert given % page == 0 and given <= _advised_part(made, "Rss") == 4 * page
    # What is resident is what the ledger reads; the rest of a huge page at its end is not taken.
    assert abs(grown - made.untyped_storage().nbytes()) < page // 2


def test_a_part_that_is_written_takes_no_more_than_its_huge_pages(granted: None) -> None:
    page = huge_pages._page_bytes()
    made = huge_pages.empty((8 * page,), torch.uint8)
    made[: 2 * page + 1].fill_(1)
    assert 2 * page < _advised_part(made, "Rss") <= 3 * page


def _advised_part(made: torch.Tensor, what: str) -> int:
    """Bytes that the kernel says of the mapping in which a tensor begins, which is all of it that was advised."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            first, end = (int(each, 16) for each in found.groups())
            inside = first <= made.data_ptr() < end
        elif inside and line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is not mapped")


def _resident() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def _mapped(address: int) -> bool:
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system does not say what is mapped")
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, end = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < end:
            return True
    return False
