"""Builds the C++ kernels: one shared library for each instruction set, none where there is no compiler.

They are plain C functions, so that nothing of Python or torch is needed to build them, and a wheel serves every version
of both. Which of them a machine runs is chosen when it runs: see src/kvtailor/ops/cpu/library.py.

A wheel with kernels is tagged `py3-none-PLATFORM`, one without them `py3-none-any`. KVTAILOR_PURE=1 leaves them out.
See docs/decisions/0025-packages.md.
"""

import ast
import os
import platform
import re
import sys
import tomllib
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "src/kvtailor/ops/cpu"
ALWAYS = ["-std=c++17", "-O3", "-g0", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math"]
# Python's own flags on most machines, without which GCC 12 makes the integer kernels 3 to 6 % slower.
ALWAYS += ["-fwrapv"]
# Nothing is thrown through them.
ALWAYS += ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]
# -Wpsabi: vectors are passed between inlined functions alone. -Wmaybe-uninitialized: GCC 12's own headers.
QUIET = ["-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
# Without VNNI, AVX-512 was nowhere faster than AVX2 but for `mxfp8`: docs/kernels.md.
VNNI = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mprefer-vector-width=512", *AVX2]
# Of 64-bit Arm since 2017: what the first processors lack are the products of bytes.
DOTPROD = ["-march=armv8.2-a+dotprod"]
INTEL = {"portable": ["-O2"], "avx2": AVX2, "avxvnni": [*AVX2, "-mavxvnni"], "avx512vnni": VNNI}
ARM = {"portable": [], "dotprod": DOTPROD}
# Where others run on all but processors of before 2013, the portable form is small.
BY_MACHINE = {"x86_64": INTEL, "amd64": INTEL, "aarch64": ARM, "arm64": ARM}
VARIANTS = BY_MACHINE.get(platform.machine().lower(), {"portable": []})
# Code is matched first, so that what looks like a link in it is passed over. A link is known by the end of its text.
LINK_OR_CODE = re.compile(
    r"""
      ^(?P<fence>```+|~~~+).*?^(?P=fence)
    | (?:(?<=\n\n)|\A)(?:(?:[ ]{4}|\t)[^\n]*(?:\n|\Z))+
    | !\[[^\]]*\]\(<?(?P<image>[^)\s>]+)
    | (?:\]\(<?|^\[[^\]]+\]:[ ]+<?|\bhref=")(?P<link>[^)\s">]+)
    | \bsrc(?:set)?="(?P<source>[^"]+)
    | (?P<ticks>`+).*?(?P=ticks)
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
# The linker of macOS knows no -s; it leaves out local symbols with -x.
# Sections in pages of their own would pad each library by some 8 KiB.
STRIPPED = ["-Wl,-x"] if sys.platform == "darwin" else ["-s", "-Wl,-z,noseparate-code"]


class Kernels(build_ext):
    """Shared libraries that are no Python modules: their names carry no Python version, and they export C functions."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


class Wheel(bdist_wheel):
    """A wheel that is tagged by what is in it: ctypes loads the kernels, so they are of a platform and of no Python."""

    def run(self) -> None:
        # Built first: kernels are optional, so only afterwards is it known whether there are any.
        self.run_command("build")
        if not any(Path(self.get_finalized_command("build").build_lib).rglob("kernels_*.so")):
            self.distribution.ext_modules = None
            self.root_is_pure = True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def wants_kernels(environment: dict[str, str]) -> bool:
    """Whether kernels are built, from the variable KVTAILOR_PURE."""
    asked = environment.get("KVTAILOR_PURE", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"KVTAILOR_PURE={asked}: set it to 1 for a package without C++ kernels, or leave it out")
    return asked != "1"


def absolute_links(text: str, source: str, version: str) -> str:
    """README with links that also lead somewhere from an index of packages, which has none of the repository's files.

    It is rewritten when it is built, because relative links are right in a checkout, on a branch and in a fork. Links
    lead to the tag of the version, so that they show its files also later; those of development versions to `main`.
    Fenced code, indented code and code within a line stay as they are.

    Args:
        text: Markdown.
        source: address of the repository, whose files lie below `blob/` and, as they are, below `raw/`.
        version: of the package.
    """
    at = "main" if "dev" in version else f"v{version}"

    def there(found: re.Match[str]) -> str:
        picture = found["image"] or found["source"]
        link = picture or found["link"]
        if link is None or re.match(r"[a-z][a-z0-9+.-]*:|//|#", link, re.IGNORECASE):
            return found[0]
        address = f"{source}/{'raw' if picture else 'blob'}/{at}/{link.removeprefix('./').removeprefix('/')}"
        return found[0].removesuffix(link) + address

    return LINK_OR_CODE.sub(there, text)


def version_of(text: str) -> str:
    """The value of `__version__` in the text of version.py."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise SystemExit("src/kvtailor/version.py sets no __version__")


def main() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = version_of(Path("src/kvtailor/version.py").read_text(encoding="utf-8"))
    readme = Path("README.md").read_text(encoding="utf-8")
    kernels = [
        Extension(
            f"kvtailor.ops.cpu.kernels_{name}",
            [f"{FOLDER}/{source}.cpp" for source in ("alike", "attention", "checksum", "prompt", "quantise")],
            depends=sorted(glob(f"{FOLDER}/*.h")),
            extra_compile_args=[*ALWAYS, *QUIET, *flags],
            extra_link_args=STRIPPED,
            language="c++",
            optional=True,
        )
        for name, flags in VARIANTS.items()
    ]
    setup(
        ext_modules=kernels if wants_kernels(dict(os.environ)) else [],
        cmdclass={"build_ext": Kernels, "bdist_wheel": Wheel},
        long_description=absolute_links(readme, project["urls"]["Source"], version),
        long_description_content_type="text/markdown",
    )


if __name__ == "__main__":
    main()
