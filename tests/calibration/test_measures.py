"""Calibrators: what they see is what the model does, and what they make of it is what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.calibrated import tiny
from tests.support.seam.zoo import build, prompts

import kvtailor
from kvtailor.calibration.contract import calibrator, kinds
from kvtailor.calibration.duo import repeated
from kvtailor.calibration.erank import _Ranks
from kvtailor.calibration.passages import cut
from kvtailor.calibration.qfilters import filters_of
from kvtailor.calibration.watching import LayerStates, watched
from kvtailor.calibration_file import how_to
from kvtailor.errors import CalibrationError, KvtailorError, UnknownName
from kvtailor.hf.make_cache import cache_for
from kvtailor.hf.versions import hand_cache


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gemma3"])
@torch.no_grad()
def test_what_is_watched_is_the_models_own_attention(family: str) -> None:
    """Against the weights that the model itself gives under eager attention."""
    ids = prompts((37,))[0]
    eager = build(family, attention="eager")
    own = eager(ids, output_attentions=True, use_cache=False).attentions
    model, seen = build(family), []
    cache = cache_for(model, "full")
    with watched(cache, seen.append):
        model(ids, **hand_cache(cache))
    model(ids, **hand_cache(cache))
    assert [states.layer for states in seen] == list(range(len(cache.geometry.compressed)))
    for states, layer in zip(seen, cache.geometry.compressed, strict=True):
        group = cache.geometry.q_heads // cache.geometry.kv_heads
        for head in range(cache.geometry.kv_heads):
            expected = own[layer][0, head * group : (head + 1) * group]
            torch.testing.assert_close(states.attention(head, 0, 37), expected, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(states.attention(head, 11, 20), expected[:, 11:20], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_new_tokens_after_a_prompt_see_all_before_them() -> None:
    ids, model, seen = prompts((30,))[0], build("llama"), []
    whole, parts = cache_for(model, "full"), cache_for(model, "full")
    with watched(whole, seen.append):
        model(ids, **hand_cache(whole))
    model(ids[:, :22], **hand_cache(parts))
    with watched(parts, seen.append):
        model(ids[:, 22:], **hand_cache(parts))
    for once, later in zip(seen[:3], seen[3:], strict=True):
        torch.testing.assert_close(later.attention(1, 0, 8), once.attention(1, 22, 30), atol=1e-5, rtol=1e-4)


def test_filters_are_the_first_right_singular_vectors_turned_to_the_mean_query() -> None:
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(6, 50, 5, generator=generator, dtype=torch.float64) * torch.tensor([3.0, 1, 1, 0.5, 2])
    queries += torch.tensor([-2.0, 0.3, 0, 1, 0])
    found = filters_of(queries.mT @ queries, queries.sum(1), 3)
    for head in range(3):
        expected = torch.zeros(5, dtype=torch.float64)
        for each in queries[2 * head : 2 * head + 2]:
            left, _, right = torch.linalg.svd(each, full_matrices=False)
            expected += right[0] * (1 if left[:, 0].mean() > 0 else -1) / 2
        torch.testing.assert_close(found[head], expected, atol=1e-9, rtol=0)
    # The other half of all vectors: queries that point the other way have the same second moments.
    torch.testing.assert_close(filters_of(queries.mT @ queries, -queries.sum(1), 3), -found)


def test_a_filter_by_hand() -> None:
    """Queries (3, 4), (6, 8) and (-3, -4) lie on one line; most of them point up it: (0.6, 0.8)."""
    queries = torch.tensor([[[3.0, 4], [6, 8], [-3, -4]]], dtype=torch.float64)
    found = filters_of(queries.mT @ queries, queries.sum(1), 1)
    torch.testing.assert_close(found, torch.tensor([[0.6, 0.8]], dtype=torch.float64))
    with pytest.raises(KvtailorError, match="NaN or infinity"):
        filters_of(torch.full((1, 2, 2), math.nan), torch.zeros(1, 2), 1)


@torch.no_grad()
def test_ranks_are_those_of_the_whole_mean_matrix() -> None:
    ids = prompts((50,))[0]
    eager = build("qwen2", attention="eager")
    own = eager(ids, output_attentions=True, use_cache=False).attentions
    model, ranks = build("qwen2"), _Ranks()
    cache = cache_for(model, "full")
    with watched(cache, ranks.add):
        model(ids, **hand_cache(cache))
    for found, matrix in zip(ranks.by_layer, own, strict=True):
        values = torch.linalg.svdvals(matrix[0].double().mean(0))
        shares = values / values.sum()
        assert float(found) == pytest.approx(math.exp(-float((shares * shares.log()).sum())), rel=1e-3)


def test_gates_by_hand() -> None:
    """A key is its token's direction: a query of head 0 looks for its own token, of head 1 for none, of head 2 for the
    token before its own, so that it finds what followed in neither copy.
    """
    length, before = 16, 1
    directions = torch.eye(length + 1) * 100
    said = torch.cat([torch.tensor([length]), torch.arange(length), torch.arange(length)])
    keys = directions[said].expand(3, -1, -1)
    earlier = torch.cat([said[:1], said[:-1]])
    queries = torch.stack([directions[said], torch.zeros(len(said), length + 1), directions[earlier]])
    found = repeated(LayerStates(0, queries, keys, keys, 1.0), length, before)
    # Head 0 finds its own token in both copies, and gives half of its attention to the first.
    assert found[0] == pytest.approx(0.5, abs=1e-4)
    rows = torch.arange(before + length + 4, before + 2 * length - 1)
    assert found[1] == pytest.approx((2 / (rows + 1)).mean().item(), rel=1e-4)
    assert found[2] == pytest.approx(0.0, abs=1e-4)


def test_an_induction_head_has_a_gate_of_one() -> None:
    """Keys that carry the token before: who looks for its own token finds what followed it."""
    length = 16
    directions = torch.eye(length + 1) * 100
    said = torch.cat([torch.tensor([length]), torch.arange(length), torch.arange(length)])
    keys = directions[torch.cat([said[:1], said[:-1]])][None]
    queries = torch.stack([directions[said], torch.zeros(len(said), length + 1)])
    found = repeated(LayerStates(0, queries, keys, keys, 1.0), length, 1)
    assert found.tolist() == pytest.approx([1.0], abs=1e-4), "the better of a group's two query heads counts"


def test_passages_have_their_length_and_lie_all_over_the_texts() -> None:
    subject = tiny()
    texts = {"one": "".join(f"word{i} " for i in range(500)), "two": "abc " * 900}
    found = cut(subject, texts, tokens=640, context=64)
    assert [each.source for each in found] == ["one"] * 5 + ["two"] * 5
    for each in found:
        assert each.ids.numel() == 64 and bytes(each.ids.tolist()).decode() == each.text
        assert each.text in texts[each.source]
    starts = [texts["one"].index(each.text) for each in found[:5]]
    assert starts[0] == 0 and all(abs(start - 780 * i) < 200 for i, start in enumerate(starts))
    with pytest.raises(KvtailorError, match="give at least 128 tokens"):
        cut(subject, texts, tokens=100, context=64)
    with pytest.raises(KvtailorError, match="40 passages of 64 tokens of short, but its 70 characters are too few"):
        cut(subject, {"short": "x" * 70}, tokens=2560, context=64)


def test_kinds_are_found_and_a_near_miss_is_named() -> None:
    assert {"qfilters", "duo", "atskv"} <= set(kinds())
    assert all(calibrator(kind).summary for kind in kinds())
    with pytest.raises(UnknownName, match="did you mean 'qfilters'"):
        calibrator("qfilter")


def test_the_model_stays_as_it_was(tmp_path) -> None:
    subject = tiny()
    before = {name: parameter.clone() for name, parameter in subject.model.named_parameters()}
    made = kvtailor.calibrate(subject, "duo", out=tmp_path / "d.safetensors", tokens=200, context=100)
    assert subject.model.config._attn_implementation == "sdpa"
    assert all(torch.equal(before[name], each) for name, each in subject.model.named_parameters())
    assert made.tensors["gates"].shape == (3, 2) and 0 <= float(made.tensors["gates"].min()) < 1
    again = kvtailor.calibrate(subject, "duo", out=tmp_path / "e.safetensors", tokens=200, context=100)
    other = kvtailor.calibrate(subject, "duo", out=tmp_path / "f.safetensors", tokens=200, context=100, state=1)
    assert torch.equal(made.tensors["gates"], again.tensors["gates"])
    assert not torch.equal(made.tensors["gates"], other.tensors["gates"])


@pytest.mark.parametrize("kind", ["lowrank", "kvtc"])
def test_directions_of_fewer_tokens_than_channels_are_refused(kind: str, tmp_path) -> None:
    texts = {"a": "Several words, and several more of them. " * 9}
    with pytest.raises(CalibrationError, match="directions of 32 channels from 30 tokens"):
        kvtailor.calibrate(tiny(), kind, texts, tokens=30, context=10, out=tmp_path / "f.safetensors")


def test_a_text_for_a_kind_that_reads_none_is_refused(tmp_path) -> None:
    """Its file would keep the text's traces, and a bench would refuse what was never read."""
    with pytest.raises(CalibrationError, match="kind duo reads no text, and mine was given"):
        kvtailor.calibrate(tiny(), "duo", {"mine": "Some words. " * 90}, out=tmp_path / "f.safetensors")


def test_how_to_make_a_file_names_a_text_where_one_is_read() -> None:
    assert all(("--text" in how_to(kind)) == calibrator(kind).reads_text for kind in kinds())
