"""The recorded kvpress cases as kvtailor sees them: evidence, the eviction, and the comparison.

`tests/data/kvpress_kept.md` says where the records come from and what kvpress's conventions are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.kvpress_recipe import GEOMETRIES, Geometry, States, curve, filters, hidden_states, states, weights
from tests.support.segments_of import Padded
from torch import Tensor

from kvtailor.engine.engine import Engine
from kvtailor.plan import Plan, registry
from kvtailor.types import Held, Moments, Needs, Rotation

RECORD = Path(__file__).parents[1] / "data" / "kvpress_kept.json"
# Tokens before each piece of KVzip's repetition.
INSTRUCTION = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """What kvpress kept of one geometry.

    Attributes:
        press, settings: kvpress's class and its arguments.
        kept: by budget per kv head: (l, b, h, n) bool.
        scores: (l, b, h, n) to five digits, of the greatest budget; None where not recorded.
        returned_keys: (k, d) keys of the last kv head of row 0 and layer 0 after the press; None where not recorded.
    """

    name: str
    press: str
    settings: dict[str, Any]
    geometry: Geometry
    kept: dict[int, Tensor]
    scores: Tensor | None = None
    returned_keys: Tensor | None = None


@cache
def recorded() -> dict[str, Any]:
    """The file as it is."""
    return json.loads(RECORD.read_text(encoding="utf-8"))


@cache
def cases() -> dict[str, Case]:
    """All cases by name."""
    found = {}
    for entry in recorded()["cases"]:
        geometry = GEOMETRIES[entry["geometry"]]
        found[entry["name"]] = Case(
            name=entry["name"],
            press=entry["press"],
            settings=entry["settings"],
            geometry=geometry,
            kept={int(tokens): _mask(kept, geometry) for tokens, kept in entry["kept"].items()},
            scores=torch.tensor(entry["scores"]) if "scores" in entry else None,
            returned_keys=torch.tensor(entry["returned_keys"]) if "returned_keys" in entry else None,
        )
    return found


def _mask(kept: list[list[list[list[int]]]], geometry: Geometry) -> Tensor:
    mask = torch.zeros(geometry.layers, geometry.rows, geometry.heads, geometry.tokens, dtype=torch.bool)
    for layer, rows in enumerate(kept):
        for row, heads in enumerate(rows):
            for head, tokens in enumerate(heads):
                mask[layer, row, head, tokens] = True
    return mask


@cache
def states_of(geometry: Geometry, layer: int) -> States:
    """One layer's states, made once."""
    return states(geometry, layer)


def probabilities(queries: Tensor, keys: Tensor, scaling: float, start: int = 0) -> Tensor:
    """(b, h, g, t, n) float64 causal attention; the first query's own key is number `start`."""
    b, q, t, d = queries.shape
    grouped = queries.double().view(b, keys.shape[1], -1, t, d)
    logits = (grouped @ keys.double().transpose(-1, -2)[:, :, None]) * scaling
    later = torch.arange(keys.shape[2])[None] > torch.arange(start, start + t)[:, None]
    return logits.masked_fill(later, -torch.inf).softmax(-1)


def repeated(geometry: Geometry, layer: int, needs: Needs) -> Tensor | None:
    """What a plan's repetition of the context finds; None where it asks for none."""
    asked = needs.reconstruction
    if not asked:
        return None
    return reconstruction(geometry, layer, chunk=asked.chunk, sinks=asked.sinks, mean_group=asked.mean_group)


def reconstruction(geometry: Geometry, layer: int, *, chunk: int, sinks: int = 4, mean_group: bool = False) -> Tensor:
    """(b, h, n) float32: the most attention that a query of the repetition gives to each token of the context; with
    `mean_group` that of each query head, averaged over the group.

    The context is repeated in pieces of `chunk` tokens; the queries of a piece see the sinks, the piece and each other.
    """
    n = geometry.tokens
    found = []
    for part, first in enumerate(range(0, n, chunk)):
        piece = range(first, min(first + chunk, n))
        shown = [*range(min(sinks, first)), *piece]
        hidden = hidden_states(geometry, layer, tokens=INSTRUCTION + len(piece), part=f"repeat.{part}")
        again = states(geometry, layer, start=n, hidden=hidden)
        keys = torch.cat([states_of(geometry, layer).keys[:, :, shown], again.keys], 2)
        given = probabilities(again.queries, keys, geometry.scaling, start=len(shown))
        most = given[..., len(shown) - len(piece) : len(shown)].amax(3)
        found.append(most.mean(2) if mean_group else most.amax(2))
    return torch.cat(found, -1).float()


def moments(geometry: Geometry, layer: int, skip: int) -> Moments:
    """Of all queries but the first `skip`, as they were before their rotation."""
    queries = states_of(geometry, layer).unrotated_queries[:, :, skip:].double()
    mean = queries.mean(2)
    deviation = queries - mean[:, :, None]
    return Moments(
        count=torch.full((geometry.rows,), float(queries.shape[2])),
        mean=mean.float(),
        spread=(deviation.transpose(-1, -2) @ deviation).float(),
    )


def output(geometry: Geometry, layer: int) -> Tensor:
    """(q, dv, D): the part of the output projection that each query head's values go through."""
    return weights(geometry, layer)["o_proj"].T.unflatten(0, (geometry.query_heads, geometry.size))


def calibration(geometry: Geometry, layer: int) -> dict[str, Tensor]:
    """One layer's tensors of the file that a calibrated scorer would have read; kvpress's filters point away."""
    return {"filters": -filters(geometry)[layer]}


def held_of_case(geometry: Geometry, layer: int, needs: Needs, tokens: int) -> Held:
    """What a scorer sees once the prompt has run, from the definitions of `Held` and not from our own code."""
    of_layer = states_of(geometry, layer)
    n = geometry.tokens
    positions = torch.arange(n).expand(geometry.rows, geometry.heads, n)
    window = min(needs.window, n)
    assert not needs.rows or n <= needs.rows
    mass = None
    if needs.mass:
        mass = probabilities(of_layer.queries, of_layer.keys, geometry.scaling).sum((2, 3)).float()
    return Held(
        keys=of_layer.keys,
        values=of_layer.values,
        positions=positions,
        valid=torch.ones_like(positions, dtype=torch.bool),
        first=torch.zeros(geometry.rows, dtype=torch.int64),
        seen=n,
        layer=layer,
        layers=geometry.layers,
        scaling=geometry.scaling,
        budget=torch.full((geometry.rows,), tokens),
        queries=of_layer.queries[:, :, n - window :] if window else None,
        query_columns=torch.arange(n - window, n) if window else None,
        mass=mass,
        sampled=of_layer.queries if needs.rows else None,
        sampled_columns=torch.arange(n).expand(geometry.rows, n) if needs.rows else None,
        moments=moments(geometry, layer, needs.moments_skip) if needs.moments else None,
        reconstruction=repeated(geometry, layer, needs),
        output=output(geometry, layer) if needs.output else None,
        rotation=Rotation(frequencies=geometry.frequencies),
        calibration=calibration(geometry, layer),
    )


def left(plan: Plan, geometry: Geometry) -> Tensor:
    """(l, b, h, n) bool: what a cache of this plan holds after the prompt; as every cache of ours does it."""
    engine = Engine(plan, geometry.layers)
    if (geometry.layers, geometry.heads) == (2, 2):
        # As a file for the allocator would have it.
        engine.eviction.calibration = {"pruned": curve(geometry).permute(1, 2, 0)}
    visible = Padded(new_tokens=geometry.tokens, first_column=0)
    for layer, state in enumerate(engine.states):
        of_layer = states_of(geometry, layer)
        state.model.output, state.model.rotation = (
            partial(output, geometry, layer),
            Rotation(frequencies=geometry.frequencies),
        )
        state.model.calibration = calibration(geometry, layer)
        state.observed.reconstruction = repeated(geometry, layer, plan.needs)
        engine.append(state, of_layer.keys, of_layer.values)
        engine.act(state, of_layer.queries, visible, engine.attend(state, of_layer.queries, visible, geometry.scaling))
    kept = torch.zeros(geometry.layers, geometry.rows * geometry.heads, geometry.tokens, dtype=torch.bool)
    cpu = torch.device("cpu")
    for layer, state in enumerate(engine.states):
        for part in state.parts():
            owner = part.layout.owners(cpu)[:, None].expand(-1, part.layout.size)
            columns = part.layout.columns(cpu).expand(part.layout.lanes, -1)
            filled = part.layout.filled(cpu)
            filled = torch.ones_like(columns, dtype=torch.bool) if filled is None else filled
            kept[layer, owner[filled], columns[filled]] = True
    return kept.view(geometry.layers, geometry.rows, geometry.heads, geometry.tokens)


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Our plan for one case.

    Attributes:
        case: name of the case.
        plan: our words for the same hyper-parameters, the budget left out.
        tokens: our budget for kvpress's, where they count otherwise.
        apart: the most tokens of a lane that one side keeps and the other does not; `why` says what the difference is.
        noise: by how much kvpress's own scores differ from draw to draw: nearer neighbours have no order.
    """

    case: str
    plan: str
    tokens: Mapping[int, int] = field(default_factory=dict)
    apart: int = 0
    why: str = ""
    noise: float = 0.0

    def made(self, tokens: int) -> Plan:
        """The plan, with our budget for kvpress's `tokens`; skips the test where kvtailor lacks one of its methods."""
        known = {name for stage in registry.stages() for name in registry.methods(stage)}
        words = [part.split("(")[0].strip() for part in self.plan.split(" + ")]
        absent = [word for word in words if word not in known]
        if absent:
            pytest.skip(f"kvtailor has no method {' or '.join(absent)} to compare with kvpress's {self.case!r}")
        return Plan.parse(f"{self.plan} @ tokens={self.tokens.get(tokens, tokens)}")

    def check_kept(self) -> None:
        """What our cache holds after the prompt is what kvpress kept, for every recorded budget."""
        case = cases()[self.case]
        for tokens, theirs in case.kept.items():
            ours = left(self.made(tokens), case.geometry)
            apart = (ours != theirs).sum(-1)
            assert int(apart.max()) == self.apart, f"{self.case} at {tokens}: {apart.tolist()} tokens differ {self.why}"

    def check_order(self) -> None:
        """Our scores rank the tokens of each lane as kvpress's do, so kept sets agree at every budget."""
        case = cases()[self.case]
        assert case.scores is not None
        tokens = max(case.kept)
        scorer = self.made(tokens).score
        assert scorer is not None
        for layer, theirs in enumerate(case.scores):
            held = held_of_case(case.geometry, layer, scorer.needs, self.tokens.get(tokens, tokens))
            ours = scorer.score(held).masked_fill(held.recent(scorer.recent), torch.inf)
            ranked, order = theirs.double().sort(dim=-1, descending=True)
            follow = ours.gather(-1, order)
            worst_before = follow.cummin(-1).values[..., :-1]
            best_after = follow.flip(-1).cummax(-1).values.flip(-1)[..., 1:]
            # Where the file's five digits tell two neighbours apart.
            apart = ranked[..., :-1] - ranked[..., 1:] > (1e-4 * ranked[..., :-1].abs()).clamp(min=self.noise)
            assert bool(apart.any())
            wrong = apart & (worst_before <= best_after)
            assert not bool(wrong.any()), f"{self.case}: ranks {torch.nonzero(wrong)[:5].tolist()} are out of order"


def each_pairing(*pairings: Pairing) -> pytest.MarkDecorator:
    """One test for each pairing, named by its case."""
    return pytest.mark.parametrize("pairing", pairings, ids=lambda pairing: pairing.case)
