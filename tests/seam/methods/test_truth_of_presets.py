"""Truth of every preset, as it is: what the model reads is what the preset holds, and nothing else.

Presets are found by themselves. One that evicts or encodes is compared with a full cache in which dropped tokens are
masked and held ones stand as they are decoded, as often as they count; those that read sparsely or at other positions
have their own reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import Plan, registry
from tests.attend.test_rolling import check_rolling
from tests.seam.methods.test_truth_of_reading import check_reading
from tests.support.calibrated import shipped_for
from tests.support.crossed import crossed
from tests.support.seam.zoo import MaskedReference, build, error, held_columns, prompts, with_readers

FAMILIES = ("llama", "gpt_neox", "gemma3")
# Longer than what the preset reads of it, and than what its codec leaves in full precision.
SPARSE, ENCODED, EVICTED = (1300, 640, 1210), (420, 270, 391), (150, 97, 63)


class Stored(MaskedReference):
    """Held tokens stand as the cache under test decodes them."""

    NAME = "stored-reference"

    def __init__(self, family: str):
        super().__init__(family)
        self.states: Mapping[int, tuple[Tensor, Tensor, Tensor]] = {}

    def _attended(self, module, query, key, value, mask, scaling=None, **kwargs):
        if self.layer in self.states:
            held = self.held[self.layer][..., None]
            n = held.shape[2]
            # A channel that is 1 in each query brings the logarithm of how often a token counts into its logit.
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            query = torch.nn.functional.pad(query, (0, 1), value=1.0)
            key, value = torch.nn.functional.pad(key, (0, 1)), value.clone()
            keys, values, log_weight = self.states[self.layer]
            keys = torch.cat([keys, log_weight / scaling], -1)
            for states, stored in zip((key, value), (keys, values), strict=True):
                states[:, :, :n] = torch.where(held, stored, states[:, :, :n])
        return super()._attended(module, query, key, value, mask, scaling, **kwargs)


def decoded(cache) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """For each compressed layer keys (b, h, seen, d), values (b, h, seen, dv) and log weights (b, h, seen, 1) of what
    is held, 0 elsewhere."""
    found = {}
    for layer, state in zip(cache.geometry.compressed, cache.engine.states, strict=True):
        whole: list[Tensor] = []
        for part in state.parts():
            layout, both = part.layout, [*part.decode()]
            weights = part.view().log_weight
            both.append(torch.zeros(*both[0].shape[:2], 1) if weights is None else weights[..., None])
            whole = whole or [x.new_zeros(state.rows * state.heads, state.stored.seen, x.shape[-1]) for x in both]
            columns = layout.columns(both[0].device).expand(layout.lanes, -1)
            filled = layout.filled(both[0].device)
            filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            owner = layout.owners(both[0].device)[:, None].expand_as(columns)
            for into, states in zip(whole, both, strict=True):
                into[owner[filled], columns[filled]] = states[filled]
        keys, values, log_weight = (x.unflatten(0, (state.rows, state.heads)) for x in whole)
        found[layer] = keys, values, log_weight
    return with_readers(cache, found)


def text_of(preset: str) -> str:
    """The preset with a small budget where it asks for one."""
    return f"{preset} @ tokens=40" if registry.presets()[preset].budget else preset


def reads_sparsely(preset: str) -> bool:
    return registry.name_of(Plan.parse(text_of(preset)).attend) in ("quest", "rocket")


def has_pairs(family: str, preset: str) -> bool:
    """The tiny gemma3 has two layers that see all, and from the middle on there is no pair of them."""
    return family != "gemma3" or not preset.startswith("minicache")


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Files of random numbers for the presets that read one."""
    with shipped_for([build(family) for family in FAMILIES], tmp_path_factory.mktemp("calibrations")):
        yield


PRESETS = [name for name in registry.presets() if name != "full"]


@pytest.mark.parametrize(
    ("family", "preset"), crossed(FAMILIES, [name for name in PRESETS if not reads_sparsely(name)], possible=has_pairs)
)
def test_what_is_read_is_what_the_preset_holds(family: str, preset: str) -> None:
    plan = Plan.parse(text_of(preset))
    if registry.name_of(plan.attend) == "rolling":
        check_rolling(family, text_of(preset).replace("=40", "=12"))
    else:
        check_stored(family, plan, EVICTED if plan.evicts else ENCODED)


@pytest.mark.long
@pytest.mark.parametrize("preset", [name for name in PRESETS if reads_sparsely(name)])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_is_what_the_preset_chooses(family: str, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default run has the same methods on short prompts, in `test_truth_of_reading.py`."""
    if (family, preset) == ("gemma3", "quest"):
        pytest.skip("quest reads the first two compressed layers whole, and this tiny model has no others")
    check_reading(family, text_of(preset), monkeypatch, SPARSE, steps=6)


@torch.no_grad()
def check_stored(family: str, plan: Plan, lengths: tuple[int, ...], steps: int = 8, most: float = 1e-5) -> None:
    """Prompt of a padded batch, then greedy decoding, against the reference at each step."""
    model, reference = build(family), Stored(family)
    ids, mask = prompts(lengths)
    exact = reference(ids, mask, {})
    if plan.needs.reconstruction:
        cache = kvtailor.prefill(model, ids, mask, plan=plan)
        logits = exact
    else:
        cache = kvtailor.cache_for(model, plan)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, **hand_cache(cache)).logits
        assert error(logits * mask[..., None], exact * mask[..., None]) < most, "a prompt is read exactly"
    changed = 0
    token = logits[:, -1:].argmax(-1)
    for step in range(steps):
        held, reference.states = held_columns(cache), decoded(cache)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        options = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        expected = reference(token, mask, held)
        changed += sum(int((~columns & mask[:, None, :-1].bool()).sum()) for columns in held.values())
        changed += cache.ledger().by_stage.get("encode", 0)
        logits = model(token, **hand_cache(cache), **options).logits
        assert error(logits, expected) < most, f"at decoded token {step}"
        token = logits.argmax(-1)
    assert changed > 0, "nothing was dropped or encoded, so this test has shown nothing"
