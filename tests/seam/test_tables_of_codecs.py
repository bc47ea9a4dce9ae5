"""Codecs by layer and by side in whole models: the same answers as the codecs alone, bytes, kernels, saving, beams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.errors import PlanError
from kvtailor.hf.versions import hand_cache
from kvtailor.ops import dispatch
from kvtailor.ops.attention import parts
from tests.seam.methods.test_codecs import check_rows_and_bytes, check_saved
from tests.seam.test_modes import decoded
from tests.support.calibrated import shipped_for
from tests.support.crossed import crossed
from tests.support.seam.latent_zoo import build_latent
from tests.support.seam.zoo import ROUNDING, build, error, prompts

KIVI = "kivi(bits={}, group=8, recent=8)"
PLANS = (
    # The three layers of the model: codes of two kinds, and one layer as it is.
    "by_layer(of=[kivi(bits=4, group=8, recent=8), vector(bits=5, recent=8, block_size=8), plain])",
    "by_layer(of=[plain, unrotated(of=kivi(bits=4, group=8, recent=8))], layers=[0, 1, 1])",
    "sides(keys=kivi(bits=4, group=8, recent=8), values=vector(bits=4, block_size=8))",
    "sides(keys=unrotated(of=vector(bits=6, block_size=8)), values=hadamard(of=vector(bits=4, block_size=8)))",
    "by_layer(of=[sides(keys=fp8(group=8, block_size=8), values=plain), vector(bits=4, block_size=8)], "
    "layers=[0, 1, 0])",
    "snapkv(window=6) + adakv + by_layer(of=[plain, kivi(bits=4, group=8, recent=8), sides(keys=kivi(group=8, "
    "recent=8, bits=5), values=vector(bits=4, block_size=8))]) @ tokens=24",
    "snapkv(window=6) + adakv + sides(keys=plain, values=kivi(bits=4, group=8, recent=8)) @ tokens=24, slack=6",
)
# (plan, the plan that must give the very same logits)
SAME = [
    (
        "by_layer(of=[kivi(bits=8, group=8, recent=8), kivi(bits=2, group=8, recent=8)], layers=[0, 1, 1])",
        "bit_table(of=kivi(group=8, recent=8), keys=1, values=1, high=8, low=2)",
    ),
    (
        "by_layer(of=[kivi(bits=8, group=8, recent=8), sides(keys=kivi(bits=8, group=8, recent=8), "
        "values=kivi(bits=2, group=8, recent=8)), kivi(bits=2, group=8, recent=8)])",
        "bit_table(of=kivi(group=8, recent=8), keys=2, values=1, high=8, low=2)",
    ),
    (
        "by_layer(of=[vector(bits=4, block_size=8)], layers=[0, 0, 0])",
        "vector(bits=4, block_size=8)",
    ),
    (
        "sides(keys=kivi(bits=5, group=8, recent=8), values=kivi(bits=3, group=8, recent=8))",
        "kivi(key_bits=5, value_bits=3, group=8, recent=8)",
    ),
    (
        "sides(keys=vector(bits=5, block_size=8), values=plain)",
        "vector(bits=5, block_size=8, only=keys)",
    ),
    (
        "sides(keys=hadamard(of=vector(bits=5, block_size=8)), values=vector(bits=3, block_size=8))",
        "hadamard(of=vector(key_bits=5, value_bits=3, block_size=8), only=keys)",
    ),
    (
        "sides(keys=unrotated(of=nuq(bits=5, group=8, block_size=8)), values=nuq(bits=3, group=8, block_size=8))",
        "unrotated(of=nuq(key_bits=5, value_bits=3, group=8, block_size=8))",
    ),
]
# Budgets by layer and head, and padded rows, do not change that.
FRAMES = (
    "{}",
    "snapkv(window=6) + adakv + {} @ tokens=24, slack=6",
    "snapkv(window=6) + pyramid(beta=3) + {} @ keep=0.5",
)


@pytest.mark.parametrize(("pair", "frame"), crossed(SAME, FRAMES, each=2))
def test_the_same_bits_give_the_same_logits(pair: tuple[str, str], frame: str) -> None:
    model = build("llama")
    ids, mask = prompts((63, 31, 48))
    forced = prompts((20, 20, 20), state=3)[0]
    one, other = (decoded(model, ids, mask, frame.format(plan), steps=20, forced=forced) for plan in pair)
    assert torch.equal(one[0], other[0])
    ledgers = one[1].ledger(), other[1].ledger()
    assert ledgers[0].total == ledgers[0].closed_form == ledgers[1].total


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox"], PLANS))
def test_batched_equals_solo_and_bytes_are_the_closed_form(family: str, plan: str) -> None:
    check_rows_and_bytes(family, plan, steps=12)


@pytest.mark.parametrize("plan", PLANS)
def test_a_saved_cache_goes_on_where_it_stopped(plan: str, tmp_path: Path) -> None:
    if plan in PLANS[:2]:
        # Free slots of a buffer that grows are not saved, so a layer that is never encoded has others of them then.
        check_goes_on(plan, tmp_path / "cache.safetensors")
    else:
        check_saved(plan, tmp_path / "cache.safetensors", steps=9)


@torch.no_grad()
def check_goes_on(plan: str, path: Path) -> None:
    model = build("llama")
    ids, mask = prompts((40, 33))
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    cache.save(path)
    again = kvtailor.load_cache(model, path)
    for step in range(9):
        token = prompts((1, 1), state=step)[0]
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        logits = [model(token, attention_mask=mask, **hand_cache(each)).logits for each in (cache, again)]
        assert error(*logits) < ROUNDING
    for one, other in zip(cache.engine.states, again.engine.states, strict=True):
        assert [type(each) for each in one.stored.segments] == [type(each) for each in other.stored.segments]
    assert again.ledger().total == again.ledger().closed_form


@pytest.mark.parametrize(("dtype", "plan"), crossed([torch.bfloat16, torch.float16], PLANS))
def test_generates_in_low_precision_with_beams(dtype: torch.dtype, plan: str) -> None:
    model = build("llama", dtype=dtype)
    ids, mask = prompts((40, 29, 35))
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=12, do_sample=False, num_beams=2)
    assert out.shape == (3, 52) and cache.ledger().total == cache.ledger().closed_form


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_recorded_forward_is_taken_back_without_a_trace(plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((40, 40))
    tokens = prompts((12, 12), state=4)[0]
    logits: list[Tensor] = []
    for drafting in (False, True):
        cache = kvtailor.cache_for(model, plan)
        model(ids, attention_mask=mask, **hand_cache(cache))
        if drafting:
            cache.activate_past_recording()
            model(prompts((5, 5), state=9)[0], **hand_cache(cache))
            cache.crop(-5)
        logits.append(torch.cat([model(tokens[:, i : i + 1], **hand_cache(cache)).logits for i in range(12)], 1))
    assert torch.allclose(logits[0], logits[1], atol=2e-5)


@pytest.mark.parametrize("plan", PLANS[:5])
@torch.no_grad()
def test_layers_live_elsewhere_in_blocks_those_that_are_plain_too(plan: str, tmp_path: Path) -> None:
    model = build("llama")
    ids, mask = prompts((63, 40, 31))
    forced = prompts((12, 12, 12), state=3)[0]
    here, _ = decoded(model, ids, mask, plan, steps=12, forced=forced)
    there, cache = decoded(model, ids, mask, f"{plan} + disk(folder={str(tmp_path)!r})", steps=12, forced=forced)
    assert torch.allclose(here, there, atol=2e-5)
    assert cache.ledger().total == cache.ledger().closed_form
    assert all(state.stored.segments for state in cache.engine.states)


@torch.no_grad()
def test_a_table_reads_by_the_kernels_that_the_codecs_alone_read_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels are built, no part of kivi, vector or both sides of them is decoded for a new token."""
    model = build("llama")
    ids, mask = prompts((63, 63))
    asked = dispatch.coded_attention

    def kernels(plan: str) -> list[list[str]]:
        """For each layer the kernel of each part that is encoded."""
        cache, found = kvtailor.cache_for(model, plan), []
        model(ids, attention_mask=mask, **hand_cache(cache))

        def watched(query: Tensor, keys, values, **how):  # type: ignore[no-untyped-def]
            kernel = asked(query, keys, values, **how)
            found.append((type(keys).__name__, type(values).__name__, getattr(kernel, "__qualname__", None)))
            return kernel

        monkeypatch.setattr(parts.dispatch, "coded_attention", watched)
        model(prompts((1, 1), state=5)[0], **hand_cache(cache))
        monkeypatch.setattr(parts.dispatch, "coded_attention", asked)
        return found

    kivi, vector = kernels(KIVI.format(4)), kernels("vector(bits=4, block_size=8, recent=8)")
    third = len(kivi) // 3
    mixed = kernels(f"by_layer(of=[{KIVI.format(4)}, vector(bits=4, block_size=8, recent=8)], layers=[0, 1, 0])")
    assert mixed == [*kivi[:third], *vector[:third], *kivi[:third]]
    sides = kernels(f"sides(keys={KIVI.format(4)}, values=vector(bits=3, block_size=8, recent=8))")
    kernel = kivi[0][2]
    assert ("ChannelCodes", "TokenCodes", kernel) == sides[0] and len(sides) == len(kivi)


@torch.no_grad()
def test_layers_hold_what_their_codecs_say() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, PLANS[0])
    model(prompts((40,))[0], **hand_cache(cache))
    kinds = [[segment.codec for segment in state.stored.segments] for state in cache.engine.states]
    assert kinds == [["kivi"], ["vector"], []]
    with pytest.raises(PlanError, match="by_layer: it has codecs for 2 layers; the plan compresses 3 of this model"):
        kvtailor.cache_for(model, "by_layer(of=[kivi, kivi(bits=4)])")


@torch.no_grad()
def test_a_model_of_one_layer() -> None:
    model = build("llama", layers=1)
    ids, mask = prompts((63, 20, 31))
    forced = prompts((9, 9, 9), state=3)[0]
    found = [
        decoded(model, ids, mask, plan, steps=9, forced=forced)[0]
        for plan in ("by_layer(of=[fp8(group=8, block_size=8)])", "fp8(group=8, block_size=8)")
    ]
    assert torch.equal(*found)


@torch.no_grad()
def test_a_budget_of_bytes_pays_for_the_mean_layer() -> None:
    model = build("llama")
    table = "by_layer(of=[plain, kivi(bits=8, group=8, recent=8), kivi(group=8, recent=8)])"
    cache = kvtailor.cache_for(model, f"streaming + {table} @ bytes=24KiB")
    model(prompts((400,))[0], **hand_cache(cache))
    # A last group that is not full costs the 32 scales of a full one: 128 bytes for each of 6 heads.
    assert 0.97 * 24 * 1024 < cache.ledger().total <= 24 * 1024 + 6 * 128


SIDES = ("plain", "kivi(bits=4, group=8, recent=8)", "vector(bits=4, block_size=8)", "fp8(group=8, block_size=8)")
ASYMMETRIC = "vector(bits=3, block_size=8, symmetric=false)"


@pytest.mark.parametrize("key", SIDES)
@pytest.mark.parametrize("value", [*SIDES, ASYMMETRIC])
@torch.no_grad()
def test_any_two_sides_are_read_as_they_decode(key: str, value: str) -> None:
    if key == value == "plain":
        return
    plan = f"snapkv(window=6) + adakv + sides(keys={key}, values={value}) @ tokens=40"
    model, found = build("llama"), []
    ids, mask = prompts((63, 31, 48))
    for which in ("auto", "reference"):
        with dispatch.using(which):
            found.append(decoded(model, ids, mask, plan, steps=6, forced=prompts((6, 6, 6), state=3)[0])[0])
    assert error(*found) < ROUNDING


@torch.no_grad()
def test_calibrated_codecs_get_their_calibration_inside_of_a_table(tmp_path: Path) -> None:
    model, low = build("llama"), "lowrank(rank={}, block_size=8)"
    ids, mask = prompts((63, 31))
    forced = prompts((9, 9), state=3)[0]
    with shipped_for([model], tmp_path):
        table = f"by_layer(of=[{low.format(0.75)}, plain, {low.format(0.5)}])"
        cache = decoded(model, ids, mask, table, steps=9, forced=forced)[1]
        for layer, rank in ((0, 0.75), (2, 0.5)):
            alone = decoded(model, ids, mask, low.format(rank), steps=9, forced=forced)[1]
            bases = [each.engine.states[layer].codec(each.plan) for each in (cache, alone)]
            assert bases[0] == bases[1] and bases[0].calibration == bases[1].calibration  # type: ignore[attr-defined]
            mine, expected = (each.engine.states[layer].stored.segments[0] for each in (cache, alone))
            assert mine.state()[0] == expected.state()[0]
            if layer == 0:
                # The first layer's states do not depend on any codec.
                tensors = expected.state()[1]
                assert all(torch.equal(each, tensors[name]) for name, each in mine.state()[1].items())
        assert [len(state.stored.segments) > 0 for state in cache.engine.states] == [True, False, True]
        assert len(kvtailor.Plan.parse(table).hash) == 12
        assert cache.ledger().total == cache.ledger().closed_form


@torch.no_grad()
def test_layers_of_latents() -> None:
    model = build_latent("deepseek_v2")
    count = len(kvtailor.cache_for(model, "full").engine.states)
    ids, mask = prompts((40, 27, 33))
    one = "vector(bits=5, block_size=8)"
    tables = [
        f"by_layer(of=[{one}], layers={[0] * count})",
        f"by_layer(of=[sides(keys={one}, values={one}), {one}], layers={[0] + [1] * (count - 1)})",
    ]
    expected = model(ids, attention_mask=mask, **hand_cache(kvtailor.cache_for(model, one))).logits
    for plan in tables:
        cache = kvtailor.cache_for(model, plan)
        assert torch.equal(model(ids, attention_mask=mask, **hand_cache(cache)).logits, expected)
        assert cache.ledger().total == cache.ledger().closed_form and cache.ledger().by_stage["encode"] > 0
    turned = f"by_layer(of=[unrotated(of={one}), {one}], layers={[0] + [1] * (count - 1)})"
    with pytest.raises(PlanError, match="unrotated does not serve layers that hold latents"):
        kvtailor.cache_for(model, turned)
