"""What `show` prints about a plan whose layers live elsewhere: what comes in a step, and the arithmetic of its time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtailor.cli.words.lines import say

if TYPE_CHECKING:
    from kvtailor.cli.words.budget import Holding
    from kvtailor.plan import Plan

__all__ = ["forecast", "say_forecast"]


def forecast(
    plan: Plan,
    sizes: dict[str, Any],
    cost: dict[str, Any],
    held: Holding,
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
    from kvtailor.store.offload.transfer_model import forecast_transfers
    from kvtailor.store.offload.transfer_model import step_seconds as predicted

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
    from kvtailor.bench.report.words import byte_text

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
