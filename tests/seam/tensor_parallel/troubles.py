"""What goes wrong in one of several processes, and what each would decide for itself; started by `test_troubles`.

Every process prints a JSON line: what it met, by name.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import kvtailor
from kvtailor.errors import CacheFileError
from kvtailor.hf import saving
from kvtailor.ops.files import seal_json
from kvtailor.score.by_keys.knorm import KNorm
from tests.seam.tensor_parallel.worker import LENGTHS, begun, load, save
from tests.support.seam.zoo import prompts

PLAN = "snapkv(window=8) + adakv @ keep=0.3"


def met(work: Callable[[], Any]) -> str:
    """The error of some work, or what it returned."""
    try:
        return str(work())
    except kvtailor.KvtailorError as error:
        return f"{type(error).__name__}: {error}"


def no_score_in_one(model: Any) -> Any:
    """A scorer that gives NaN in the last process alone."""
    own = KNorm.score

    def score(self: KNorm, held: Any) -> Any:
        scores = own(self, held)
        return scores * torch.nan if dist.get_rank() == dist.get_world_size() - 1 else scores

    KNorm.score = score  # type: ignore[method-assign]
    try:
        ids, mask = prompts(LENGTHS)
        return kvtailor.prefill(model, ids, mask, plan="knorm @ tokens=40").seen
    finally:
        KNorm.score = own  # type: ignore[method-assign]


def no_room_in_one(model: Any, path: Path) -> str:
    """A disk that is full for the last process alone: what was saved before stays as it was."""
    cache, *_ = begun(model, PLAN)
    cache.save(path)
    before = sorted(each.name for each in path.iterdir())
    dist.barrier()
    own = saving.write_cache_file

    def write(*given: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise CacheFileError("no room")
        own(*given)

    saving.write_cache_file = write
    try:
        told = met(lambda: cache.save(path))
    finally:
        saving.write_cache_file = own
    dist.barrier()
    after = sorted(each.name for each in path.iterdir())
    return f"{told} | same files: {before == after} | {kvtailor.load_cache(model, path).seen == cache.seen}"


def sampled(model: Any) -> list[int]:
    """Tokens that are drawn, where every process has a random state of its own."""
    torch.manual_seed(dist.get_rank())
    ids, _ = prompts((40,))
    found = kvtailor.generate(model, ids, plan=PLAN, do_sample=True, temperature=2.0, max_new_tokens=12)
    return list(map(int, found.sequences[0, 40:]))


def drafted(model: Any, **options: Any) -> list[int]:
    """Tokens of a draft by the same weights."""
    ids, _ = prompts((60,))
    found = kvtailor.generate(
        model, ids, plan=PLAN, draft_plan="streaming @ tokens=16", max_new_tokens=12, eos_token_id=None, **options
    )
    return list(map(int, found.sequences[0, 60:]))


def plain(model: Any) -> list[int]:
    """The same without a draft."""
    ids, _ = prompts((60,))
    found = kvtailor.generate(model, ids, plan=PLAN, max_new_tokens=12, eos_token_id=None)
    return list(map(int, found.sequences[0, 60:]))


def strange_folder(model: Any, path: Path) -> Any:
    """A folder that holds something else."""
    cache, *_ = begun(model, PLAN)
    if dist.get_rank() == 0:
        path.mkdir()
        (path / "thesis.tex").write_text("dear")
    dist.barrier()
    return cache.save(path)


def foreign_file(model: Any, folder: Path) -> list[str]:
    """Folders whose files do not belong together: of another saving, a file in another's place, another order."""
    told = []
    first, second = folder / "first", folder / "second"
    cache, *_ = begun(model, PLAN)
    cache.save(first)
    kvtailor.prefill(model, *prompts((70, 80, 90), state=9), plan=PLAN).save(second)
    dist.barrier()
    # Each process sees a folder of its own, as on machines without a shared one.
    told.append(met(lambda: kvtailor.load_cache(model, first if dist.get_rank() == 0 else second)))
    for swap in (False, True):
        dist.barrier()
        if dist.get_rank() == 0:
            about = json.loads((first / "cache.json").read_text())
            if swap:
                about["files"].reverse()
                (first / "cache.json").write_text(seal_json(json.dumps(about)))
            else:
                other = json.loads((second / "cache.json").read_text())["files"][1]
                kept = (first / about["files"][1]).read_bytes()
                (first / about["files"][1]).write_bytes((second / other).read_bytes())
        dist.barrier()
        told.append(met(lambda: kvtailor.load_cache(model, first)))
        dist.barrier()
        if dist.get_rank() == 0 and not swap:
            (first / about["files"][1]).write_bytes(kept)
    return told


def other_plans(model: Any) -> Any:
    """Another plan in each process."""
    return kvtailor.cache_for(model, f"streaming @ tokens={20 + dist.get_rank()}")


def hidden_bytes(model: Any) -> int:
    """What the bench finds alive beside a ledger, where the last process alone hides something."""
    from kvtailor.bench.checks import probing
    from kvtailor.bench.contestant import Contestant
    from kvtailor.bench.subject import Subject

    own = probing._alive
    kept: list[torch.Tensor] = []
    calls = iter(range(10))

    def alive() -> int:
        if next(calls) and dist.get_rank() == 1:
            kept.append(torch.zeros(1 << 20))
        return own()

    probing._alive = alive
    try:
        subject, contestant = Subject(name="tiny", model=model), Contestant.of("streaming @ tokens=16")
        ids = prompts((60,))[0][0]
        cache = subject.new_cache(contestant)
        scores = probing.fed_scores(subject, subject.prefill(ids[None, :50], cache)[0][0, -1:], cache, ids[50:], None)
        found = probing.probe(subject, contestant, ids[:50], ids[50:], scores, 1e-3, None)
    finally:
        probing._alive = own
    return int(found["bytes_alive"]) // (4 << 20)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    folder = parser.parse_args().folder
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    if dist.get_rank() == 0:
        save("llama", folder / "model")
    dist.barrier()
    model = load(folder / "model", tp_plan="auto")
    cache, *_ = begun(model, PLAN)
    own, whole = cache.ledger(), cache.whole_ledger()
    found = {
        "no score": met(lambda: no_score_in_one(model)),
        "no room": met(lambda: no_room_in_one(model, folder / "cache")),
        "strange folder": met(lambda: strange_folder(model, folder / "strange")),
        "no cache": met(lambda: kvtailor.load_cache(model, folder / "model")),
        "sampled": met(lambda: sampled(model)),
        "adaptive": met(lambda: drafted(model)),
        "drafted": met(lambda: drafted(model, gamma=3, min_gain=None)),
        "plain": met(lambda: plain(model)),
        "graphs": met(lambda: kvtailor.generate(model, prompts((9,))[0], plan=PLAN, graphs=True)),
        "foreign": foreign_file(model, folder),
        "other plans": met(lambda: other_plans(model)),
        "hidden": met(lambda: hidden_bytes(model)),
        "calibrated": met(lambda: kvtailor.calibrate(model, "duo", out=folder / "duo.safetensors")),
        "own": [own.total, own.full],
        "whole": [whole.total, whole.full, whole.seen, sum(whole.by_layer), sum(whole.by_stage.values())],
    }
    # One line at a time, whole.
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
