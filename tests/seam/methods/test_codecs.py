"""Every kind of codec in a whole model: padding, bytes, saving, other rows, other dtypes, and bits by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvtailor
from kvtailor.errors import PlanError, UnsupportedModel
from kvtailor.hf.versions import hand_cache
from tests.seam.test_modes import decoded
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, build, error, prompts

PLANS = (
    "vector(bits=4, block_size=8)",
    "fp8(group=8, block_size=8)",
    "kivi(bits=3, group=8, recent=8, only=keys)",
    "hadamard(of=vector(bits=3, block_size=8, symmetric=false), only=values)",
    "bit_table(of=kivi(group=8, recent=8), keys=1, values=0, high=8, low=3)",
    "unrotated(of=nuq(bits=4, group=8, block_size=8))",
    "minicache(start=0.0, of=unrotated(of=vector(block_size=8)))",
    "snapkv(window=6) + d2o + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=6",
    "pairs(window=6, sinks=2) + asymkv(window=6) + kivi(bits=4, group=8, recent=8) @ tokens=24, slack=6",
    "pairs(window=6, sinks=2) + adakv + asymkv(window=6) @ tokens=24, slack=6",
    "snapkv(window=6) + adakv + matching(window=6, spread=8) @ tokens=24, slack=6",
    "snapkv(window=6) + adakv + unrotated(of=nuq(bits=4, group=8, block_size=8)) @ tokens=24",
)


@pytest.mark.parametrize(("family", "plan"), crossed(["llama", "gpt_neox"], PLANS))
def test_batched_equals_solo_and_bytes_are_the_closed_form(family: str, plan: str) -> None:
    # Levels fitted to the states turn a code over on some processors.
    check_rows_and_bytes(family, plan, steps=12, most=1e-3 if "nuq" in plan else ROUNDING)


# Prompts that are drawn for one plan. A number that lies half way between two codes becomes either of them by the last
# bit of a sum, and a logit that ties with another decides which token stays. Where the first draw differs, by a code
# perhaps, the two after it may not.
DRAWS = 3


def check_rows_and_bytes(family: str, plan: str, *, steps: int, most: float = ROUNDING) -> None:
    """Each row of a padded batch gets what it gets alone, but for `most`; the ledger is the closed form."""
    model = build(family)
    lengths = (48, 31)
    forced = prompts((steps, steps), state=3)[0]
    apart = []
    for state in range(1, 1 + DRAWS):
        ids, mask = prompts(lengths, state=state)
        together, batch = decoded(model, ids, mask, plan, steps=steps, forced=forced)
        ledger = batch.ledger()
        assert ledger.total == ledger.closed_form and ledger.by_stage["encode"] > 0
        worst = 0.0
        for row, length in enumerate(lengths):
            one = slice(row, row + 1)
            alone, _ = decoded(model, ids[one, -length:], mask[one, -length:], plan, steps=steps, forced=forced[one])
            worst = max(worst, error(together[row], alone[0]))
        apart.append(worst)
        if apart[0] < most:
            break
    assert sum(worst >= most for worst in apart) <= 1, f"of {DRAWS} draws rows lie {apart} from what they are alone"


@pytest.mark.parametrize("codec", ["kivi(bits=4, group=8, recent=8)", "plain"])
def test_a_row_below_the_budget_loses_no_token_and_changes_no_longer_one(codec: str) -> None:
    """Whether it is encoded as early as alone is open where the codec is lossy: docs/footguns.md."""
    model, plan, lengths = build("llama"), f"snapkv(window=6) + {codec} @ tokens=24", (48, 14)
    ids, mask = prompts(lengths)
    forced = prompts((20, 20), state=3)[0]
    together, batch = decoded(model, ids, mask, plan, steps=20, forced=forced)
    assert (batch.held() == torch.tensor([24 + 20, 14 + 20])[:, None, None]).all()
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone, _ = decoded(model, ids[one, -length:], mask[one, -length:], plan, steps=20, forced=forced[one])
        if row == 0 or codec == "plain":
            assert error(together[row], alone[0]) < ROUNDING


@pytest.mark.parametrize("plan", PLANS)
def test_a_saved_cache_goes_on_where_it_stopped(plan: str, tmp_path) -> None:
    check_saved(plan, tmp_path / "cache.safetensors", steps=9)


@torch.no_grad()
def check_saved(plan: str, path: Path, *, steps: int) -> None:
    """A cache that was written and read decodes on like the one that was not, but for sums in another order.

    Which order a processor's products take can depend on where a tensor lies in memory.
    """
    model = build("llama")
    ids, mask = prompts((40, 33))
    cache = kvtailor.cache_for(model, plan)
    model(ids, attention_mask=mask, **hand_cache(cache))
    cache.save(path)
    again = kvtailor.load_cache(model, path)
    for step in range(steps):
        token = prompts((1, 1), state=step)[0]
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        logits = [model(token, attention_mask=mask, **hand_cache(each)).logits for each in (cache, again)]
        assert error(*logits) < ROUNDING
    assert again.ledger().total == cache.ledger().total == again.ledger().closed_form


@pytest.mark.parametrize(("dtype", "plan"), crossed([torch.bfloat16, torch.float16], PLANS))
def test_generates_in_low_precision_with_beams(dtype: torch.dtype, plan: str) -> None:
    model = build("llama", dtype=dtype)
    ids, mask = prompts((40, 29))
    cache = kvtailor.cache_for(model, plan)
    out = model.generate(ids, attention_mask=mask, **hand_cache(cache), max_new_tokens=12, do_sample=False, num_beams=2)
    assert out.shape == (2, 52) and cache.ledger().total == cache.ledger().closed_form


@torch.no_grad()
def test_layers_hold_what_their_bits_say() -> None:
    """Layer 0 keeps keys in 8 bits, the others in 2: 16 channels are 16 and 4 bytes."""
    model = build("llama")
    cache = kvtailor.cache_for(model, "bit_table(of=kivi(group=8, recent=8), keys=1, values=[4, 2, 1], high=8, low=2)")
    model(prompts((40,))[0], **hand_cache(cache))
    sides = [state.stored.segments[0].state()[1] for state in cache.engine.states]
    assert [side["keys.codes"].shape[-1] for side in sides] == [16, 4, 4]
    assert [side["values.codes"].shape[-1] for side in sides] == [8, 4, 2]
    with pytest.raises(PlanError, match="bit_table: keys counts 4 layers; the plan compresses 3 of this model"):
        kvtailor.cache_for(model, "bit_table(of=kivi, keys=4)")


@torch.no_grad()
def test_a_budget_of_bytes_pays_for_the_mean_layer() -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, "streaming + bit_table(of=kivi(group=8, recent=8), keys=1, high=8) @ bytes=24KiB")
    model(prompts((400,))[0], **hand_cache(cache))
    # A last group that is not full costs the 32 scales of a full one: 128 bytes for each of 6 heads.
    assert 0.97 * 24 * 1024 < cache.ledger().total <= 24 * 1024 + 6 * 128


def test_a_model_without_a_rotary_embedding_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no rotary embedding"):
        kvtailor.cache_for(build("gpt2"), "kvquant3")


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.no_grad()
def test_what_is_encoded_is_what_the_models_own_projection_gave(family: str) -> None:
    """Full and partial rotary models: the inner codec sees the keys as they were before the embedding, to 1e-5."""
    model = build(family)
    ids, _ = prompts((40,))
    # Made first: it runs a few tokens through the attention modules, to see whether they turn keys.
    cache = kvtailor.cache_for(model, "unrotated(of=indexed(page=8, block_size=8))")
    seen = {}
    name = "k_proj" if family == "llama" else "query_key_value"
    for layer, module in enumerate(m for n, m in model.named_modules() if n.endswith(name)):
        module.register_forward_hook(lambda _, __, out, layer=layer: seen.setdefault(layer, out))
    model(ids, **hand_cache(cache))
    for layer, state in enumerate(cache.engine.states):
        heads = state.heads
        expected = seen[layer].view(1, 40, heads, -1).transpose(1, 2)
        expected = expected if family == "llama" else expected.chunk(3, -1)[1]
        inside = state.stored.segments[0].inner.decode()[0]
        assert error(inside, expected[0]) < ROUNDING
