"""Which variant is loaded, and what is said where there is none."""

from __future__ import annotations

import ctypes
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtailor.errors import FileError
from kvtailor.ops.cpu import library as module
from kvtailor.ops.cpu.library import (
    ABI,
    Alike,
    Call,
    Coding,
    Fitting,
    Map,
    Offset,
    PartCoordinates,
    Prompt,
    Side,
    Step,
    Union,
    built,
    library,
    load,
    why_none,
)

FOLDER = Path(module.__file__).parent
needs_built = pytest.mark.skipif(not built(), reason="the C++ kernels were not built: no compiler")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    library.cache_clear()
    yield
    library.cache_clear()


@needs_built
def test_the_best_that_runs_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTAILOR_CPU", raising=False)
    loaded = library()
    assert loaded is not None
    assert loaded.variant == next(name for name, path in built().items() if load(path) is not None)


@needs_built
def test_no_variant_of_this_machine_is_missing() -> None:
    """Extensions are optional, so that an error of the compiler in one of them ends no build."""
    setup = runpy.run_path(str(Path(__file__).parents[3] / "setup.py"))
    assert set(built()) == set(setup["VARIANTS"])


@pytest.mark.skipif("dotprod" not in built() or sys.platform != "linux", reason="no kernels for 64-bit ARM on Linux")
def test_dot_products_run_where_the_processor_has_them() -> None:
    """Bit 20 of what the kernel says of it (HWCAP_ASIMDDP): so under `QEMU_CPU=cortex-a72` they do not."""
    has = ctypes.CDLL(None).getauxval(16) >> 20 & 1
    assert (load(built()["dotprod"]) is not None) == bool(has)


@needs_built
def test_another_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTAILOR_CPU", "portable")
    loaded = library()
    assert loaded is not None and loaded.variant == "portable"


def test_a_name_that_was_not_built_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTAILOR_CPU", "avx1024")
    with pytest.raises(ValueError, match="KVTAILOR_CPU=avx1024: no such variant"):
        library()


def test_without_a_compiler_it_is_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVTAILOR_CPU", raising=False)
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    with pytest.warns(UserWarning, match=re.escape("no C++ compiler was found at installation")) as said:
        assert library() is None and library() is None
    assert len(said) == 1


def test_a_file_that_does_not_load_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels_portable.so").write_bytes(b"no library")
    monkeypatch.setattr(module, "_FOLDER", tmp_path)
    assert load(built()["portable"]) is None
    assert why_none() == "kvtailor's C++ kernels do not load on this machine"


@needs_built
def test_kernels_of_other_sources_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = built()
    for path in paths.values():
        load(path)
    monkeypatch.setattr(module, "ABI", ABI + 1)
    for path in paths.values():
        with pytest.raises(FileError, match=rf"{path.name} was built .*\(ABI {ABI}, needed is {ABI + 1}\)"):
            load(path)
    with pytest.raises(FileError, match=r"setup.py build_ext --inplace"):
        library()


def test_kernels_without_a_number_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such were built before there was one."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with pytest.raises(FileError, match=rf"ABI 0, needed is {ABI}"):
        load(tmp_path / "kernels_portable.so")


def test_both_sources_have_the_same_number() -> None:
    found = re.search(r"^constexpr int32_t ABI = (\d+);$", (FOLDER / "layouts.h").read_text(), re.MULTILINE)
    assert found is not None and int(found[1]) == ABI


@pytest.mark.parametrize(
    ("structure", "header"),
    [
        (Side, "layouts.h"),
        (Call, "attention.cpp"),
        (Alike, "alike.cpp"),
        (Coding, "quantise.cpp"),
        (Prompt, "prompt.cpp"),
        (Map, "coordinates.h"),
        (Offset, "offset.h"),
        (PartCoordinates, "step.h"),
        (Step, "step.h"),
        (Union, "step.h"),
        (Fitting, "fitting.h"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_structures_have_the_fields_of_their_cpp(structure: type[ctypes.Structure], header: str) -> None:
    source = (FOLDER / header).read_text(encoding="utf-8")
    name = structure.__name__.removeprefix("Part")
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", source, re.DOTALL)
    assert body is not None
    fields: list[str] = []
    for line in body.group(1).splitlines():
        # A type, and names of which each may be a pointer, or a pointer to pointers.
        declared = re.match(r"\s*(?:const )?\w+((?:[\s*]|const\b)+\w+(?:,(?:[\s*]|const\b)*\w+)*);", line)
        names = re.sub(r"\*|\bconst\b", " ", declared.group(1)).split(",") if declared else []
        fields += [each.strip() for each in names]
    assert fields == [name for name, *_ in structure._fields_]


@pytest.mark.skipif(sys.platform != "linux", reason="sizes of the shared libraries of Linux")
@needs_built
def test_all_variants_together_take_at_most_a_megabyte_and_a_half() -> None:
    assert sum(path.stat().st_size for path in built().values()) < 1_500_000
