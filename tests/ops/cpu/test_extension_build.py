"""The extension as it is built and shipped: with a compiler, without one, and under the sanitisers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from kvtailor.ops.cpu.library import VARIANTS, built

ROOT = Path(__file__).parents[3]
SOURCES = sorted((ROOT / "src" / "kvtailor" / "ops" / "cpu").glob("*.cpp"))
COMPILER = shutil.which("g++")
pytestmark = pytest.mark.long
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++ here")


def wheel(folder: Path, **environment: str) -> tuple[list[str], float]:
    """The files of a wheel that is built from a copy of the project, and the seconds it took."""
    copy = folder / "project"
    kept = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")
    copy.mkdir()
    for name in kept:
        shutil.copy(ROOT / name, copy / name)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, copy],
        check=True,
        env={**os.environ, **environment},
    )
    (made,) = folder.glob("*.whl")
    return zipfile.ZipFile(made).namelist(), time.perf_counter() - began


@needs_compiler
def test_a_wheel_holds_the_kernels(tmp_path: Path) -> None:
    names, _ = wheel(tmp_path)
    assert {f"kvtailor/ops/cpu/kernels_{name}.so" for name in built()} <= set(names)


def test_a_wheel_without_a_compiler_holds_everything_else(tmp_path: Path) -> None:
    names, _ = wheel(tmp_path, CC="/nowhere/cc", CXX="/nowhere/c++")
    assert "kvtailor/ops/attention/cpu/attention.py" in names
    assert not any(name.endswith(".so") for name in names)


UNDER_SANITISERS = """
import sys
from pathlib import Path
import pytest
from kvtailor.ops.cpu import library
path = Path(sys.argv[1])
library.built = lambda: {path.stem.removeprefix("kernels_"): path}
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not long", *sys.argv[2:]]))
"""


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_byte_is_read_that_is_not_ours(variant: str, tmp_path: Path) -> None:
    """The tests of the kernels, run once more against a build with AddressSanitizer and UBSan."""
    if variant not in built():
        pytest.skip(f"{variant} was not built")
    flags = {
        "avx512vnni": ["-march=cascadelake"],
        "avx2": AVX2,
        # Its one operation as AVX-512 writes it, since few machines have it.
        "avxvnni": [*AVX2, "-D__AVXVNNI__", "-DADD_PAIRS_OF_AVX512"],
        "dotprod": ["-march=armv8.2-a+dotprod"],
        "portable": [],
    }[variant]
    made = tmp_path / f"kernels_{variant}.so"
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-sanitize=vptr"]
    always = ["-std=c++17", "-O1", "-g", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wno-psabi"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *always, *checks, *flags, *map(str, SOURCES), "-o", str(made)], check=True)
    runtimes = [
        subprocess.run(
            [COMPILER, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    tests = [
        str(Path(__file__).with_name(f"test_{name}.py"))
        for name in (
            "coded_attention",
            "level_attention",
            "turned_attention",
            "attention_mass",
            "prompt_mass",
            "alike",
            "quantise",
        )
    ]
    done = subprocess.run(
        [sys.executable, "-c", UNDER_SANITISERS, str(made), *tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(runtimes),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
