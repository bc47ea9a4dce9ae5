"""Does decoding over a tier keep the link busy? A decoded token of an offloaded cache beside a bare read of its bytes.

    python -m benchmarks.micro link [--contexts 8192] [--folder /a/disk] [--threads 2] [--rounds 7] [--device cuda]

A step must bring back every byte that is not on the device, so it takes at least as long as the link needs for them.
*Bare* is that: the cache's own files, one after the other, read into memory that is there already, and nothing else
(`disk`); or one copy of as many pinned bytes to the device (`host`, where there is an accelerator). It runs in turns
with the steps, in this one process. The share of the link's rate that a step reached is the one time over the other.
Where the model itself takes longer than the link, the share says nothing, so that its step without a tier is shown, and
the share of the longer of the two as well: 1 - it is what the step stalled.

With a set of layers that stays, the bytes of a step shrink, and with it what the link allows. `policy=lru` is the
control: it has no hit until everything fits.

The page cache is kept out: files are dropped from it after each read, the bare one included. The model is that of
`python -m benchmarks.micro decode`. Medians; samples that other programs disturbed are left out and counted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.micro.cases import model_states, random_llama
from benchmarks.micro.tables import Advance, Bench, Cell, Table
from benchmarks.micro.timer import Measured, Side, time_in_turns
from kvtailor.bench.measure.statistics import spread
from kvtailor.errors import KvtailorError
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import fill
from kvtailor.hf.versions import hand_cache

__all__ = ["bench", "measure"]

_ABOUT = """\
One decoded token of a random Llama-shaped model whose cache lives on a disk (on a GPU: in host memory), beside the same
step without a tier. Floor: a bare read (copy) of the same bytes, in turns with the steps."""
_CODECS = ("plain(block_size=1024)", "vector(bits=8)", "kivi(bits=4, group=64, recent=128)")
_RESIDENT = ("", "resident_layers=2", "resident_layers=2, policy=lru")
_WARMUP, _SIDES = 2, 3


def bench(
    *, contexts: Sequence[int] = (8192,), rounds: int = 7, folder: Path | None = None, device: torch.device
) -> Bench:
    """The bench; see the module's docstring.

    Args:
        contexts: tokens held.
        rounds: timed rounds.
        folder: where files go, in a folder of their own that is removed; None: the system's folder for such files.
        device: of the model; with an accelerator the tier is `host`.

    Raises:
        KvtailorError: there is no such folder.
    """
    root = Path(tempfile.gettempdir()) if folder is None else folder
    if not root.is_dir():
        raise KvtailorError(f"asked for files in {str(root)!r}, which is no folder: make it, or give another")
    cells = [
        Cell(
            name=f"{codec}, stays: {kept or 'nothing'}, {context} tokens",
            samples=(rounds + _WARMUP) * _SIDES,
            measure=partial(_table, context, rounds, root, device, codec, kept),
        )
        for context in contexts
        for codec in _CODECS
        for kept in _RESIDENT
    ]
    where = (
        f"files in {root}" if device.type == "cpu" else f"pinned host memory to {torch.cuda.get_device_name(device)}"
    )
    return Bench(about=_ABOUT, machine=f"{where}, bfloat16, {torch.get_num_threads()} threads", cells=cells)


def _table(
    context: int, rounds: int, root: Path, device: torch.device, codec: str, kept: str, advance: Advance
) -> Table:
    with tempfile.TemporaryDirectory(dir=root, prefix="kvtailor-link-") as folder:
        row = measure(context, rounds, Path(folder), device, codec, kept, advance)
    return Table(lines=[_line(row)], rows={str(context): [row]})


@torch.no_grad()
def measure(
    context: int,
    rounds: int,
    folder: Path,
    device: torch.device,
    codec: str,
    kept: str = "",
    advance: Advance = lambda name: None,
) -> dict[str, Any]:
    """Seconds, bytes that came back for a token, and shares, of one codec and residency.

    Args:
        context: tokens held.
        rounds: timed.
        folder: for the files, empty.
        device: of the model; with an accelerator the tier is `host`.
        codec: of a plan.
        kept: arguments of the tier that say which layers stay; "": none does.
        advance: called after each sample.
    """
    model = random_llama(torch.bfloat16, device)
    states, token = model_states(model, context), torch.tensor([[7]], device=device)
    tier = "host" if device.type == "cuda" else "disk"
    where = [] if tier == "host" else [f'folder="{folder}"']
    plan = f"{codec} + {tier}({', '.join([*where, *filter(None, [kept])])})"
    cache, resident = cache_for(model, plan), cache_for(model, codec)
    for each in (cache, resident):
        fill(each, states)
        model(token, **hand_cache(each))
    # What one step brings back, which is the same for each: counted over one that is not timed.
    before = cache.traffic()
    model(token, **hand_cache(cache))
    moved = cache.traffic().bytes_read - before.bytes_read
    if tier == "host":
        size = cache.ledger().by_tier["host"]
        bare = _bare_copy(size, device)
    else:
        bare, size = _bare_files(folder)
    sides = [
        Side(name="bare", run=lambda _: bare(), bytes_read=size),
        Side(name="tier", run=lambda _: model(token, **hand_cache(cache))),
        Side(name="resident", run=lambda _: model(token, **hand_cache(resident))),
    ]
    results = time_in_turns(sides, rounds, warmup=_WARMUP, device=device, advance=advance)
    return _row(codec, kept, moved, size, results)


def _bare_files(folder: Path) -> tuple[Callable[[], object], int]:
    """Reads every file under the folder; and how many bytes these are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    if not paths:
        raise KvtailorError(
            f"the cache has no file of more than 4096 bytes in {folder}, so there is nothing to compare with: give a "
            "longer context"
        )
    size = sum(path.stat().st_size for path in paths)
    buffer = torch.empty(max(path.stat().st_size for path in paths), dtype=torch.uint8).numpy().data

    def read() -> None:
        for path in paths:
            file, done = os.open(path, os.O_RDONLY), 0
            while step := os.preadv(file, [buffer[done:]], done):
                done += step
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    return read, size


def _bare_copy(size: int, device: torch.device) -> Callable[[], object]:
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    return lambda: there.copy_(pinned, non_blocking=True)


def _row(codec: str, kept: str, moved: int, size: int, sides: Sequence[Measured]) -> dict[str, Any]:
    bare, tier, resident = (spread(side.seconds).median for side in sides)
    # The bare read is of all files; a step brings back those of the layers that do not stay.
    link = None if bare is None else bare * moved / size
    floor = None if link is None or resident is None else max(link, resident)
    return {
        "codec": codec,
        "kept": kept or "nothing",
        "bytes_of_a_token": moved,
        "bare_bytes_per_second": size / bare if bare else None,
        "bare_seconds": link,
        "resident_seconds": resident,
        "seconds": tier,
        "share_of_link": link / tier if link is not None and tier else None,
        "share_of_floor": floor / tier if floor is not None and tier else None,
        "left_out": [side.disturbed for side in sides],
    }


def _line(row: dict[str, Any]) -> str:
    def ms(name: str) -> str:
        return "      –" if row[name] is None else f"{1e3 * row[name]:7.1f}"

    def share(name: str) -> str:
        return "   –" if row[name] is None else f"{row[name]:4.2f}"

    return (
        f"  {row['codec']:38s} stays: {row['kept']:29s} {row['bytes_of_a_token'] / 2**20:6.1f} MiB  link alone"
        f"{ms('bare_seconds')} ms  without a tier{ms('resident_seconds')} ms  step{ms('seconds')} ms  "
        f"{share('share_of_link')} of the link, {share('share_of_floor')} of the longer  (left out {row['left_out']})"
    )
