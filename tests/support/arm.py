"""The tests of the C++ kernels on a 64-bit ARM processor that QEMU emulates: `make test-arm`.

An aarch64 Python comes from Debian and its packages from PyPI, into `build/arm`, once (some 250 MB are downloaded, 1 GB
is kept). There setup.py builds the kernels as it would on such a machine, by the cross-compiler, and pytest runs. What
follows on the command line is for pytest, in place of the sample of `tests/ops/cpu`:

    .venv/bin/python -m tests.support.arm tests/ops/cpu/test_library.py -k best

`QEMU_CPU=cortex-a72` is a processor without dot products, so one that does not run the variant `dotprod`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "arm"
SYSTEM, PACKAGES, BUILT = FOLDER / "system", FOLDER / "packages", FOLDER / "built"
# What must be there, and the Debian package that has it.
NEEDED = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
PYTHON = "python3.11"
DEBIAN = (PYTHON, "libstdc++6", "libgomp1")
# The last for this processor on PyPI that needs no CUDA to be imported.
TORCH = "torch==2.10.0"
# By name, since pip would take what torch needs on the processor that it runs on itself.
PYPI = (
    *("torch", "numpy", "scipy", "safetensors", "pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock", "typing-extensions", "setuptools"),
    *("pytest", "pytest-timeout", "pluggy", "iniconfig", "packaging", "pygments", "hypothesis", "sortedcontainers"),
)
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")


def run(command: list[str], what: str, **environment: str) -> None:
    """Run a command of the set-up.

    Raises:
        SystemExit: it failed; with one sentence that says at what, and what it said last.
    """
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing was said").splitlines()[-1]
        raise SystemExit(f"the kernels were not tested on ARM, because {what} failed: {said}")


def install_system() -> None:
    """Unpack an aarch64 Python from Debian, by lists of its own: the machine's packages stay as they are."""
    state = FOLDER / "apt"
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt, "update"], "reading Debian's lists of packages for arm64")
    run(
        [*apt, "install", "-y", "--no-install-recommends", "--download-only", *DEBIAN],
        f"downloading {PYTHON} for arm64",
    )
    for package in sorted((state / "archives").glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(SYSTEM)], f"unpacking {package.name}")


def install_packages() -> None:
    """Install what the tests import, in the versions of constraints.txt, but for torch."""
    constraints = FOLDER / "constraints.txt"
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join([*(line for line in pinned if not line.startswith("torch==")), TORCH]) + "\n")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--upgrade"]
    where = [f"--platform={name}" for name in PLATFORMS]
    which = ["--only-binary=:all:", "--python-version=3.11", "-c", str(constraints), "--target", str(PACKAGES)]
    run([*pip, *where, *which, *PYPI], "installing packages for aarch64")


def emulated(*arguments: str) -> list[str]:
    return ["qemu-aarch64", "-L", str(SYSTEM), str(SYSTEM / "usr" / "bin" / PYTHON), *arguments]


def main(arguments: list[str]) -> int:
    """Set up what is missing, build the kernels, run the tests; give pytest's status."""
    missing = [f"{name} (Debian's {package})" for name, package in NEEDED.items() if shutil.which(name) is None]
    if missing:
        raise SystemExit(f"the kernels were not tested on ARM, because these are missing: {', '.join(missing)}")
    for made, install in ((SYSTEM, install_system), (PACKAGES, install_packages)):
        ready = FOLDER / f"{made.name}.ready"
        if not ready.exists():
            print(f"setting up {made.relative_to(ROOT)}, once", flush=True)
            install()
            ready.touch()
    here = {
        "PYTHONPATH": f"{PACKAGES}:{ROOT}",
        "PYTHONPYCACHEPREFIX": str(FOLDER / "compiled"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    shutil.rmtree(BUILT, ignore_errors=True)
    build = ("-q", "build", "--build-base", str(FOLDER / "objects"), "--build-lib", str(BUILT))
    run(emulated("setup.py", *build), "building the package", **here)
    if not any(BUILT.rglob("kernels_dotprod.so")):
        raise SystemExit("the kernels were not tested on ARM, because aarch64-linux-gnu-g++ did not compile them")
    print("running tests under QEMU: Python and torch alone take a minute or two to begin", flush=True)
    here["PYTHONPATH"] = f"{BUILT}:{here['PYTHONPATH']}"
    tests = arguments or ["--sample", "tests/ops/cpu"]
    # Hypothesis takes an emulated processor for a slow test, but under what it calls `ci`.
    pytest = emulated("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", *tests)
    return subprocess.run(pytest, cwd=ROOT, env={**os.environ, **here}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
