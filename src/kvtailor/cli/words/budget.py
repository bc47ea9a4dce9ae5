"""What `show` and `check` print about a budget at a length: what is held then, and where it does nothing or little.

That is little where most layers keep a state or a window: then compression reaches a small share of the cache. Where a
plan's layers live elsewhere, it is also what comes in a step, and the arithmetic of its time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvtailor.cli.words.lines import say
from kvtailor.ops.sizes import byte_text

if TYPE_CHECKING:
    from kvtailor.hf.model.geometry import Geometry
    from kvtailor.hf.sizes.size import CacheSize
    from kvtailor.plan import Plan

__all__ = [
    "ELEMENT_SIZES",
    "HeldTokens",
    "Reach",
    "as_dict",
    "budget_notes",
    "element_of",
    "forecast",
    "holding",
    "reachable",
    "say_forecast",
    "say_holding",
    "say_reachable",
]

_STAGES = {
    "tail": "tokens in full precision, spare slots included",
    "encode": "segments: encoded tokens, their columns and tables",
    "store": "copies on the device of what is on another tier",
    "window": "the model's own sliding windows, with the plan or without",
    "state": "states of constant size, with the plan or without",
    "observe": "what the plan's methods remember of queries and attention",
    "attend": "what the attention carries along",
}
ELEMENT_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class HeldTokens:
    """What a cache holds of one row after a prompt, in tokens; and the bytes of their keys and values alone.

    The bytes of the whole cache are those of `hf.sizes.CacheSize`.

    Attributes:
        tokens_seen: of the prompt.
        tokens_held: per kv head of the compressed layers, on average over heads and layers.
        tokens_encoded: of them in the codec's form.
        tokens_full_precision: the rest, the newest where the plan has a lossy codec.
        bytes: of keys and values in the compressed layers, as if all groups of codes were full; positions, page
            indices, spare slots and evidence come on top.
        full_bytes: of keys and values without the plan, in all layers.
        window_bytes: of the model's own sliding windows, which no plan changes.
        state_bytes: of recurrent and convolution states, which no plan changes either and `full_bytes` has not; None
            where they are not known before a run.
    """

    tokens_seen: int
    tokens_held: int
    tokens_encoded: int
    tokens_full_precision: int
    bytes: int
    full_bytes: int
    window_bytes: int
    state_bytes: int | None


def element_of(config: Any, dtype: str | None) -> str:
    """The name of the cache's dtype: the given one, else the model's own, else float32."""
    own = str(config.get_text_config(decoder=True).dtype or "").removeprefix("torch.")
    return dtype or (own if own in ELEMENT_SIZES else "float32")


def _budget(plan: Plan, tokens: int, geometry: Geometry | None, element: int) -> int | None:
    """Tokens per kv head that a row of `tokens` may hold, on average; None where only a model's sizes tell."""
    import torch

    from kvtailor.engine.budget import CacheShape, count_total

    if plan.bytes is not None and geometry is None:
        return None
    shapes = [CacheShape(heads=1, key_size=1, value_size=1, element_size=element)]
    others = 0
    if geometry is not None:
        shapes = [
            CacheShape(heads=each.kv_heads, key_size=each.key_size, value_size=each.value_size, element_size=element)
            for each in geometry.compressed_shapes
        ]
        others = 0 if plan.bytes is None else geometry.other_bytes(element)
    seen = torch.tensor([tokens])
    total = count_total(plan, seen, layers=len(shapes), template=shapes[0], other_bytes=others, shapes=shapes)
    return int(total) // sum(shape.heads for shape in shapes)


def holding(plan: Plan, geometry: Geometry, element: int, size: CacheSize, own: int | None = None) -> HeldTokens:
    """What is held of one row of a prompt.

    Args:
        plan: whose cache it is.
        geometry: of the model.
        element: bytes of an element of the cache's dtype.
        size: of the cache after the prompt.
        own: bytes of an element of the model's own windows and states; None: as of the cache's.
    """
    from kvtailor.plan.arguments import with_nested
    from kvtailor.plan.registry import Codec

    shapes, tokens = geometry.compressed_shapes, size.context
    everything = geometry.full_bytes(1, tokens, element, own)
    copies = size.batch * sum(shape.kv_heads for shape in shapes)
    held = size.tokens.high // copies if copies else tokens
    recent = min(size.tail, held) if plan.encode.block else held
    encoded = sum(
        shape.kv_heads
        * plan.encode.mean_bytes_per_token(len(shapes), shape.key_size, shape.value_size, element, heads=shape.kv_heads)
        for shape in shapes
    )
    full = element * sum(shape.token_elements for shape in shapes)
    codes = (held - recent) * encoded
    if any(isinstance(each, Codec) and each.ages for each in with_nested(plan.encode)):
        # The price of a token depends on its age.
        codes = size.stages["encode"].middle / size.batch if "encode" in size.stages else 0
    return HeldTokens(
        tokens_seen=tokens,
        tokens_held=held,
        tokens_encoded=held - recent,
        tokens_full_precision=recent,
        bytes=round(codes + recent * full),
        full_bytes=everything,
        window_bytes=everything - full * tokens,
        state_bytes=geometry.state_bytes(own or element),
    )


def say_holding(plan: Plan, held: HeldTokens, size: CacheSize, grown: CacheSize) -> None:
    """Print what is held, in tokens and in bytes, and how it grows.

    Args:
        plan: whose cache it is.
        held: of one row.
        size: of the whole cache after the prompt.
        grown: the same some decoded tokens later.
    """
    rows = f"{size.batch} rows of {size.context} tokens" if size.batch > 1 else f"{size.context} tokens (one row)"
    upper = "at most " if plan.evicts and not plan.select.exact else ""
    say(
        f"after a prompt of {rows}, before any run: {upper}{held.tokens_held} of "
        f"{held.tokens_seen} tokens are held per kv head, on average"
    )
    if held.tokens_encoded and plan.encode.tail:
        say(f"  {held.tokens_encoded} encoded, the newest {held.tokens_full_precision} in full precision")
    elif plan.encode.block and not held.tokens_encoded:
        say("  none of them is encoded: the codec leaves so many of the newest in full precision")
    _say_bytes(held, size)
    if plan.bytes is not None and size.low > plan.bytes:
        say(
            f"  more than the {byte_text(plan.bytes)} of bytes=, which bound what an eviction leaves; what comes "
            "on top: docs/explanation/budgets.md"
        )
    slack = plan.slack_tokens
    if plan.evicts and slack is not None:
        say(f"  while decoding: cut back to the budget whenever more than {slack} tokens have come since the last cut")
    else:
        say("  while decoding: every new token is held as well")
    more = (grown.total - size.total) / grown.new_tokens
    about = "" if size.exact and grown.exact else "about "
    what = f"{byte_text(more)} more" if more >= 0 else f"{byte_text(-more)} less"
    say(f"  {about}{what} for each of the next {grown.new_tokens} decoded tokens, on average, in all rows")


def _say_bytes(held: HeldTokens, size: CacheSize) -> None:
    known = byte_text(size.total) if size.exact else f"{byte_text(size.low)} to {byte_text(size.high)}"
    about = "" if size.exact else "about "
    say(f"  the cache takes {known}, {about}{size.share:.3f} of the {byte_text(size.full)} of an uncompressed one")
    for stage, each in size.stages.items():
        amount = byte_text(each.low) if each.exact else f"{byte_text(each.low)} to {byte_text(each.high)}"
        say(f"    {stage:<8} {amount:<22} {_STAGES[stage]}")
    if held.state_bytes is None:
        say("    and recurrent states, whose bytes are not known before a run, with the plan or without")
    for reason in size.reasons:
        say(f"  not known before a run: {reason}")
    if size.uncut:
        say(f"  while the prompt is read, {byte_text(size.uncut)} of it wait uncompressed")


def as_dict(held: HeldTokens | None) -> dict[str, int] | None:
    """For JSON."""
    return None if held is None else asdict(held)


def budget_notes(plan: Plan, geometry: Geometry | None, element: int, tokens: int | None) -> list[str]:
    """Sentences about a budget that does nothing, or that leaves nothing to the score.

    Args:
        plan: whose budget it is.
        geometry: of the model that was named; None: of none.
        element: bytes of an element of the cache's dtype.
        tokens: the length that was given; None: the model's positions, where it has a number of them.
    """
    from kvtailor.engine.budget import describe_only_recent

    if plan.score is None or (geometry is not None and not geometry.compressed):
        return []
    recent = plan.score.recent
    length = tokens if tokens is not None or geometry is None else geometry.max_positions
    budget = None if length is None else _budget(plan, length, geometry, element)
    if plan.keep == 1.0 or (budget is not None and length is not None and budget >= length):
        what = f"the {length} tokens of the prompt" if tokens is not None else f"the {length} positions of the model"
        reason = "keep=1.0 is all of a prompt" if plan.keep == 1.0 else f"{_words(plan, budget)} is not below {what}"
        inexact = f"only what {_name(plan.select)} drops is evicted"
        return [f"{reason}: {'nothing will be evicted' if plan.select.exact else inexact}"]
    if not recent:
        return []
    if tokens is not None or plan.keep is None:
        # A number of tokens or of bytes is the same at any length.
        budget = _budget(plan, tokens or 1, geometry, element) if budget is None else budget
        low = budget is not None and budget <= recent
        cure = f"give more than {recent}, or the score a smaller window"
        return (
            [f"{describe_only_recent(seen=tokens, held=budget, recent=recent)}: {cure}"]
            if low and budget is not None
            else []
        )
    longest = _longest(plan.keep, recent)
    return [
        f"prompts of up to {longest} tokens: keep={plan.keep} of them is at most {recent} tokens per kv head, and the "
        "score always keeps so many of the newest: nothing but the newest is held, no first token (attention sink) and "
        "none that the score would choose"
    ]


def _longest(keep: float, recent: int) -> int:
    """The most tokens of a row of which `keep` is no more than `recent`, as `count_total` counts."""
    longest = int((recent + 1) / keep) + 2
    while int(longest * keep + 1e-6) > recent:
        longest -= 1
    return longest


def _words(plan: Plan, budget: int | None) -> str:
    if plan.tokens is not None:
        return f"tokens={plan.tokens}"
    given = "bytes=" if plan.bytes is not None else "the attention's budget"
    return f"{given} ({budget} tokens per kv head)"


def _name(method: object) -> str:
    from kvtailor.plan import registry

    return registry.name_of(method)


# The length that is shown where neither the user nor the configuration names one.
_TOKENS = 32_768


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Bytes of one row without a plan.

    Attributes:
        tokens: that the row has seen.
        compressed: of keys and values that a plan compresses.
        windows: of the model's own sliding windows.
        states: of constant size; None where they are not known before a run.
    """

    tokens: int
    compressed: int
    windows: int
    states: int | None

    @property
    def share(self) -> float | None:
        """Part of all bytes that a plan can make smaller; None where that is not known."""
        total = None if self.states is None else self.compressed + self.windows + self.states
        return self.compressed / total if total else None


def reachable(geometry: Geometry, element: int, tokens: int | None) -> Reach:
    """Return what a row of a model's cache takes.

    Args:
        geometry: of the model.
        element: bytes of an element of the cache's dtype.
        tokens: that the row has seen; None: the model's positions.
    """
    seen = tokens or geometry.max_positions or _TOKENS
    compressed = element * seen * sum(shape.token_elements for shape in geometry.compressed_shapes)
    return Reach(
        tokens=seen,
        compressed=compressed,
        windows=geometry.full_bytes(1, seen, element) - compressed,
        states=geometry.state_bytes(element),
    )


def say_reachable(reach: Reach) -> list[str]:
    """The same as sentences; none where all of the cache is within reach."""
    from kvtailor.ops.sizes import byte_text

    if not reach.windows and reach.states == 0:
        return []
    own = [f"{byte_text(reach.windows)} in windows of the model's own"] if reach.windows else []
    if reach.states is None:
        own.append("states whose bytes are not known before a run")
    elif reach.states:
        own.append(f"{byte_text(reach.states)} in states of constant size")
    share = "" if reach.share is None else f": compression reaches {reach.share:.1%} of the cache"
    if reach.share:
        share += f", and no plan makes all of it more than {1 / (1 - reach.share):.3g} times smaller"
    return [
        f"at {reach.tokens} tokens a row takes {byte_text(reach.compressed)} of keys and values that a plan "
        f"compresses, and {' and '.join(own)}{share}"
    ]


def forecast(
    plan: Plan,
    sizes: dict[str, Any],
    cost: dict[str, Any],
    held: HeldTokens,
    *,
    rows: int = 1,
    rate: int | None,
    step_seconds: float | None,
) -> dict[str, Any]:
    """The bytes of a step, and its predicted time as the plan is and with the layers that had best stay.

    Args:
        plan: whose placement lets layers leave.
        sizes: of the model, with `compressed_layers` and `kv_heads`.
        cost: closed-form bytes of a token, see `show`.
        held: of one row of the prompt; what is in full precision never leaves the device.
        rows: of the batch, all as long.
        rate: bytes per second of the link; None: not known, and neither is any time of it. Where the placement packs
            what it moves, the bytes on the link are not known before, and no time is.
        step_seconds: that the model takes for a step if everything is resident; None: not known.
    """
    from kvtailor.store.residency import forecast_transfers
    from kvtailor.store.residency import step_seconds as predicted

    layers = sizes["compressed_layers"]
    groups = plan.encode.layer_groups(layers)
    of_layer = cost["bytes_per_token_and_kv_head"] * sizes["kv_heads"] * held.tokens_encoded * rows
    each = [round(len(group) * of_layer) for group in groups]
    stay = plan.store.open(groups).stays(each)
    moved = sum(size for unit, size in enumerate(each) if unit not in stay)
    found: dict[str, Any] = {
        "tokens": held.tokens_seen,
        "bytes_resident": held.bytes * rows - moved,
        "bytes_moved": moved,
        "bytes_on_link": moved,
        "link_seconds": None if rate is None else moved / rate,
        "compute_seconds": step_seconds,
        "step_seconds": None,
        "best_resident": None,
        "best_step_seconds": None,
    }
    if moved and plan.store.makes_smaller:
        # How much smaller depends on what the tokens are, and inflating takes a time of its own.
        return found | {"bytes_on_link": None, "link_seconds": None}
    if rate is None or step_seconds is None:
        return found
    compute = [step_seconds * len(group) / layers for group in groups]
    best = forecast_transfers(each, rate=rate, compute=compute, most_bytes=sum(each[unit] for unit in stay))
    return found | {
        "step_seconds": predicted(each, stay, rate=rate, compute=compute),
        "best_resident": list(best.resident),
        "best_step_seconds": best.step_seconds,
    }


def say_forecast(found: dict[str, Any]) -> None:
    """The same in lines; none where nothing lives elsewhere."""
    from kvtailor.ops.sizes import byte_text

    if not found["bytes_moved"]:
        return
    stay, come = byte_text(found["bytes_resident"]), byte_text(found["bytes_moved"])
    say(f"  {stay} of keys and values stay on the device, {come} come in each step")
    if found["bytes_on_link"] is None:
        say("  packed, they are fewer on the link; how many is known once they are written, so no time is predicted")
    link, compute = found["link_seconds"], found["compute_seconds"]
    if link is not None:
        say(f"  the link alone takes {1e3 * link:.2f} ms for them, at the rate that you gave")
    if found["step_seconds"] is None or compute is None:
        return
    say(f"  predicted step {1e3 * found['step_seconds']:.2f} ms, of which {1e3 * compute:.2f} ms compute, as you gave")
    resident = ", ".join(map(str, found["best_resident"])) or "none"
    say(f"  best for as many bytes: {1e3 * found['best_step_seconds']:.2f} ms; resident: {resident}")
