"""What `show` says of a plan whose layers live elsewhere: the arithmetic of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from kvtailor.plan import Plan

__all__ = ["forecast", "say_forecast"]


def forecast(
    plan: Plan, sizes: dict[str, Any], bytes_per_token: float, *, tokens: int, rate: int, step_seconds: float
) -> dict[str, Any]:
    """The predicted step of a plan as it is, and with the set that is best for the bytes that it lets stay.

    Args:
        plan: whose placement lets layers leave.
        sizes: of the model, with `compressed_layers` and `kv_heads`.
        bytes_per_token: of one kv head, encoded.
        tokens: held by each kv head.
        rate: bytes per second of the link.
        step_seconds: that the model takes for a step if everything is resident.
    """
    from kvtailor.store.outlook import outlook
    from kvtailor.store.outlook import step_seconds as predicted

    layers = sizes["compressed_layers"]
    groups = plan.encode.layers_together(layers)
    each = [round(len(group) * bytes_per_token * sizes["kv_heads"] * tokens) for group in groups]
    compute = [step_seconds * len(group) / layers for group in groups]
    stay = plan.store.open(groups).stays(each)
    best = outlook(each, rate=rate, compute=compute, most_bytes=sum(each[unit] for unit in stay))
    moved = sum(size for unit, size in enumerate(each) if unit not in stay)
    return {
        "tokens": tokens,
        "bytes_resident": sum(each) - moved,
        "bytes_moved": moved,
        "step_seconds": predicted(each, stay, rate=rate, compute=compute),
        "compute_seconds": step_seconds,
        "link_seconds": moved / rate,
        "best_resident": list(best.resident),
        "best_step_seconds": best.step_seconds,
    }


def say_forecast(found: dict[str, Any]) -> None:
    """The same in lines."""
    step, compute, link = (1e3 * found[f"{name}_seconds"] for name in ("step", "compute", "link"))
    stay, come = found["bytes_resident"], found["bytes_moved"]
    click.echo(f"at {found['tokens']} tokens: {stay} bytes stay on the device, {come} come in each step")
    click.echo(f"  predicted step {step:.2f} ms: {compute:.2f} ms of computing, {link:.2f} ms of the link alone")
    best, resident = 1e3 * found["best_step_seconds"], ", ".join(map(str, found["best_resident"])) or "none"
    click.echo(f"  best for as many bytes: {best:.2f} ms; resident: {resident}")
