"""What the net runs: tiny random models of four families, a plan for every kind of method, five ways to be fed.

Everything is drawn from fixed states. Weights are large, so that attention is sharp, and keys have biases where the
family has them: a token that is missing, or turned by the wrong position, moves the logits by more than rounding.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.utils import GenerationMixin

import kvtailor

__all__ = ["FAMILIES", "MODES", "PLANS", "build", "results_of"]

_VOCABULARY = 131
_SHAPE = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Grouped heads and key biases; windows and a cap on logits; learned sinks and key biases; latents.
    "qwen2": ("Qwen2Config", {}),
    "gemma2": ("Gemma2Config", {**_WINDOWS, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}),
    # All experts at once: rounding would otherwise choose others here and there.
    "gpt_oss": (
        "GptOssConfig",
        {
            **_WINDOWS,
            "num_local_experts": 3,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 48,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
            "first_k_dense_replace": 3,
        },
    ),
}

_CUT = "@ tokens=28, slack=2"
PLANS = (
    "full",
    f"snapkv(window=6) {_CUT}",
    "snapkv(window=6, kernel=5) + adakv @ keep=0.4, slack=2",
    f"h2o(recent=6) {_CUT}",
    f"tova {_CUT}",
    "streamingllm @ tokens=24",
    f"position + uniform {_CUT}",
    f"expected + pyramid {_CUT}",
    f"keydiff + chunks(size=3) {_CUT}",
    f"knorm + pooled {_CUT}",
    f"lagkv(lag=8) {_CUT}",
    f"kvzip + pooled {_CUT}",
    f"kvcompose + composite {_CUT}",
    f"kvgrad + pooled {_CUT}",
    f"rkv(window=6) {_CUT}",
    f"lazyeviction {_CUT}",
    f"leverage + erank {_CUT}",
    f"cur + entropy {_CUT}",
    f"compactor + simlayerkv(recent=8) {_CUT}",
    f"critical(of=snapkv(window=6)) {_CUT}",
    f"snapkv(window=8, kernel=7, pooling=max) + dynamickv {_CUT}",
    f"snapkv(window=6) + cake {_CUT}",
    f"switched(prompt=snapkv(window=6), decoding=h2o(recent=6)) {_CUT}",
    f"capkv + coverage(per_head=true) {_CUT}",
    f"random + shuffled(of=pyramid) {_CUT}",
    f"noncausal + inverse(of=adakv) {_CUT}",
    f"random_attention {_CUT}",
    f"pairs(window=6, sinks=2) + asymkv {_CUT}",
    f"snapkv(window=6) + cam {_CUT}",
    f"h2o(recent=6) + d2o {_CUT}",
    f"rms + blend {_CUT}",
    f"snapkv(window=6) + matching {_CUT}",
    f"snapkv(window=6) + gatedchunks(size=5, short=2) {_CUT}",
    f"snapkv(window=6) + threshold {_CUT}",
    "kivi(bits=4, group=16, recent=16)",
    f"snapkv(window=6) + adakv + kivi(bits=2, group=8, recent=8) {_CUT}",
    f"h2o(recent=6) + hadamard(of=vector(bits=4, block_size=8)) {_CUT}",
    "unrotated(of=nuq(bits=4, group=16, block_size=16))",
    "fp8(group=16, block_size=16)",
    "by_age(of=[vector(bits=8, block_size=16), hadamard(of=vector(bits=4, block_size=16))], ages=[32])",
    "hadamard(of=gaussian(bits=3, block_size=16))",
    "higgs(block_size=16)",
    "mxfp4(block_size=16)",
    "centred(of=vector(bits=4, block_size=16))",
    "sides(keys=kivi(bits=4, group=16, recent=16), values=vector(bits=3, block_size=16))",
    "minicache(of=kivi(bits=4, group=16, recent=16), start=0.0)",
    "lowrank(rank=0.5, block_size=16, basis=random)",
    "kvtc(bits=4.0, group=16, block_size=16, basis=random)",
    "plain(block_size=16) + disk(resident_bytes=4096)",
    "indexed(page=4) + quest(tokens=24)",
    "rocket(tokens=24, window=8, kernel=5)",
)


def build(family: str) -> Any:
    """Return a random model of a family, in float32 on the CPU, whose attention is far from uniform."""
    kind, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**{**_SHAPE, **own})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * (1.0 if "embed" in name else 0.25))
            elif name.endswith("sinks"):
                parameter.copy_(drawn * 2 + 2)
            elif "k_proj.bias" in name:
                parameter.copy_(drawn * 3)
            elif name.endswith("bias") and "router" not in name:
                parameter.copy_(drawn * 0.25)
    return model.eval()


def _ids(rows: int, tokens: int, state: int) -> Tensor:
    """(rows, tokens) random token ids without those that have a meaning."""
    return torch.randint(3, _VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(state))


_CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)


class _Run:
    """One cache that is fed, and what is read on the way."""

    mask: Tensor

    def __init__(self, model: Any, plan: str, inside: Any):
        self.model, self.inside = model, inside
        self.cache = kvtailor.cache_for(model, plan)
        self.logits: list[Tensor] = []
        self.states: list[dict[str, Any]] = []

    def prompt(self, ids: Tensor, mask: Tensor | None = None, chunk: int | None = None) -> None:
        """Feed a prompt (b, n)."""
        self.mask = torch.ones_like(ids) if mask is None else mask
        kvtailor.prefill(self.model, ids, self.mask, cache=self.cache, chunk=chunk)
        self.look()

    def turn(self, ids: Tensor) -> None:
        """Feed further tokens (b, t) by the model's own forward, as `model.generate()` does."""
        self._forward(ids)
        self.look()

    def decode(self, tokens: int, state: int) -> None:
        """Feed tokens one by one, whatever the model would have said."""
        for ids in _ids(self.mask.shape[0], tokens, state).split(1, 1):
            self._forward(ids)
        self.look()

    def _forward(self, ids: Tensor) -> None:
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {_CACHE: self.cache, "attention_mask": self.mask, "position_ids": positions}
        with torch.no_grad():
            self.logits.append(self.model(ids, **given).logits[:, -1])

    def look(self) -> None:
        """Read what the cache holds now, and what that costs."""
        traffic = {name: value for name, value in asdict(self.cache.traffic()).items() if "seconds" not in name}
        held = {
            str(layer): [
                [f"{int(''.join('01'[bool(x)] for x in head), 2):0{-(-len(head) // 4)}x}" for head in row]
                for row in rows
            ]
            for layer, rows in self.inside.held_columns(self.cache).items()
        }
        self.states.append({"held": held, "ledger": self.cache.ledger().as_dict(), "traffic": traffic})


def _one_row(run: _Run) -> None:
    run.prompt(_ids(1, 72, 1))
    run.decode(3, 2)


def _padded_batch(run: _Run) -> None:
    ids, lengths = _ids(3, 70, 3), (70, 43, 58)
    mask = torch.stack([(torch.arange(70) >= 70 - length).long() for length in lengths])
    run.prompt(ids * mask, mask)
    run.decode(3, 4)


def _chunks(run: _Run) -> None:
    run.prompt(_ids(1, 66, 5), chunk=20)
    run.decode(2, 6)


def _two_turns(run: _Run) -> None:
    run.prompt(_ids(2, 44, 7))
    run.decode(3, 8)
    run.turn(_ids(2, 37, 9))
    run.decode(3, 10)


def _decoding(run: _Run) -> None:
    run.prompt(_ids(1, 40, 11))
    run.decode(24, 12)


MODES = {
    "one row": _one_row,
    "padded batch": _padded_batch,
    "chunks": _chunks,
    "two turns": _two_turns,
    "decoding": _decoding,
}


def results_of(family: str, inside: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Run every plan in every mode on a model of the family.

    Yields:
        plan, mode, and what came of it: "refused", a sentence; or "states", what the cache held after each prompt and
        each run of decoded tokens, and "logits" (b, forwards, V) of the last token of each forward.
    """
    model = build(family)
    for plan in PLANS:
        for mode, feed in MODES.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    run = _Run(model, plan.replace("disk(", f'disk(folder="{folder}", '), inside)
                    feed(run)
                except kvtailor.KvtailorError as error:
                    yield plan, mode, {"refused": str(error).replace(folder, "FOLDER")}
                    continue
                yield plan, mode, {"states": run.states, "logits": torch.stack(run.logits, 1)}
                del run
