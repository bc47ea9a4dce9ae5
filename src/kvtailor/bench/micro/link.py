"""Does decoding over a tier keep the link busy? A decoded token of an offloaded cache beside a bare read of its bytes.

    python -m kvtailor.bench.micro.link [--contexts 8192] [--folder /a/disk] [--threads 2] [--rounds 7]

A step must bring back every byte that is not on the device, so it takes at least as long as the link needs for them.
*Bare* is that: the cache's own files, one after the other, read into memory that is there already, and nothing else
(`disk`); or one copy of as many pinned bytes to the device (`host`, where there is an accelerator). It runs in turns
with the steps, in this one process. The share of the link's rate that a step reached is the one time over the other.
Where the model itself takes longer than the link, the share says nothing, so that its step without a tier is shown, and
the share of the longer of the two as well: 1 - it is what the step stalled.

With a set of layers that stays, the bytes of a step shrink, and with it what the link allows. `policy=lru` is the
control: it has no hit until everything fits.

The page cache is kept out: files are dropped from it after each read, the bare one included. The model is that of
`bench.micro.decode`: 4 layers, random weights. Medians; samples that other programs disturbed are left out and counted.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvtailor.bench.measure.machine import describe
from kvtailor.bench.measure.statistics import spread
from kvtailor.bench.micro.decode import Measured, interleaved, random_llama
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.run.stock import fill

__all__ = ["main", "measure"]

_CODECS = ("plain(block_size=1024)", "vector(bits=8)", "kivi(bits=4, group=64, recent=128)")
_SETS = ("", "resident_layers=2", "resident_layers=2, policy=lru")


def _bare_files(folder: Path) -> tuple[Callable[[], object], int]:
    """Reads every file under the folder; and how many bytes these are."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)
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

    def copy() -> None:
        there.copy_(pinned, non_blocking=True)
        torch.cuda.synchronize(device)

    return copy


@torch.no_grad()
def measure(context: int, rounds: int, root: Path, device: torch.device) -> list[dict[str, Any]]:
    """One row for each codec and residency: seconds, bytes that came back for a token, and shares.

    Args:
        context: tokens held.
        rounds: timed.
        root: folder for the files.
        device: of the model; with an accelerator the tier is `host`.
    """
    model = random_llama(torch.bfloat16, 2 * context).to(device)
    generator = torch.Generator().manual_seed(1)
    shape = (2, 4, 1, 8, context, 128)
    keys, values = torch.randn(shape, generator=generator).bfloat16().to(device)
    states = list(zip(keys, values, strict=True))
    token, rows = torch.tensor([[7]], device=device), []
    for codec in _CODECS:
        for kept in _SETS:
            folder = Path(tempfile.mkdtemp(dir=root))
            tier = "host" if device.type == "cuda" else "disk"
            where = [] if tier == "host" else [f'folder="{folder}"']
            plan = f"{codec} + {tier}({', '.join([*where, *filter(None, [kept])])})"
            cache, resident = cache_for(model, plan), cache_for(model, codec)
            for each in (cache, resident):
                fill(each, states)
                model(token, past_key_values=each)
            before = cache.traffic()
            model(token, past_key_values=cache)
            after = cache.traffic()
            moved = after.bytes_read - before.bytes_read
            if tier == "host":
                bare, size = _bare_copy(cache.ledger().by_tier["host"], device), cache.ledger().by_tier["host"]
            else:
                bare, size = _bare_files(folder)
            sides = [Measured("bare"), Measured("tier"), Measured("resident")]
            steps = [bare, _step(model, token, cache), _step(model, token, resident)]
            interleaved(list(zip(sides, steps, strict=True)), rounds, warmup=2)
            rows.append(_row(codec, kept, moved, size, sides))
            _say(rows[-1])
            del cache, resident, steps
    return rows


def _step(model: Any, token: torch.Tensor, cache: Any) -> Callable[[], object]:
    def run() -> None:
        model(token, past_key_values=cache)
        if token.device.type == "cuda":
            torch.cuda.synchronize(token.device)

    return run


def _row(codec: str, kept: str, moved: int, size: int, sides: Sequence[Measured]) -> dict[str, Any]:
    bare, tier, resident = (spread(side.seconds).median for side in sides)
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


def _say(row: dict[str, Any]) -> None:
    def ms(name: str) -> str:
        return "      –" if row[name] is None else f"{1e3 * row[name]:7.1f}"

    def share(name: str) -> str:
        return "   –" if row[name] is None else f"{row[name]:4.2f}"

    print(
        f"  {row['codec']:38s} stays: {row['kept']:29s} {row['bytes_of_a_token'] / 2**20:6.1f} MiB  link alone"
        f"{ms('bare_seconds')} ms  without a tier{ms('resident_seconds')} ms  step{ms('seconds')} ms  "
        f"{share('share_of_link')} of the link, {share('share_of_floor')} of the longer  (left out {row['left_out']})"
    )
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the bench; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contexts", nargs="*", type=int, default=[8192])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    tables: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        for context in options.contexts:
            print(f"\na token after {context}, bfloat16")
            tables[str(context)] = measure(context, options.rounds, Path(root), torch.device(options.device))
    print(json.dumps({"machine": describe(bandwidth=False), "tables": tables}))


if __name__ == "__main__":
    main()
