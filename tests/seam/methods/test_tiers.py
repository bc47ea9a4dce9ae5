"""Tiers in a whole model: the same logits, the planned bytes, the hits that arithmetic says, and what goes wrong."""

from __future__ import annotations

import copy
import errno
import gc
import os
import re
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import CacheMisuse, TierError
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan
from tests.seam.test_modes import decoded
from tests.support.seam.zoo import ROUNDING, build, error, prompts

PLANS = (
    "plain(block_size=8)",
    "kivi(bits=4, group=8, recent=8)",
    "unrotated(of=nuq(bits=4, group=8, block_size=8))",
    "minicache(start=0.0, block_size=4, of=vector(bits=8, block_size=4))",
    "quest(tokens=16, dense_layers=1) + indexed(page=4)",
    "h2o(recent=6) + kivi(bits=4, group=8, recent=8) @ tokens=16, slack=3",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=4",
    "snapkv(window=6) + dynamickv + vector(bits=8, block_size=8) @ tokens=24",
    "pairs(window=6, sinks=2) + asymkv(window=6) + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=6",
)
DISKS = ("", "on_device_layers=1, resident_layers=1", "resident_bytes=3KiB, policy=mru")


@pytest.fixture(autouse=True)
def nothing_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What survives is asked in tests/store; here it would only take time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def on_disk(plan: str, root: Path, arguments: str = "") -> str:
    methods, at, settings = plan.partition(" @ ")
    given = ", ".join(filter(None, [f"folder='{root}'", arguments]))
    return f"{methods} + disk({given}){at}{settings}"


def files_under(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*"))


@pytest.mark.parametrize("plan,disk", [*zip(PLANS, DISKS * 3, strict=True), (PLANS[3], DISKS[1]), (PLANS[1], DISKS[2])])
def test_logits_are_those_of_the_resident_cache(plan: str, disk: str, tmp_path: Path) -> None:
    """A prompt, its padded batch, and decoding, bit for bit; the bytes are the closed form; nothing is left."""
    model = build("llama")
    ids, mask = prompts((48, 31, 40))
    forced = prompts((12,) * 3, state=3)[0]
    resident, _ = decoded(model, ids, mask, plan, steps=12, forced=forced)
    found, cache = decoded(model, ids, mask, on_disk(plan, tmp_path, disk), steps=12, forced=forced)
    assert torch.equal(found, resident)
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form and ledger.by_tier["disk"] > 0
    assert cache.traffic().misses > 0 and cache.traffic().bytes_written > 0
    del cache
    gc.collect()
    assert files_under(tmp_path) == []


@torch.no_grad()
@pytest.mark.parametrize("plan", ["plain(block_size=16)", "kivi(bits=2, group=8, recent=8)"])
def test_packed_files_give_the_same_logits_and_are_counted_as_they_lie_there(plan: str, tmp_path: Path) -> None:
    model = build("llama")
    # The same few tokens again and again, so that there is something to gain.
    ids, mask = (each[:, :8].repeat(1, 6) for each in prompts((8, 8, 8)))
    forced = prompts((12,) * 3, state=3)[0]
    made = {}
    for pack in ("", "pack=deflate"):
        logits, cache = decoded(model, ids, mask, on_disk(plan, tmp_path / f"on{pack}", pack), steps=12, forced=forced)
        made[pack] = logits, cache, cache.ledger(), cache.traffic()
    (plain, _, loose, before), (packed, cache, ledger, traffic) = made.values()
    assert torch.equal(packed, plain)
    files = [path.stat().st_size for path in (tmp_path / "onpack=deflate").rglob("*.segment")]
    assert ledger.total == ledger.closed_form and ledger.by_tier["disk"] == sum(files) < loose.by_tier["disk"]
    assert ledger.by_tier["device"] == loose.by_tier["device"]
    # Of files that were written and have gone since, too.
    assert traffic.bytes_written >= sum(files)
    assert traffic.bytes_written < before.bytes_written and traffic.bytes_read < before.bytes_read
    assert (traffic.hits, traffic.misses) == (before.hits, before.misses)


@torch.no_grad()
def test_full_leaves_in_blocks(tmp_path: Path) -> None:
    model = build("gpt_neox")
    ids, mask = prompts((48, 31))
    plan = on_disk("full", tmp_path, "block=8")
    assert str(Plan.parse(plan)).startswith("plain(block_size=8) + disk(")
    full, _ = decoded(model, ids, mask, "full", steps=20)
    found, cache = decoded(model, ids, mask, plan, steps=20)
    assert error(found, full) < ROUNDING
    assert all(state.stored.tail.length < 8 for state in cache.engine.states)
    assert (cache.held() == torch.tensor([68, 68 - 17])[:, None, None]).all()


@pytest.mark.parametrize("plan", [PLANS[i] for i in (0, 1, 3, 4, 6)])
@torch.no_grad()
def test_rows_move_and_are_taken_back(plan: str, tmp_path: Path) -> None:
    """Reordered, repeated and chosen rows, recorded forwards and their crop, a copy, and a saved file."""
    model = build("llama")
    ids, mask = prompts((40, 33))
    both = [kvtailor.cache_for(model, each) for each in (plan, on_disk(plan, tmp_path / "tier", "resident_layers=1"))]
    for cache in both:
        model(ids, attention_mask=mask, **hand_cache(cache))
    order = torch.tensor([1, 0, 1])
    for cache in both:
        cache.reorder_cache(order)
    mask = mask[order]

    def step(count: int, state: int) -> None:
        nonlocal mask
        token = prompts((count,) * len(mask), state=state)[0]
        mask = torch.cat([mask, mask.new_ones(len(mask), count)], 1)
        logits = [model(token, attention_mask=mask, **hand_cache(cache)).logits for cache in both]
        assert all(torch.equal(logits[0], other) for other in logits[1:])

    step(1, 4)
    for cache in both:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 5]))
    mask = mask.repeat_interleave(2, 0)[torch.tensor([0, 3, 5])]
    step(1, 5)
    both[1].save(tmp_path / "cache.safetensors")
    both += [copy.deepcopy(both[1]), kvtailor.load_cache(model, tmp_path / "cache.safetensors")]
    for cache in both:
        cache.activate_past_recording()
    # Layers that are encoded together take no more than the rest of a block at once.
    count, wrong = (2, 1) if "minicache" in plan else (4, 2)
    step(count, 6)
    for cache in both:
        cache.crop(-wrong)
    mask = mask[:, :-wrong]
    for state in range(7, 12):
        step(1, state)
    assert all(cache.ledger().total == cache.ledger().closed_form for cache in both)
    both[1].reset()
    step_after = [model(ids[:1], **hand_cache(cache)).logits for cache in (both[1], kvtailor.cache_for(model, plan))]
    assert torch.equal(*step_after)


def test_beams_give_the_same_text(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = prompts((40, 33))
    found = [
        model.generate(
            ids,
            attention_mask=mask,
            **hand_cache(kvtailor.cache_for(model, plan)),
            max_new_tokens=12,
            do_sample=False,
            num_beams=3,
        )
        for plan in (PLANS[1], on_disk(PLANS[1], tmp_path))
    ]
    assert torch.equal(*found)


@torch.no_grad()
def test_a_plan_that_reads_twice(tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = prompts((48, 31))
    plan = "kvzip + kivi(bits=4, group=8, recent=8) @ keep=0.5"
    token = prompts((1, 1), state=3)[0]
    longer = torch.cat([mask, mask.new_ones(2, 1)], 1)
    logits = []
    for each in (plan, on_disk(plan, tmp_path)):
        cache = kvtailor.prefill(model, ids, mask, plan=each, chunk=16)
        logits.append(model(token, attention_mask=longer, **hand_cache(cache)).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    "arguments,hits_per_step",
    [
        ("", 0),
        ("resident_layers=2", 2),
        ("resident_layers=2, policy=lru", 0),
        ("on_device_layers=2", 0),
        ("resident_layers=5, policy=lru", 0),
        ("resident_layers=6, policy=lru", 6),
        ("resident_layers=9", 6),
        ("resident_layers=3, policy=mru", None),
        ("on_device_layers=3, resident_layers=2", 2),
    ],
)
@torch.no_grad()
def test_hits_misses_and_bytes_are_what_arithmetic_says(
    arguments: str, hits_per_step: int | None, tmp_path: Path
) -> None:
    """Six layers, each of which holds 40 tokens in segments and no block more; 15 steps are three turns of MRU."""
    model, steps = build("llama", layers=6), 15
    cache = kvtailor.cache_for(model, on_disk("vector(bits=8, block_size=40)", tmp_path, arguments))
    model(prompts((40,))[0], **hand_cache(cache))
    ledger, placed = cache.ledger(), 3 if "=3, resident" in arguments else 4 if "on_device" in arguments else 6
    # Tokens, kv heads, sides; int8 codes and two float16 numbers for a group.
    one = 40 * 2 * 2 * (16 + 4)
    assert cache.traffic().hits == cache.traffic().misses == 0
    token = prompts((1,), state=3)[0]
    for _ in range(steps):
        model(token, **hand_cache(cache))
    found = cache.traffic()
    if hits_per_step is None:
        # In steady state (R - 1) / (N - 1); the prompt has filled the set.
        assert abs(found.hits - steps * 6 * 2 / 5) <= 2
    else:
        assert found.hits == steps * hits_per_step
    assert found.hits + found.misses == steps * placed
    apart = found.bytes_read - found.misses * one
    assert 0 <= apart <= one + found.misses * 256, "one layer may be on its way, and padding is read too"
    now = cache.ledger()
    assert now.closed_form == now.total
    assert cache.engine.offload.tier._buffers.idle_bytes == 0, "memory that the ledger leaves out"
    copies = now.by_stage.get("store", 0)
    resident = placed if "=9" in arguments or "=6" in arguments else hits_per_step or 0
    if "policy" not in arguments:
        kept = now.by_tier["device"] - now.by_stage["tail"] - now.by_stage["observe"]
        ahead = 0 if resident == placed else 1
        on_device = 6 - placed
        assert kept - (resident + on_device + ahead) * one in range(600)
        assert copies in range(ahead * one, ahead * (one + 600) + 1)
    assert ledger.full == 40 * 6 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("policy", ["fixed", "mru", "lru"])
@torch.no_grad()
def test_hits_are_the_same_where_forwards_may_be_taken_back(policy: str, tmp_path: Path) -> None:
    """`kvtailor.generate` puts every layer away once more when a round has settled, and it has not been read then."""
    model, ids = build("llama", layers=6), prompts((40,))[0]
    plan = on_disk("vector(bits=8, block_size=40)", tmp_path, f"resident_layers=3, policy={policy}")
    cache = kvtailor.cache_for(model, plan)
    text = model.generate(ids, **hand_cache(cache), max_new_tokens=16, do_sample=False)
    found = kvtailor.generate(model, ids, plan=plan, max_new_tokens=16)
    assert torch.equal(found.sequences, text)
    mine, theirs = found.cache.traffic(), cache.traffic()
    assert (mine.hits, mine.misses) == (theirs.hits, theirs.misses)
    assert mine.hits == {"fixed": 45, "lru": 0}.get(policy, mine.hits) and mine.hits + mine.misses == 90


@torch.no_grad()
def test_a_context_above_the_limit_runs_where_the_resident_one_refuses(tmp_path: Path) -> None:
    model = build("llama", layers=6)
    ids = prompts((96,))[0]
    longer = prompts((40,), state=4)[0]
    most = 136 * 6 * 2 * 2 * 16 * 4 // 2

    def fed(plan: str) -> torch.Tensor:
        cache = kvtailor.prefill(model, ids, plan=plan, chunk=16)
        logits = [model(token, **hand_cache(cache)).logits for token in longer.split(1, 1)]
        return torch.cat(logits, 1)

    full = fed("full")
    with pytest.raises(TierError, match=rf"allows {most} bytes on the device, and after \d+ tokens.*takes \d+; allow"):
        fed(f"device(device_bytes={most})")
    assert error(fed(on_disk("full", tmp_path, f"block=16, device_bytes={most}")), full) < ROUNDING
    with pytest.raises(TierError, match="bytes on the device"):
        fed(on_disk("full", tmp_path, f"block=16, device_bytes={most // 20}"))
    with pytest.raises(TierError, match=r"disk: \d+ bytes more would make \d+ there.*disk_bytes=100000"):
        fed(on_disk("full", tmp_path, "block=16, disk_bytes=100000"))
    # Packed, a bundle is weighed by what it takes, once that is known; it does not stay there.
    with pytest.raises(TierError, match=r"disk: \d+ bytes more would make \d+ there.*disk_bytes=100000"):
        fed(on_disk("full", tmp_path, "block=16, disk_bytes=100000, pack=deflate"))


@torch.no_grad()
@pytest.mark.parametrize("pack", ["none", "deflate"])
def test_the_limit_of_the_disk_holds_for_its_files(pack: str, tmp_path: Path) -> None:
    model, ids = build("llama"), prompts((150,))[0]

    def files_of(most: int | None) -> int:
        limit = f"pack={pack}" + ("" if most is None else f", disk_bytes={most}")
        cache = kvtailor.prefill(model, ids, plan=on_disk("kivi(bits=4, group=8, recent=8)", tmp_path, limit))
        files = sum(path.stat().st_size for path in tmp_path.rglob("*.segment"))
        assert files == cache.ledger().by_tier["disk"] == cache.traffic().bytes_written
        return files

    taken = files_of(None)
    gc.collect()
    assert files_of(taken) == taken
    with pytest.raises(TierError, match=f"would make {taken} there, and the plan allows disk_bytes={taken - 1}"):
        files_of(taken - 1)


@torch.no_grad()
def test_a_full_disk_ends_the_run_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ids = prompts((48,))[0]
    cache = kvtailor.cache_for(model, on_disk(PLANS[0], tmp_path))
    reference = kvtailor.cache_for(model, PLANS[0])
    model(ids, **hand_cache(cache)), model(ids, **hand_cache(reference))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    token, given = ids[:, -1:], []
    with monkeypatch.context() as patch, pytest.raises(TierError, match=r"\.segment.*No space left on device"):
        patch.setattr(os, "pwrite", full)
        for _ in range(20):
            logits = model(token, **hand_cache(cache)).logits
            given.append(torch.equal(logits, model(token, **hand_cache(reference)).logits))
            token = logits.argmax(-1)
    assert all(given) and 0 < len(given) < 20
    assert not [name for name in files_under(tmp_path) if name.endswith(".partial")]
    held = [torch.cat([part.decode()[0] for part in c.engine.states[0].parts()], 1) for c in (cache, reference)]
    assert torch.equal(held[0][:, :-1], held[1][:, : held[0].shape[1] - 1])


@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
@torch.no_grad()
def test_a_damaged_file_gives_an_error_and_no_token(fault: str, tmp_path: Path) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, on_disk(PLANS[1], tmp_path))
    model(prompts((48,))[0], **hand_cache(cache))
    paths = sorted(tmp_path.rglob("*.segment"))
    assert len(paths) == 3
    path = paths[1]
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    {"flip": lambda: path.write_bytes(data), "truncate": lambda: os.truncate(path, 5000), "remove": path.unlink}[
        fault
    ]()
    with pytest.raises(TierError, match=re.escape(str(path))):
        model(prompts((1,), state=2)[0], **hand_cache(cache))
    del cache
    gc.collect()
    assert files_under(tmp_path) == []


def test_what_cannot_be_asked_is_refused() -> None:
    for text, sentence in {
        "disk(resident_layers=-1)": "disk: resident_layers must be 0 layers or more, found -1",
        "disk(resident_bytes=lots)": "disk: resident_bytes is not a size",
        "disk(block=0)": "disk: block must be 1 token or more",
        "device(device_bytes=-5)": "device: device_bytes must be 0 bytes or more",
        "disk(policy=random)": "policy is 'random', but it must be one of 'fixed', 'mru', 'lru'",
        "plain(block_size=-1)": "plain: block_size must be 0 tokens or more",
    }.items():
        with pytest.raises(kvtailor.KvtailorError, match=sentence):
            Plan.parse(text)
    plan = Plan.parse("kivi(bits=4) + disk(folder='/some where', resident_bytes=64MiB, policy=mru)")
    assert plan.store.resident_bytes == 1 << 26 and Plan.parse(str(plan)) == plan == Plan.from_toml(plan.to_toml())


@torch.no_grad()
def test_a_crop_beyond_the_tail_is_refused_as_ever(tmp_path: Path) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, on_disk("full", tmp_path, "block=8"))
    model(prompts((48,))[0], **hand_cache(cache))
    model(prompts((1,), state=2)[0], **hand_cache(cache))
    cache.crop(-1)
    assert cache.seen == 48
    with pytest.raises(CacheMisuse, match="asked to take back 3 tokens"):
        cache.crop(-3)
