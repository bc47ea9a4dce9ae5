"""What ATSKV's file says of its worth: worked by hand from made-up intervals."""

from __future__ import annotations

from kvtailor.calibration.relevance import sentence


def found(value: float, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high, "count": 3}


def both(narrow: dict, wide: dict) -> dict:
    return {"against snapkv(kernel=5)": narrow, "against snapkv(kernel=21)": wide}


def test_each_rival_has_its_own_words() -> None:
    """More attention is better and fewer nats are; one interval on the wrong side is enough for a no."""
    kept = both({"difference": found(0.021, 0.01, 0.03)}, {"difference": found(0.02, -0.01, 0.05)})
    attention = {"kept_attention": {"0.25": kept, "0.1": kept}}
    text = {
        "0.25": both(found(-0.03, -0.06, -0.01), found(0.02, -0.01, 0.05)),
        "0.1": both(found(-0.03, -0.06, 0.01), found(0.03, 0.01, 0.05)),
    }
    narrow, wide = sentence(attention, {"text": text}).split(". beats ")
    assert narrow == (
        "beats its SnapKV feature on held-out text: in part; future attention kept, points: yes, "
        "+2.1 (+1.0 to +3.0) at keep=0.25, +2.1 (+1.0 to +3.0) at keep=0.1; nats of text: not told apart, "
        "-0.030 (-0.060 to -0.010) at keep=0.25, -0.030 (-0.060 to +0.010) at keep=0.1"
    )
    assert wide == (
        "snapkv(kernel=21): no; future attention kept, points: not told apart, +2.0 (-1.0 to +5.0) at keep=0.25, "
        "+2.0 (-1.0 to +5.0) at keep=0.1; nats of text: no, +0.020 (-0.010 to +0.050) at keep=0.25, "
        "+0.030 (+0.010 to +0.050) at keep=0.1"
    )


def test_too_few_samples_for_an_interval_are_no_gain() -> None:
    kept = both({"difference": found(0.5, None, None)}, {"difference": found(0.5, None, None)})
    said = sentence({"kept_attention": {"0.25": kept, "0.1": kept}}, {})
    assert said.startswith("beats its SnapKV feature on held-out text: no; future attention kept, points: not told")
    assert "+50.0 (3 samples) at keep=0.25" in said
