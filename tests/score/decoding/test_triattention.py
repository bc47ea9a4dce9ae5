"""TriAttention against the sum of cosines that its paper has, and its centres against plain means."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tests.support.held_rows import Row, held_of, make_row
from tests.support.seam.zoo import build, prompts
from torch import Tensor

from kvtailor.calibration.triattention import _Sums
from kvtailor.calibration.watching import watched
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.lanes.rotate import turn
from kvtailor.score.decoding.triattention import TriAttention
from kvtailor.types import Rotation

HEADS, GROUP, SIZE, PLANES = 3, 2, 7, 2


def naive(row: Row, scorer: TriAttention, calibration: dict[str, Tensor], rotation: Rotation, prompt: int) -> Tensor:
    """(h, n), the paper's sums over planes and distances, from keys before their rotation."""
    n, turned = row.tokens, rotation.size
    plain = turn(row.keys.double(), -torch.arange(n), rotation)
    ahead = [2**i for i in range(64) if 2**i <= scorer.reach]
    found = torch.full((HEADS, n), -math.inf, dtype=torch.float64)
    for head in range(HEADS):
        for g in range(GROUP):
            centre = calibration["centres"][head, g].double()
            line = []
            for j in range(n):
                score = 0.0
                for plane in range(turned // 2):
                    at = (2 * plane, 2 * plane + 1) if rotation.interleaved else (plane, plane + turned // 2)
                    q, k = (torch.complex(*each[list(at)]) for each in (centre, plain[head, j]))
                    angle = float((q * k.conj()).angle())
                    for distance in ahead:
                        place = float(rotation.frequencies[plane]) * (n - 1 + distance - j)
                        score += abs(q) * abs(k) * math.cos(place + angle) / len(ahead)
                    score += (float(calibration["lengths"][head, g, plane]) - abs(q)) * abs(k)
                score += float(centre[turned:] @ plain[head, j, turned:])
                line.append(float(score))
            numbers = torch.tensor(line, dtype=torch.float64)
            judged = numbers[prompt:] if scorer.prompt else numbers
            deviation = max(float(judged.std(correction=0)), 1e-6)
            found[head] = torch.maximum(found[head], (numbers - judged.mean()) / deviation)
    return found.float()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_the_sum_of_cosines_for_every_padded_row(prompt: bool, interleaved: bool) -> None:
    scorer = TriAttention(reach=300, prompt=prompt)
    generator = torch.Generator().manual_seed(3)
    rows = [make_row(n, heads=HEADS, group=GROUP, size=SIZE, generator=generator) for n in (63, 40, 21)]
    tensors = scorer.example_calibration(layers=1, heads=HEADS, group=GROUP, size=SIZE, generator=generator)
    calibration = {name: tensor[0] for name, tensor in tensors.items()}
    held = held_of(rows, scorer.needs, calibration=calibration)
    rotation = dataclasses.replace(held.rotation, interleaved=interleaved)
    held = dataclasses.replace(held, rotation=rotation, prompt=50)
    got = scorer.score(held)
    for i, row in enumerate(rows):
        start = 63 - row.tokens
        asked = max(0, 50 - start)
        expected, own = naive(row, scorer, calibration, rotation, asked), got[i, :, start:]
        if not prompt:
            asked = 0
        # Without padding, as the host knows of it.
        alone = held_of([row], scorer.needs, calibration=calibration)
        known = torch.full((1, HEADS), row.tokens)
        alone = dataclasses.replace(alone, rotation=rotation, prompt=asked, front=known)
        torch.testing.assert_close(scorer.score(alone)[0], own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own[:, asked:], expected[:, asked:], rtol=2e-4, atol=2e-4)
        if asked:
            assert bool((own[:, :asked].amin(1) > own[:, asked:].amax(1)).all())
            assert torch.equal(own[:, :asked].argsort(1), expected[:, :asked].argsort(1))


@torch.no_grad()
def test_centres_are_the_means_of_what_the_projections_gave() -> None:
    model = build("llama")
    ids = prompts((40,))[0]
    sums, cache = _Sums(), cache_for(model, "expected @ keep=1.0")
    sums.rotations = [state.model.rotation for state in cache.engine.states]
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        for layer in model.model.layers
    ]
    with watched(cache, sums.add):
        model(ids[:, :25], **hand_cache(cache))
        model(ids[:, 25:], **hand_cache(cache))
    for hook in hooks:
        hook.remove()
    for layer, (state, lengths) in enumerate(zip(sums.states, sums.lengths, strict=True)):
        queries = torch.cat(seen[layer :: len(hooks)]).view(40, 4, -1).double()
        torch.testing.assert_close(state / sums.count, queries.mean(0), rtol=1e-4, atol=1e-5)
        planes = torch.hypot(*queries.chunk(2, -1))
        torch.testing.assert_close(lengths / sums.count, planes.mean(0), rtol=1e-4, atol=1e-5)


def test_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="reach must be at least 1"):
        TriAttention(reach=0)
    with pytest.raises(ValueError, match="recent must be 0 or more"):
        TriAttention(recent=-1)
    row = make_row(9, heads=HEADS, group=GROUP, size=SIZE, generator=torch.Generator())
    with pytest.raises(ValueError, match="none were given; see `kvtailor calibrate`"):
        TriAttention().score(held_of([row], TriAttention().needs))
