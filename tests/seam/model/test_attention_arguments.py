"""What the models of the installed transformers hand to their attention function is known, name by name.

Read from their sources: a new argument in a new version makes this test fail, and has to be supported, refused, or
found to change nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.attention import attention
from kvtailor.hf.model.attending.softmax import CHANGES_NOTHING, REFUSED, SUPPORTED, softmax_of
from kvtailor.hf.versions import CACHE_ARGUMENTS, hand_cache
from tests.support.seam.zoo import ROUNDING, build, error, prompts

MODELS = Path(transformers.__file__).parent / "models"
# Encoders of sound hand their states over by name.
STATES = {"module", "query", "key", "value"}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls of what `AttentionInterface` gave."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "attention_interface" in node.func.id:
            yield node


@cache
def handed_over() -> dict[str, dict[str, set[str]]]:
    """For each argument the families that name it, and what they hand over."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if "attention_interface" in source:
            for call in calls(ast.parse(source)):
                for each in call.keywords:
                    if each.arg is not None:
                        found[each.arg][path.parent.name].add(ast.unparse(each.value))
    return found


@pytest.mark.together
def test_each_argument_of_each_family_is_known() -> None:
    found = handed_over()
    assert {"scaling", "softcap", "s_aux"} <= set(found), "the sources are no longer what this test reads"
    unknown = {name: sorted(of) for name, of in found.items()}
    for known in (SUPPORTED, set(REFUSED), CHANGES_NOTHING, STATES):
        unknown = {name: of for name, of in unknown.items() if name not in known}
    assert unknown == {}, "decide in hf/model/attending/softmax.py what each of these arguments changes"
    assert set(CACHE_ARGUMENTS) <= CHANGES_NOTHING, "a model hands on what it was given, by either name"
    assert not SUPPORTED & CHANGES_NOTHING and not set(REFUSED) & (SUPPORTED | CHANGES_NOTHING)


@pytest.mark.together
def test_caps_and_sinks_are_the_attributes_by_which_they_are_known_before_a_forward() -> None:
    """`softmax_before` reads these two."""
    found = handed_over()
    assert set().union(*found["s_aux"].values()) == {"self.sinks"}
    # A vision encoder hands over None as well.
    assert set().union(*found["softcap"].values()) <= {"self.attn_logit_softcapping", "None"}


@pytest.mark.parametrize("name", sorted(REFUSED))
@torch.no_grad()
def test_what_is_not_supported_is_refused_and_changes_nothing(name: str) -> None:
    model = build("llama")
    ids, _ = prompts((12,))
    cache = kvtailor.cache_for(model, "full")
    model(ids, **hand_cache(cache))
    with pytest.raises(UnsupportedModel, match=rf"LlamaAttention hands {name}= to its attention, .*does not support"):
        model(ids[:, :1], **hand_cache(cache), **{name: torch.zeros(1)})
    assert cache.seen == 12
    expected = model(torch.cat([ids, ids[:, :1]], 1), use_cache=False).logits[:, -1]
    assert error(model(ids[:, :1], **hand_cache(cache)).logits[:, -1], expected) < ROUNDING


@torch.no_grad()
def test_an_argument_that_nobody_knows_is_refused() -> None:
    model = build("llama")
    ids, _ = prompts((12,))
    cache = kvtailor.cache_for(model, "full")
    with pytest.raises(UnsupportedModel, match="head_mask= .*does not know whether that changes the result"):
        model(ids, **hand_cache(cache), head_mask=torch.ones(4))
    with pytest.raises(UnsupportedModel, match="head_mask= "):
        model(ids, use_cache=False, head_mask=torch.ones(4))
    # What tokenizers give beside the ids is handed on by every model, and None is nothing.
    model(ids, **hand_cache(cache), token_type_ids=torch.zeros_like(ids), head_mask=None)
    assert cache.seen == 12


class Attending(nn.Module):
    """An attention module with nothing but a name."""


@pytest.mark.parametrize(("given", "found"), [(0.0, "softcap=0.0"), (-1.0, "softcap=-1.0")])
def test_a_cap_that_is_none_is_refused(given: float, found: str) -> None:
    with pytest.raises(UnsupportedModel, match=found):
        softmax_of(Attending(), 4, {"softcap": given})


def test_sinks_of_another_number_of_heads_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"Attending has 3 learned sinks for 4 query heads \(shape \(3,\)\)"):
        softmax_of(Attending(), 4, {"s_aux": torch.zeros(3)})


def states() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn((2, h, 9, 8), generator=generator) for h in (4, 2, 2))  # type: ignore[return-value]


def test_a_mask_that_adds_numbers_is_refused_where_there_are_sinks() -> None:
    added = torch.zeros(1, 1, 9, 9).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    out, _ = attention(Attending(), *states(), added, s_aux=torch.zeros(4))
    assert torch.allclose(out, attention(Attending(), *states(), added == 0, s_aux=torch.zeros(4))[0])
    with pytest.raises(CacheMisuse, match=r"adds numbers to logits that it does not hide \(0.5 among them\)"):
        attention(Attending(), *states(), added + 0.5, s_aux=torch.zeros(4))
    with pytest.raises(UnsupportedModel, match="adds a position_bias to logits that it caps"):
        attention(Attending(), *states(), None, softcap=2.0, position_bias=torch.zeros(1, 4, 9, 9))


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_causality_is_the_modules(causal: bool) -> None:
    query, keys, values = states()
    out, _ = attention(Attending(), query, keys, values, None, 0.4, softcap=1.5, is_causal=causal)
    logits = 1.5 * (query @ keys.repeat_interleave(2, 1).mT * 0.4 / 1.5).tanh()
    if causal:
        logits = logits.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    expected = logits.softmax(-1) @ values.repeat_interleave(2, 1)
    assert torch.allclose(out.transpose(1, 2), expected, atol=1e-5)
