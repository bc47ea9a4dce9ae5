"""One process of a tensor-parallel run; started by `test_ranks` under torchrun.

The same plans run on a model whose heads lie on all processes and, in the first process, on the whole model. The first
process prints one JSON line for each case, with what differed.
"""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import kvtailor
from kvtailor.hf.model.calibrated import UNTRAINED
from kvtailor.hf.versions import hand_cache
from kvtailor.plan import registry
from tests.support.seam.zoo import VOCABULARY, held_columns, prompts

_SHAPE = {
    "vocab_size": VOCABULARY + 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_GROUPED = {"num_key_value_heads": 8, "head_dim": 16}
_LAYERS = ["sliding_attention", "full_attention", "full_attention", "full_attention"]
LENGTHS = (170, 163, 90)
NEW = 9
MORE = (
    "snapkv(window=8) + adakv @ keep=0.3",
    "snapkv(window=8) + adakv + kivi(bits=4, group=16, recent=16) @ keep=0.3",
    "snapkv(window=8) + adakv @ bytes=600000",
    "snapkv(window=8) + kivi(bits=4, group=16, recent=16) @ bytes=400000",
    "snapkv(window=8) + pooled @ tokens=40",
    "expected + pooled + vector(bits=8) @ keep=0.4",
    "snapkv(window=8) + coverage @ keep=0.3",
    "knorm + coverage(per_head=true, window=16) @ keep=0.3",
    "snapkv(window=8) + entropy @ keep=0.3",
    "snapkv(window=8) + cake @ keep=0.3",
    "snapkv(window=8) + erank @ keep=0.3",
    "snapkv(window=8) + erank(static=true) @ keep=0.3",
    "snapkv(window=8) + duo(streaming=8) @ keep=0.3",
    "snapkv(window=8) + inverse(of=adakv) @ keep=0.3",
    "snapkv(window=8) + shuffled(of=pooled, state=3) @ keep=0.3",
    "critical(of=snapkv(window=8)) + adakv @ keep=0.3",
    "tova @ tokens=40",
    "tova + adakv @ tokens=40",
    "random(state=5) @ tokens=40",
    "h2o + adakv @ tokens=40, slack=4",
    "atskv(window=8) @ tokens=40",
    "qfilters @ tokens=40",
    "retrieval @ tokens=40",
    "lagkv(lag=16) @ tokens=40",
    "keydiff @ tokens=40, slack=3",
    "snapkv(window=8) + threshold @ tokens=40",
    "snapkv(window=8) + chunks(heads=all) @ tokens=40",
    "snapkv(window=8) + adakv + cam @ keep=0.4",
    "snapkv(window=8) + adakv + quest(tokens=32, least=1, dense_layers=1) + indexed @ keep=0.4",
    "snapkv(window=8) + adakv + rocket(tokens=40, expect=8) @ keep=0.4",
    "snapkv(window=8) + rolling @ keep=0.4",
    "lowrank(rank=0.5, heads=4, basis=random)",
    "lowrank(rank=0.5, heads=8, only=values, of=vector, basis=random)",
)


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """Families: grouped heads, fused projections, windows of the model's own; and heads that no process shares."""
    return {
        "llama": transformers.LlamaConfig(**_SHAPE, **_GROUPED),
        "gpt_neox": transformers.GPTNeoXConfig(
            **{**_SHAPE, "num_attention_heads": 8, "hidden_size": 128}, rotary_pct=0.25
        ),
        "gemma3": transformers.Gemma3TextConfig(**_SHAPE, **_GROUPED, sliding_window=16, layer_types=_LAYERS),
        "phi3": transformers.Phi3Config(**{**_SHAPE, "hidden_size": 256}, num_key_value_heads=8),
    }


def with_sinks() -> dict[str, transformers.PreTrainedConfig]:
    """A family with learned sinks, of which each process has those of its query heads."""
    return {
        "granite_swa": transformers.GraniteSWAConfig(
            **_SHAPE, **_GROUPED, sliding_window=16, layer_types=_LAYERS, attention_multiplier=0.25
        )
    }


def plan_of(preset: str) -> str:
    """A preset with a budget for prompts of this length."""
    return f"{preset} @ tokens=40" if registry.presets()[preset].budget else preset


def save(family: str, folder: Path) -> None:
    """Write a random model whose attention is sharp enough that which tokens it sees matters."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        (with_sinks() if family == "granite_swa" else configs())[family], dtype=torch.float64
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                scale = 1.0 if "embed" in name else 0.25
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale)
            elif name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 2 + 2)
    model.save_pretrained(folder)


def load(folder: Path, **options: Any) -> Any:
    """In double precision: sums that meet in another order then round a code otherwise in one case of a billion."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    # Random tensors stand for calibrations, the same wherever the model's weights are.
    setattr(model, UNTRAINED, True)
    return model


def begun(model: Any, plan: str) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A cache that has seen a padded batch and some tokens more; all tokens, their mask, and the logits of the new."""
    ids, mask = prompts(LENGTHS)
    cache = kvtailor.cache_for(model, plan)
    kvtailor.prefill(model, ids[:, :-1], mask[:, :-1], cache=cache)
    return (cache, *continued(model, cache, ids, mask))


def continued(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens after some more, their mask, and the logits of the new ones."""
    out = model.generate(
        ids,
        attention_mask=mask,
        **hand_cache(cache),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out.sequences, torch.nn.functional.pad(mask, (0, NEW), value=1), torch.stack(out.logits, 1)


def described(cache: Any, tokens: Tensor, logits: Tensor) -> dict[str, Any]:
    """What is compared between processes."""
    ledger = cache.ledger()
    return {
        "tokens": tokens,
        "logits": logits,
        "held": list(held_columns(cache).values()),
        "total": ledger.total,
        "full": ledger.full,
        "ranks": cache.share.ranks,
    }


def run(model: Any, plan: str) -> dict[str, Any]:
    """Tokens, logits, kept sets and bytes of a padded batch under a plan."""
    cache, tokens, _, logits = begun(model, plan)
    return described(cache, tokens, logits)


def saved(model: Any, plan: str, path: Path) -> None:
    """Save a cache in the middle of an answer."""
    cache, tokens, mask, _ = begun(model, plan)
    cache.save(path)
    torch.save((tokens, mask), f"{path}.tokens")


def loaded(model: Any, path: Path) -> dict[str, Any]:
    """What comes of a cache that was saved, perhaps by another number of processes."""
    cache = kvtailor.load_cache(model, path)
    tokens, mask = torch.load(f"{path}.tokens")
    tokens, mask, logits = continued(model, cache, tokens, mask)
    return described(cache, tokens, logits)


def unbroken(model: Any, plan: str) -> dict[str, Any]:
    """The same without saving."""
    cache, tokens, mask, _ = begun(model, plan)
    tokens, mask, logits = continued(model, cache, tokens, mask)
    return described(cache, tokens, logits)


def compared(whole: dict[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What differs between one process and many."""
    sharded = parts[0]["ranks"] > 1

    def joined(held: list[Tensor]) -> Tensor:
        return torch.cat(held, 1) if sharded else held[0]

    kept = [
        torch.equal(joined([each["held"][layer] for each in parts]), due) for layer, due in enumerate(whole["held"])
    ]
    return {
        "tokens": all(torch.equal(each["tokens"], whole["tokens"]) for each in parts),
        "logits": max(float((each["logits"] - whole["logits"]).abs().max()) for each in parts),
        "kept": all(kept),
        "full": sum(each["full"] for each in parts) / whole["full"],
        "total": sum(each["total"] for each in parts) / whole["total"],
        "evicted": bool((whole["held"][0].sum(-1) < whole["held"][0].shape[-1] - 90).any()),
    }


def everywhere(work: Callable[[], Any]) -> tuple[list[Any], list[str]]:
    """What each process gets, and the errors."""
    try:
        mine: Any = work()
    except kvtailor.KvtailorError as error:
        mine = {"error": f"{type(error).__name__}: {error}"}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts, sorted({each["error"] for each in parts if each is not None and "error" in each})


def one(model: Any, reference: Any, plan: str) -> dict[str, Any]:
    """Run a plan everywhere, and compare in the first process."""
    parts, errors = everywhere(lambda: run(model, plan))
    if errors:
        return {"error": errors}
    return {} if dist.get_rank() else compared(run(reference, plan), parts)


def through_files(model: Any, reference: Any, plan: str, folder: Path, there: Path | None) -> dict[str, Any]:
    """Save and load between one process, these, and those of an earlier run that saved to `there`."""
    first = dist.get_rank() == 0
    folder.mkdir(parents=True, exist_ok=True)
    name = "".join(each if each.isalnum() else "_" for each in plan)
    ours, whole = folder / f"{name}.ranks", folder / f"{name}.whole"
    due = unbroken(reference, plan) if first else None
    _, errors = everywhere(lambda: saved(model, plan, ours))
    if first:
        saved(reference, plan, whole)
    dist.barrier()
    found: dict[str, Any] = {"errors": errors}
    sources = {"same": ours, "from_one": whole} | ({} if there is None else {"from_others": there / f"{name}.ranks"})
    for label, path in sources.items():
        parts, errors = everywhere(lambda path=path: loaded(model, path))
        found["errors"] += errors
        if first and due is not None and not errors:
            found[label] = compared(due, parts)
    if first and due is not None:
        try:
            found["in_one"] = compared(due, [loaded(reference, ours)])
        except kvtailor.KvtailorError as error:
            found["errors"].append(f"in one: {error}")
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="+", required=True)
    parser.add_argument("--plans", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--saved", type=Path, help="Save and load, here.")
    parser.add_argument("--saved-there", type=Path, help="Load what an earlier run saved, too.")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for family in given.families:
        folder = given.folder / family
        if dist.get_rank() == 0:
            save(family, folder)
        dist.barrier()
        model, reference = load(folder, tp_plan="auto"), load(folder) if dist.get_rank() == 0 else None
        for plan in given.plans:
            if given.saved is None:
                found = one(model, reference, plan)
            else:
                there = None if given.saved_there is None else given.saved_there / family
                found = through_files(model, reference, plan, given.saved / family, there)
            if dist.get_rank() == 0:
                print(json.dumps({"family": family, "plan": plan, **found}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
