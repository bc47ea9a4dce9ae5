"""Builds the C++ kernels: one shared library for each instruction set, none where there is no compiler.

They are plain C functions, so that nothing of Python or torch is needed to build them, and a wheel serves every version
of both. Which of them a machine runs is chosen when it runs: see src/kvtailor/ops/cpu/library.py.
"""

import os
import platform
from glob import glob

from setuptools import Extension, setup
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
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512", *AVX2]
VNNI = [*AVX512, "-mavx512vnni"]
INTEL = platform.machine().lower() in ("x86_64", "amd64")
VARIANTS = {"portable": [], **({"avx2": AVX2, "avx512": AVX512, "avx512vnni": VNNI} if INTEL else {})}


class Kernels(build_ext):
    """Shared libraries that are no Python modules: their names carry no Python version, and they export C functions."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []


setup(
    ext_modules=[
        Extension(
            f"kvtailor.ops.cpu.kernels_{name}",
            [f"{FOLDER}/{source}.cpp" for source in ("attention", "checksum", "quantise")],
            depends=sorted(glob(f"{FOLDER}/*.h")),
            extra_compile_args=[*ALWAYS, *QUIET, *flags],
            extra_link_args=["-s"],
            language="c++",
            optional=True,
        )
        for name, flags in VARIANTS.items()
    ],
    cmdclass={"build_ext": Kernels},
)
