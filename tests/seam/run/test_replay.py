"""Steps that are recorded once and replayed say what steps say that are taken one by one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.cache import KvCache
from kvtailor.hf.graphs import replay
from kvtailor.hf.graphs.replay import Recorder, captured
from kvtailor.hf.graphs.replaying import ReplayingReader
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.dispatch import using
from kvtailor.plan import Plan
from tests.ops.gpu.exact_attention import DEVICE, needs_triton
from tests.support.crossed import crossed
from tests.support.seam.tape import Tape, recorder
from tests.support.seam.zoo import COMPRESSIBLE, VOCABULARY, build, error, prompts

KIVI = "kivi(bits=4, group=16, recent=16)"
PLANS = (
    "full",
    "snapkv(window=6) @ tokens=12",
    "snapkv(window=6) + adakv @ tokens=16",
    KIVI,
    "snapkv(window=6) + adakv + vector(bits=8, recent=4, block_size=8) @ tokens=16",
    "position(sinks=2) @ tokens=14, slack=5",
    "lowrank(rank=0.5, basis=random, block_size=8)",
    "minicache(block_size=12)",
)


def replayed(reader: ReplayingReader, fed: Tensor) -> list[Tensor]:
    """Logits after each token that follows."""
    before, found = reader.seen, []
    for token in fed.split(1, 1):
        found.append(reader.read(token, 1)[:, 0])
        assert reader.seen == before + len(found)
    return found


def plainly(model, plan: str, ids: Tensor, mask: Tensor, fed: Tensor) -> tuple[list[Tensor], KvCache]:
    cache, found = kvtailor.cache_for(model, plan), []
    for new in (ids, *fed.split(1, 1)):
        if found:
            mask = torch.cat([mask, torch.ones_like(new)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -new.shape[1] :]
        found.append(model(new, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits[:, -1])
    return found, cache


@torch.no_grad()
def agrees(
    plan: str,
    family: str,
    lengths: tuple[int, ...],
    record: Recorder,
    *,
    layers: int | None = None,
    count: int = 30,
    implementation: str = "reference",
    allowed: float = 1e-5,
    device: str = "cpu",
) -> None:
    model = build(family, layers=layers).to(device)
    ids, mask = (each.to(device) for each in prompts(lengths))
    fed = torch.randint(3, VOCABULARY, (len(lengths), count), generator=torch.Generator().manual_seed(2)).to(device)
    padded = mask if len(set(lengths)) > 1 else None
    reader = ReplayingReader(model, Plan.parse(plan), padded, None, expected=count, record=record)
    with using("reference"):
        expected, plain = plainly(model, plan, ids, mask, fed)
        prompt = reader.prefill(ids)
    with using(implementation):
        found = replayed(reader, fed)
    for ours, its in zip([prompt, *found], expected, strict=True):
        assert error(ours, its) < allowed
    cache = reader.close()
    assert torch.equal(cache.held(), plain.held()) and cache.seen == plain.seen
    ledger = cache.ledger()
    assert ledger.total == ledger.closed_form
    # What follows is read as after plain steps: nothing of the recording is left.
    for each in (cache, plain):
        mask_of_all = torch.cat([mask, torch.ones_like(fed), torch.ones_like(ids)], 1)
        positions = (mask_of_all.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with using("reference"):
            turn = model(ids, attention_mask=mask_of_all, position_ids=positions, **hand_cache(each)).logits
        if each is cache:
            first = turn
    assert error(first, turn) < allowed


@pytest.mark.parametrize(("plan", "lengths"), crossed(PLANS, [(33,), (23, 17, 9)]), ids=str)
def test_says_what_plain_steps_say(plan: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    record, tapes = recorder(monkeypatch)
    agrees(plan, "llama", lengths, record)
    assert max(tape.replays for tape in tapes) > 2


@pytest.mark.long
@pytest.mark.parametrize("family", COMPRESSIBLE)
def test_so_with_every_family(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gemma3's own windows of 16 tokens are filled in one row, and turn while the others still hold padding."""
    record, tapes = recorder(monkeypatch)
    agrees(KIVI, family, (21, 9, 4), record, count=20)
    assert tapes


@needs_triton
@pytest.mark.parametrize(
    ("plan", "kernels"),
    [
        (KIVI, 3),
        pytest.param("snapkv(window=6) + adakv + vector(bits=8, recent=4) @ tokens=16", 4, marks=pytest.mark.long),
        pytest.param("full", 2, marks=pytest.mark.long),
    ],
)
def test_so_with_kernels_of_gpus(plan: str, kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer launches what reads each of its parts, and one kernel that adds them up."""
    record, tapes = recorder(monkeypatch)
    exact = plan == "full"
    agrees(plan, "llama", (19, 17), record, layers=1, count=5, implementation="triton", allowed=1e-5 if exact else 1e-2)
    assert [tape.kernels for tape in tapes] == [kernels] and tapes[0].replays == 4


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device is here to capture a graph on")
@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("plan", PLANS)
def test_graphs_say_what_plain_steps_say(plan: str, implementation: str) -> None:
    agrees(plan, "llama", (23, 17, 9), captured, implementation=implementation, allowed=1e-2, device=DEVICE)


def test_generate_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    record, tapes = recorder(monkeypatch)
    monkeypatch.setattr(replay, "recorder_of", lambda device: record)
    model = build("llama")
    ids, mask = prompts((20, 13))
    for plan in ("full", KIVI):
        told = {"plan": plan, "max_new_tokens": 24, "eos_token_id": []}
        with using("reference"):
            found = kvtailor.generate(model, ids, mask, graphs=True, **told)
            expected = kvtailor.generate(model, ids, mask, **told)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.equal(found.cache.held(), expected.cache.held())
        assert found.statistics.plain_tokens == expected.statistics.plain_tokens
        # No slot is kept for a token that is not asked for.
        assert found.cache.engine.states[0].stored.tail.tensors()["keys"].shape[1] <= 20 + 24 or plan != "full"
    assert sum(tape.replays for tape in tapes) > 30


def test_what_cannot_be_recorded_is_refused() -> None:
    llama, record = build("llama"), lambda run: run
    ids, _ = prompts((12,))
    for model, plan, why in (
        (llama, "h2o(recent=4) @ tokens=8", "keeps account of what every new token attends to"),
        (llama, "snapkv(window=4) @ tokens=8, slack=3", "keeps account"),
        (llama, "quest(tokens=12) + indexed(page=4)", "chooses anew at every token what it reads"),
        (llama, "full + disk", "moves segments between tiers"),
        (llama, "full + device(device_bytes=1MiB)", "limits the bytes on the device"),
        (build("mistral_window"), "full", "a sliding window of its own"),
    ):
        with pytest.raises(UnsupportedModel, match="steps cannot be recorded and replayed: .*" + re.escape(why)):
            ReplayingReader(model, Plan.parse(plan), None, None, expected=1, record=record)
    llama.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(UnsupportedModel, match="computes its rotary frequencies anew"):
        ReplayingReader(llama, Plan.parse("full"), None, None, expected=1, record=record)
    with pytest.raises(UnsupportedModel, match="the model is on cpu, and graphs are CUDA's; decode without graphs"):
        kvtailor.generate(build("llama"), ids, graphs=True)
    with pytest.raises(CacheMisuse, match="graphs=True replays steps of one token, and with a draft several"):
        kvtailor.generate(build("llama"), ids, graphs=True, draft_plan="full")


def test_a_ring_is_never_more_than_full_and_a_long_text_is_told_of() -> None:
    model = build("gemma3")
    model.config.max_position_embeddings = 30
    ids, _ = prompts((21,))
    reader = ReplayingReader(model, Plan.parse("full"), None, None, expected=12, record=lambda run: run)
    reader.prefill(ids)
    with torch.no_grad():
        replayed(reader, ids[:, :12])
    counted = [layer.growing.layout for layer in reader.steps.now.fixed.layers]
    assert [int(each.lengths.max()) for each in counted] == [16, 33, 16, 33]
    with pytest.warns(UserWarning, match="has now seen 33 tokens.*beyond what it was trained on"):
        reader.close()


def test_a_tape_forgets_nothing_and_waits_for_nobody() -> None:
    """What the other tests rest on: numbers of Python stay, tensors are read anew, and a wait is no step."""
    counter, found, told = torch.zeros(1), torch.zeros(1), [1.0]

    def run() -> None:
        counter.add_(1)
        made = torch.empty(1).copy_(counter) * told[0]
        found.copy_(made.view(1, 1)[0] + told[0])

    tape = Tape()
    with tape:
        run()
    told[0] = 5.0
    for count in (1, 2, 3):
        tape.replay()
        assert (counter.item(), found.item()) == (count, count + 1.0)
    with pytest.raises(AssertionError, match="would be waited for"), Tape():
        bool(counter > 1)
