"""Models with learned sinks or capped logits: what is evicted, encoded, drafted, saved and shared is the truth."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.engine.state import LayerState
from kvtailor.errors import PlanError
from kvtailor.hf.run.sharing import keep_queries, remake, sharing_prefill
from kvtailor.hf.versions import hand_cache
from kvtailor.types import PLAIN_SOFTMAX
from tests.ops.gpu.exact_attention import needs_triton
from tests.seam.methods.test_truth import check
from tests.seam.run.test_repeat import CHUNK, KEPT, LEAD, SINKS, WORDS
from tests.seam.run.test_replay import agrees
from tests.seam.saving.test_saving import continued, saved
from tests.seam.test_modes import decoded
from tests.seam.test_speculation import assert_same_state, plain
from tests.support.crossed import crossed
from tests.support.seam.tape import recorder
from tests.support.seam.zoo import ROUNDING, SOFTMAX_FAMILIES, MaskedReference, build, error, held_columns, prompts

every_family = pytest.mark.parametrize("family", SOFTMAX_FAMILIES)
EVICTING = (
    "streaming @ tokens=20",
    "snapkv(window=8) @ tokens=20",
    "snapkv(window=8) + adakv @ tokens=20",
    "h2o(recent=6) @ tokens=18, slack=4",
    "snapkv(window=8) + cake @ tokens=20",
    "tova + coverage(per_head=true, window=8) @ tokens=20, slack=5",
    "critical(of=snapkv(window=8)) + entropy @ tokens=20",
)
CODECS = ("kivi(bits=4, group=8, recent=8)", "vector(bits=8, block_size=8)")
SAVED = ("full", "snapkv(window=6) + adakv @ tokens=20", "h2o(recent=4) + kivi(group=8, recent=8) @ tokens=20, slack=6")


@pytest.mark.parametrize(("family", "plan"), crossed(SOFTMAX_FAMILIES, EVICTING, each=2))
def test_logits_equal_a_full_cache_with_the_dropped_tokens_masked(family: str, plan: str) -> None:
    check(family, plan, steps=20)


@every_family
@torch.no_grad()
def test_evidence_is_the_models_own_probabilities(family: str) -> None:
    """Mass and votes in an engine, padding and chunks included, against those of a reference that writes them down."""
    ids, mask = prompts((56, 43))
    reference = MaskedReference(family)
    reference(ids, mask, {})
    model = build(family)
    cache = kvtailor.cache_for(model, "h2o(recent=6) @ keep=1.0")
    kvtailor.prefill(model, ids, mask, cache=cache, chunk=30)
    for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
        given = reference.given[layer] * mask[:, None, :, None]
        expected = given.sum(2).unflatten(1, (state.heads, -1)).sum(2)
        mass = torch.cat(state.observed.evidence.mass, 1).view(expected.shape)
        assert error(mass.double(), expected * mask[:, None]) < ROUNDING
    votes = kvtailor.cache_for(model, "snapkv(window=8, kernel=1) @ tokens=20")
    kvtailor.prefill(model, ids, mask, cache=votes)
    for layer, columns in held_columns(votes).items():
        given = reference.given[layer][:, :, -8:].sum(2).unflatten(1, (columns.shape[1], -1)).mean(2)
        given[..., -8:] = torch.inf
        for row, length in enumerate((56, 43)):
            due = given[row, :, -length:].topk(20).indices + 56 - length
            assert torch.equal(columns[row].nonzero()[:, 1].view(-1, 20), due.sort(-1).values)


@every_family
@torch.no_grad()
def test_what_a_repetition_looks_at_is_of_the_models_own_softmax(family: str) -> None:
    """A sink has its share beside the tokens that a piece shares the attention with."""
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(build(family), ids, plan=KEPT, instruction=WORDS)
    reference = MaskedReference(family)
    reference.model(ids, **hand_cache(reference.cache))
    count = -(-40 // CHUNK)
    size = -(-40 // count)
    expected = {layer: torch.zeros(state.heads, 40).double() for layer, state in _by_layer(cache)}
    for start in range(0, 40, size):
        end = min(40, start + size)
        new = torch.cat([WORDS, ids[0, max(0, start - LEAD) : start], ids[0, start:end]])
        reference.model(new[None], **hand_cache(copy.deepcopy(reference.cache)))
        for layer, state in _by_layer(cache):
            given = reference.given[layer][0]
            sink = 1 - given.sum(-1, keepdim=True)
            share = torch.zeros(given.shape[-1], dtype=torch.bool)
            share[:SINKS] = share[start:end] = share[40:] = True
            some = given * share
            some = some / (some.sum(-1, keepdim=True) + sink)
            expected[layer][:, start:end] = some[..., start:end].amax(1).unflatten(0, (state.heads, -1)).amax(1)
    for layer, state in _by_layer(cache):
        assert error(state.observed.reconstruction[0].double(), expected[layer]) < ROUNDING


def _by_layer(cache) -> list[tuple[int, LayerState]]:
    return list(zip(cache.geometry.compressed, cache.engine.states, strict=True))


@pytest.mark.parametrize(("family", "codec"), crossed(SOFTMAX_FAMILIES, CODECS, each=2))
@torch.no_grad()
def test_codes_are_read_as_a_full_cache_of_what_they_stand_for(family: str, codec: str) -> None:
    """The reference's cache gets what the codec gives back, and reads it with the softmax written down."""
    ids, mask = prompts((48, 31))
    model, reference = build(family), MaskedReference(family)
    cache = kvtailor.cache_for(model, codec)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    token = model(ids, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits[:, -1:].argmax(-1)
    reference(ids, mask, {})
    changed = 0.0
    for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
        assert state.stored.segments, "nothing was encoded, so this test has shown nothing"
        for part in state.parts():
            owner, columns = part.layout.owners(torch.device("cpu"))[:, None], part.layout.columns(torch.device("cpu"))
            filled = part.layout.filled(torch.device("cpu"))
            there = torch.ones(part.layout.lanes, part.layout.size, dtype=torch.bool) if filled is None else filled
            owner, columns = owner.expand(there.shape)[there], columns.expand(there.shape)[there]
            theirs = reference.cache.layers[layer]
            for side, states in zip((theirs.keys, theirs.values), part.decode(), strict=True):
                flat = side.flatten(0, 1)
                changed = max(changed, error(states[there], flat[owner, columns]))
                flat[owner, columns] = states[there]
    assert changed > 1e-3, "the codec changed nothing, so this test has shown nothing"
    mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    found = model(token, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, **hand_cache(cache)).logits
    assert error(found, reference(token, mask, {})) < 1e-4


@every_family
@torch.no_grad()
def test_chunked_prefill_equals_one_piece(family: str) -> None:
    model = build(family)
    ids, mask = prompts((70, 41))
    for plan in ("full", "kivi(bits=4, group=8, recent=8)"):
        whole, pieces = kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan)
        kvtailor.prefill(model, ids, mask, cache=whole)
        kvtailor.prefill(model, ids, mask, cache=pieces, chunk=23)
        token, longer = torch.tensor([[7], [9]]), torch.cat([mask, mask.new_ones(2, 1)], 1)
        asked = {"attention_mask": longer, "position_ids": (longer.cumsum(-1) - 1)[:, -1:]}
        expected = model(token, **hand_cache(whole), **asked).logits
        assert error(model(token, **hand_cache(pieces), **asked).logits, expected) < (1e-5 if plan == "full" else 0.2)


@pytest.mark.parametrize(("family", "plan"), crossed(SOFTMAX_FAMILIES, SAVED, each=2))
def test_a_saved_cache_goes_on_identically(family: str, plan: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    model, cache, mask = saved(family, plan, path)
    loaded = kvtailor.load_cache(model, path)
    expected, found = continued(model, cache, mask), continued(model, loaded, mask)
    assert torch.equal(found[0], expected[0]) and error(found[1], expected[1]) < ROUNDING


@pytest.mark.long
def test_a_saved_cache_goes_on_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    made = {family: saved(family, SAVED[1], tmp_path / f"{family}.safetensors") for family in SOFTMAX_FAMILIES}
    torch.save({family: mask for family, (_, _, mask) in made.items()}, tmp_path / "masks.pt")
    script = (
        "import sys, torch, kvtailor\n"
        "from tests.seam.saving.test_saving import continued\n"
        "from tests.support.seam.zoo import build\n"
        "found = {}\n"
        "for family, mask in torch.load(sys.argv[1] + '/masks.pt').items():\n"
        "    model = build(family)\n"
        "    cache = kvtailor.load_cache(model, f'{sys.argv[1]}/{family}.safetensors')\n"
        "    found[family] = continued(model, cache, mask)[0]\n"
        "torch.save(found, sys.argv[1] + '/tokens.pt')\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path.parent)], check=True, cwd=Path(__file__).parents[3])
    for family, tokens in torch.load(tmp_path / "tokens.pt").items():
        assert torch.equal(tokens, continued(*made[family])[0]), family


@every_family
@torch.no_grad()
def test_a_loaded_cache_knows_its_softmax_before_any_forward(family: str, tmp_path: Path) -> None:
    """What is made of it scores tokens by the model's softmax, which no file has."""
    model, plan = build(family), "snapkv(window=4) @ tokens=20"
    ids, mask = prompts((50, 33))
    source, own = kvtailor.cache_for(model, "full"), kvtailor.cache_for(model, plan)
    keep_queries(source, own.plan)
    kvtailor.prefill(model, ids, mask, cache=source)
    kvtailor.prefill(model, ids, mask, cache=own)
    for state in source.engine.states:
        told = state.model.softmax
        state.model.softmax = kvtailor.cache_for(model, "full").engine.states[state.index].model.softmax
        assert (told.softcap, told.sinks is None) == (state.model.softmax.softcap, state.model.softmax.sinks is None)
    mine = kvtailor.cache_for(model, plan)
    remake(mine, source, mask)
    assert_same_state(mine, own, mask)


@every_family
@torch.no_grad()
def test_a_shared_prefill_is_as_if_each_cache_had_read_it(family: str) -> None:
    model = build(family)
    ids, mask = prompts((50, 33))
    plan = "snapkv(window=4) @ tokens=20"
    source, mine, own = (kvtailor.cache_for(model, each) for each in ("vector(bits=8)", plan, plan))
    for state in mine.engine.states:
        # The forward that is shared tells; what was known before it does not count.
        state.model.softmax = PLAIN_SOFTMAX
    with sharing_prefill(source, [mine]):
        kvtailor.prefill(model, ids, mask, cache=source)
    kvtailor.prefill(model, ids, mask, cache=own)
    assert_same_state(mine, own)


@pytest.mark.parametrize(
    ("family", "target"),
    crossed(SOFTMAX_FAMILIES, ["full", "snapkv(window=4) + adakv @ tokens=12, slack=9", "h2o(recent=4) @ tokens=12"]),
)
def test_speculated_text_is_that_of_plain_decoding(family: str, target: str) -> None:
    model = build(family)
    ids, _ = prompts((40,))
    expected, cache = plain(model, ids, target)
    draft = "streaming @ tokens=16" if target == "full" else "full"
    found = kvtailor.generate(model, ids, plan=target, draft_plan=draft, gamma=4, min_gain=None, max_new_tokens=20)
    assert torch.equal(found.sequences, expected)
    assert_same_state(found.cache, cache)


@pytest.mark.parametrize(("family", "lengths"), crossed(SOFTMAX_FAMILIES, [(33,), (21, 9, 4)], each=2), ids=str)
def test_replayed_steps_say_what_plain_steps_say(
    family: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are rings then, which are read as segments are."""
    record, tapes = recorder(monkeypatch)
    agrees("kivi(bits=4, group=16, recent=16)", family, lengths, record, count=20)
    assert tapes


@needs_triton
@pytest.mark.parametrize(("family", "plan"), [("gpt_oss", "full"), ("gemma2", "h2o(recent=4) @ tokens=24")])
@torch.no_grad()
def test_kernels_of_gpus_give_what_the_plain_forms_give(family: str, plan: str) -> None:
    from kvtailor.ops.dispatch import using

    model = build(family)
    ids, mask = prompts((33, 20))
    forced = prompts((3, 3), state=3)[0]
    with using("reference"):
        expected, _ = decoded(model, ids, mask, plan, steps=3, forced=forced)
    with using("triton"):
        found, _ = decoded(model, ids, mask, plan, steps=3, forced=forced)
    assert error(found, expected) < 1e-4


@torch.no_grad()
def test_a_method_that_does_not_know_is_refused_before_any_work() -> None:
    with pytest.raises(PlanError, match=r"expected is not known to be right .* caps its attention logits \(softcap=3"):
        kvtailor.cache_for(build("gemma2"), "expected @ tokens=24")
    # The full layers of MiMo-V2-Flash have no sinks: what its windows have is no concern of a plan.
    for family in SOFTMAX_FAMILIES:
        if family != "gemma2":
            check(family, "expected @ tokens=24", steps=3)
