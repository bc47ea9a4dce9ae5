"""Records what kvpress keeps of the states of `tests/support/kvpress_recipe.py`, in `kvpress_kept.json` beside it.
file.

Run from the repository's root, in an environment that holds kvpress and not kvtailor; `kvpress_kept.md` says how.
kvpress is only called. Every case goes through the press's own `compress`, `forward_hook` or `compress_post`.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from tests.data.kvpress_asked import CASES, PYRAMIDS, Asked
from tests.support.kvpress_recipe import (
    GEOMETRIES,
    WHOLE,
    Geometry,
    curve,
    filters,
    head_scores,
    hidden_states,
    numbers,
    weights,
    whole_ids,
    whole_weight,
)
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

OUT = Path(__file__).with_name("kvpress_kept.json")
# Kept sets must not change when every input moves by about this fraction, so that no rounding decides one.
NUDGE = 3e-6


@dataclass(frozen=True)
class Layer:
    """What a press is given of one layer."""

    module: Any
    hidden: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor
    kwargs: dict[str, Any]


def config_of(geometry: Geometry, *, vocabulary: int, intermediate: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=geometry.width,
        intermediate_size=intermediate,
        num_hidden_layers=geometry.layers,
        num_attention_heads=geometry.query_heads,
        num_key_value_heads=geometry.heads,
        head_dim=geometry.size,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        attn_implementation="sdpa",
    )


def model_of(geometry: Geometry) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config_of(geometry, vocabulary=8, intermediate=8)).eval()
    for index, layer in enumerate(model.model.layers):
        for name, weight in weights(geometry, index).items():
            getattr(layer.self_attn, name).weight.data.copy_(weight)
        layer.self_attn.rotary_emb = model.model.rotary_emb
    return model


def run(model: LlamaForCausalLM, index: int, hidden: Tensor, cache: DynamicCache, start: int = 0) -> Layer:
    """The attention of one layer, its keys appended to the cache, with the probabilities of the new queries."""
    module = model.model.layers[index].self_attn
    new = hidden.shape[1]
    positions = torch.arange(start, start + new)
    embeddings = model.model.rotary_emb(hidden, positions[None])
    seen = torch.arange(start + new)[None] <= positions[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    model.config._attn_implementation = "eager"
    _, attentions = module(
        hidden, position_embeddings=embeddings, attention_mask=mask, past_key_values=cache, cache_position=positions
    )
    # The presses that choose heads apart refuse to work under "eager", though they are called here by hand.
    model.config._attn_implementation = "sdpa"
    held = cache.layers[index]
    kwargs = {
        "hidden_states": hidden,
        "position_embeddings": embeddings,
        "past_key_values": cache,
        "cache_position": positions,
    }
    return Layer(module, hidden, held.keys, held.values, attentions, kwargs)


def entering(geometry: Geometry, layer: int, nudged: bool, tokens: int | None = None, part: str = "context") -> Tensor:
    hidden = hidden_states(geometry, layer, tokens=tokens, part=part)
    return hidden * (1 + numbers("nudge", *hidden.shape, step=NUDGE / 42)) if nudged else hidden


def layers_of(geometry: Geometry, nudged: bool) -> tuple[LlamaForCausalLM, list[Layer]]:
    model, cache = model_of(geometry), DynamicCache()
    return model, [run(model, i, entering(geometry, i, nudged), cache) for i in range(geometry.layers)]


def made(press: str, settings: Mapping[str, Any], ratio: float) -> Any:
    """The press with its settings; a press inside another carries the ratio."""
    settings = dict(settings)
    inner = settings.pop("press", None)
    if inner is not None:
        settings["press"] = made(inner["press"], inner["settings"], ratio)
    if press == "LUKVPress" or (inner is None and press != "DuoAttentionPress"):
        settings["compression_ratio"] = ratio
    return getattr(kvpress, press)(**settings)


def left_by_mask(module: Any, shape: torch.Size) -> Tensor:
    """(b, h, n) bool: what a press that only masks has left."""
    kept = torch.ones(shape, dtype=torch.bool)
    if module.masked_key_indices is not None:
        kept[tuple(torch.as_tensor(index) for index in module.masked_key_indices)] = False
    return kept


def left_by_gather(values: Tensor, gathered: Tensor) -> Tensor:
    """(b, h, n) bool: which of the values (b, h, n, d) the press returned; all of them differ."""
    same = (values[:, :, :, None] == gathered[:, :, None]).all(-1)
    assert bool((same.sum(2) == 1).all())
    return same.any(-1)


def press_layer(press: Any, name: str, layer: Layer) -> tuple[Tensor, Tensor]:
    """(b, h, n) bool, what is kept, and the keys as the press returns them."""
    layer.module.masked_key_indices = None
    attentions = layer.attentions if "ObservedAttention" in name else None
    if "DMSPress" in name:
        press.forward_hook(layer.module, [], layer.kwargs, [None, None])
        keys, values = layer.keys, layer.values
    else:
        keys, values = press.compress(layer.module, layer.hidden, layer.keys, layer.values, attentions, layer.kwargs)
    if layer.module.masked_key_indices is not None or values.shape == layer.values.shape:
        return left_by_mask(layer.module, layer.keys.shape[:3]), keys
    return left_by_gather(layer.values, values), keys


def scores_of(press: Any, name: str, layers: list[Layer]) -> Tensor:
    """(l, b, h, n)."""
    attentions = "ObservedAttention" in name
    return torch.stack(
        [
            press.score(x.module, x.hidden, x.keys, x.values, x.attentions if attentions else None, x.kwargs)
            for x in layers
        ]
    )


def kvzip(
    press: Any, asked: Asked, model: LlamaForCausalLM, layers: list[Layer], nudged: bool
) -> tuple[Tensor, Tensor]:
    """(l, b, h, n) kept and scores: the repetition's hidden states come from the recipe and not from a tokenizer."""
    geometry = GEOMETRIES[asked.geometry]
    n = press.context_length = geometry.tokens
    press.score_val = torch.zeros(geometry.layers, 1, geometry.heads, n)
    for part, first in enumerate(range(0, n, press.chunk_size)):
        press.start_idx, press.end_idx = first, min(first + press.chunk_size, n)
        tokens = asked.given["instruction"] + press.end_idx - first
        for index, layer in enumerate(layers):
            cache = DynamicCache()
            for each in range(index + 1):
                cache.update(layer.keys, layer.values, each)
            hidden = entering(geometry, index, nudged, tokens, f"repeat.{part}")
            again = run(model, index, hidden, cache, start=n)
            press.score_kvzip(again.module, hidden, again.keys, again.values, None, again.kwargs)
    scores = press.score_val.clone()
    press.compress_post(model)
    return torch.stack([left_by_mask(layer.module, layer.keys.shape[:3]) for layer in layers]), scores


def kvcompose(
    press: Any, asked: Asked, model: LlamaForCausalLM, layers: list[Layer], nudged: bool
) -> tuple[Tensor, Tensor]:
    """(l, b, h, n) kept and scores, from hidden states of the recipe as in `kvzip`."""
    geometry = GEOMETRIES[asked.geometry]
    n = geometry.tokens
    press._register_model(model)
    press.register_context_ids(torch.zeros(1, n, dtype=torch.int64))
    for index, layer in enumerate(layers):
        cache = DynamicCache()
        for each in range(index + 1):
            cache.update(layer.keys, layer.values, each)
        hidden = entering(geometry, index, nudged, asked.given["instruction"] + n, "repeat.0")
        again = run(model, index, hidden, cache, start=n)
        press.forward_hook(again.module, [], again.kwargs, [None, again.attentions])
    press.prepare_important_masks()
    kept = torch.stack([torch.stack(heads) for heads in press.important_mask_per_kv_head])
    return kept[:, None], press.scores[:, None]


def whole_model(nudged: bool) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config_of(WHOLE, vocabulary=50, intermediate=96)).eval()
    for name, parameter in model.named_parameters():
        weight = whole_weight(name, *parameter.shape)
        parameter.data.copy_(weight * (1 + numbers("nudge", *weight.shape, step=NUDGE / 42)) if nudged else weight)
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb
    return model


def kvgrad(chunk: int, nudged: bool) -> tuple[Tensor, Tensor]:
    """(l, 1, h, n) kept and scores of KVgrad in a whole model, which repeats its context in pieces of `chunk`."""
    model, (ids, words) = whole_model(nudged), whole_ids()
    n, cache = len(ids), DynamicCache()
    with torch.no_grad():
        model(ids[None], past_key_values=cache)
    press = kvpress.KVgradPress(compression_ratio=0.7, chunk_size=chunk)
    press._context_ids, press._cache = ids[None], cache
    pieces = [
        (ids[None, at : at + chunk], torch.cat([words, ids[max(0, at - 8) : at], ids[at : at + chunk]])[None])
        for at in range(0, n, chunk)
    ]

    def prepare(*_: Any) -> list[tuple[Tensor, Tensor]]:
        press.score_val = torch.zeros(WHOLE.layers, 1, WHOLE.heads, n)
        return pieces

    press.prepare = prepare
    press._perform_kvzip_compression(model, None)
    shape = torch.Size((1, WHOLE.heads, n))
    return torch.stack([left_by_mask(layer.self_attn, shape) for layer in model.model.layers]), press.score_val


def graded(chunk: int) -> dict[str, Any]:
    kept, scores = kvgrad(chunk, nudged=False)
    assert torch.equal(kept, kvgrad(chunk, nudged=True)[0]), chunk
    return {"press": "KVgradPress", "chunk": chunk, "kept": indices(kept), "scores": rounded(scores)}


def duo(press: Any, geometry: Geometry, model: LlamaForCausalLM, asked: Asked) -> None:
    """Gives the press head scores in the place of the pattern file that it would download."""
    pattern = (asked.given["sinks"], asked.given["recents"], head_scores(geometry).double().numpy())
    press.load_attention_pattern = lambda _: pattern
    press.post_init_from_model(model)


def rounded(tensor: Tensor) -> Any:
    if tensor.ndim:
        return [rounded(each) for each in tensor]
    return float(f"{float(tensor):.5g}")


def indices(kept: Tensor) -> Any:
    return torch.nonzero(kept)[:, 0].tolist() if kept.ndim == 1 else [indices(each) for each in kept]


def pressed(asked: Asked, tokens: int, nudged: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(l, b, h, n) kept; scores of that shape where there are some; the keys of the last kv head, as returned."""
    geometry = GEOMETRIES[asked.geometry]
    model, layers = layers_of(geometry, nudged)
    # Half a token above the wish, so that no rounding of a ratio takes one away.
    ratio = asked.ratio if asked.ratio is not None else 1 - (tokens + 0.5) / geometry.tokens
    press = made(asked.press, asked.settings, ratio)
    if asked.press == "KVzipPress":
        return *kvzip(press, asked, model, layers, nudged), None
    if asked.press == "KVComposePress":
        return *kvcompose(press, asked, model, layers, nudged), None
    if asked.press == "LUKVPress":
        press._budget_curves = curve(geometry).numpy()
    if asked.press == "DuoAttentionPress":
        duo(press, geometry, model, asked)
    elif asked.press == "QFilterPress":
        press.q_filters = filters(geometry)
    elif asked.press == "FinchPress":
        press.window_size = asked.given["question"]
    label = json.dumps([asked.press, asked.settings])
    pairs = [press_layer(press, label, layer) for layer in layers]
    scores = scores_of(press, label, layers) if asked.scores else None
    return torch.stack([pair[0] for pair in pairs]), scores, pairs[0][1][0, -1]


def record(asked: Asked) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": asked.name,
        "press": asked.press,
        "settings": dict(asked.settings),
        "given": dict(asked.given),
        "geometry": asked.geometry,
        "kept": {},
    }
    for tokens in asked.tokens:
        kept, scores, keys = pressed(asked, tokens, nudged=False)
        assert torch.equal(kept, pressed(asked, tokens, nudged=True)[0]), (asked.name, tokens)
        entry["kept"][str(tokens)] = indices(kept)
        if asked.scores:
            entry["scores"] = rounded(scores)
        if asked.returned_keys:
            entry["returned_keys"] = rounded(keys)
    return entry


def witness(geometry: Geometry) -> list[dict[str, Any]]:
    """A few numbers of the states that kvpress saw, so that a rebuilt recipe can be checked against them."""
    spots = torch.tensor([0, geometry.tokens // 2, geometry.tokens - 1])
    _, layers = layers_of(geometry, nudged=False)
    return [
        {
            "keys": rounded(layer.keys[-1, -1][spots, :4]),
            "values": rounded(layer.values[-1, -1][spots, :4]),
            "mass": rounded(layer.attentions[-1, -1].sum(0)[spots]),
        }
        for layer in layers
    ]


def pyramid_budgets(layers: int, tokens: int, window: int, beta: float, ratio: float) -> dict[str, Any]:
    press = kvpress.PyramidKVPress(compression_ratio=ratio, window_size=window, beta=beta)
    geometry = Geometry(name="budgets", query_heads=1, heads=1, tokens=tokens, layers=layers, size=2, width=2)
    modules = [layer.self_attn for layer in model_of(geometry).model.layers]
    found = [press.get_layer_budget(module, tokens) for module in modules]
    return {"layers": layers, "tokens": tokens, "window": window, "beta": beta, "ratio": ratio, "budgets": found}


@torch.no_grad()
def main() -> None:
    logging.disable(logging.WARNING)
    made_with = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    head = {
        "made_with": {**made_with, "python": platform.python_version()},
        "geometries": {g.name: {**vars(g)} for g in GEOMETRIES.values()},
        "witness": {g.name: witness(g) for g in GEOMETRIES.values()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, entries in (
        ("pyramid_budgets", [pyramid_budgets(*asked) for asked in PYRAMIDS]),
        ("whole_model", [graded(chunk) for chunk in (40, 20)]),
        ("cases", [record(asked) for asked in CASES]),
    ):
        each = ",\n ".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
        lines.append(f"{json.dumps(key)}: [\n {each}\n]")
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size} bytes, {len(CASES)} cases")


if __name__ == "__main__":
    main()
