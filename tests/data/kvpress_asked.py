"""What `kvpress_record.py` asks of kvpress: presses in kvpress's own words, on the geometries of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One case.

    Attributes:
        tokens: budgets per kv head, one kept set for each.
        ratio: given where a fraction of tokens would change what the press computes; the one budget is its result.
        scores: the scores are recorded.
        returned_keys: so are the keys of the last kv head of row 0, as the press returns them.
        given: what kvpress would have downloaded or tokenized: tokens of KVzip's instruction to repeat, sinks and
            recents of DuoAttention's streaming heads, tokens of Finch's question.
    """

    name: str
    press: str
    geometry: str
    tokens: tuple[int, ...]
    settings: Mapping[str, Any]
    ratio: float | None = None
    scores: bool = False
    returned_keys: bool = False
    given: Mapping[str, int] = field(default_factory=dict)


def inner(press: str, /, **settings: Any) -> dict[str, Any]:
    return {"press": press, "settings": settings}


def alone(name: str, press: str, geometry: str, /, *tokens: int, **settings: Any) -> Asked:
    """A scorer by itself; with its scores where one layer is recorded, to keep the file small."""
    scores = geometry != "two-layers"
    return Asked(name=name, press=press, geometry=geometry, tokens=tokens, settings=settings, scores=scores)


def around(name: str, press: str, geometry: str, /, *tokens: int, **settings: Any) -> Asked:
    """A press around another, whose own scores say nothing."""
    return Asked(name=name, press=press, geometry=geometry, tokens=tokens, settings=settings)


def lag(name: str, geometry: str, /, *tokens: int, **settings: Any) -> Asked:
    """LagKV ties by design: budgets are chosen such that whole ranks stay or go."""
    return alone(name, "LagKVPress", geometry, *tokens, **settings)


def gated(name: str, geometry: str, /, *tokens: int, **settings: Any) -> Asked:
    return around(name, "EntropyGatedChunkKVPress", geometry, *tokens, **settings)


COMPACTOR = {"sink_size_start": 2, "sink_size_end": 1, "blending": 1.5}
GATES = {"chunk_length": 7, "low_entropy_chunk_length": 2}
SNAPS = [
    alone(f"snapkv w{window} k{kernel} {where}", "SnapKVPress", where, *tokens, window_size=window, kernel_size=kernel)
    for window, kernel, where, tokens in (
        (8, 5, "two-rows", (9, 20, 40)),
        (16, 7, "two-rows", (20, 40)),
        (1, 1, "two-rows", (2, 20, 40)),
        (32, 3, "three-heads", (40, 80)),
        (8, 5, "three-heads", (20, 60)),
        (64, 5, "one-head", (80, 150)),
        (8, 7, "ungrouped", (16, 32)),
    )
]
SNAP = inner("SnapKVPress", window_size=8, kernel_size=5)
HEAVY = inner("ObservedAttentionPress")

CASES = [
    alone("knorm two-rows", "KnormPress", "two-rows", 1, 20, 40),
    alone("knorm three-heads", "KnormPress", "three-heads", 30, 90),
    alone("keydiff two-rows", "KeyDiffPress", "two-rows", 1, 20, 40),
    alone("keydiff three-heads", "KeyDiffPress", "three-heads", 30, 90),
    lag("lagkv s4 l16 two-rows", "two-rows", 41, 51, n_sink=4, lag_size=16),
    lag("lagkv s4 l32 three-heads", "three-heads", 65, 89, n_sink=4, lag_size=32),
    lag("lagkv s0 l64 two-layers", "two-layers", 112, n_sink=0, lag_size=64),
    lag("lagkv s4 l128 one-head", "one-head", 212, n_sink=4, lag_size=128),
    lag("lagkv s4 l128 too short", "two-layers", 60, n_sink=4, lag_size=128),
    alone("tova two-rows", "TOVAPress", "two-rows", 2, 20, 40),
    alone("tova one-head", "TOVAPress", "one-head", 20, 150),
    *SNAPS,
    alone("h2o two-rows", "ObservedAttentionPress", "two-rows", 1, 20, 40),
    alone("h2o three-heads", "ObservedAttentionPress", "three-heads", 30, 90),
    alone("h2o ungrouped", "ObservedAttentionPress", "ungrouped", 10, 30),
    alone("streaming s4 two-rows", "StreamingLLMPress", "two-rows", 5, 20, 40, n_sink=4),
    alone("streaming s1 three-heads", "StreamingLLMPress", "three-heads", 30, n_sink=1),
    alone("expected two-rows", "ExpectedAttentionPress", "two-rows", 5, 20, 40),
    alone("expected f64 e0.02", "ExpectedAttentionPress", "three-heads", 30, 90, n_future_positions=64, epsilon=0.02),
    alone(
        "expected mean only",
        "ExpectedAttentionPress",
        "ungrouped",
        *(10, 30),
        n_future_positions=16,
        n_sink=2,
        use_covariance=False,
        use_vnorm=False,
    ),
    # Chunks that divide the text: of a shorter last chunk kvpress 0.5.5 lets the missing tokens take part.
    alone("noncausal c9 two-rows", "NonCausalAttnPress", "two-rows", 10, 33, chunk_size=9),
    alone("noncausal c100 one-head", "NonCausalAttnPress", "one-head", 40, 170, chunk_size=100),
    alone("noncausal c13 ungrouped", "NonCausalAttnPress", "ungrouped", 7, 29, chunk_size=13),
    # The sketch is wider than a key, so that what it draws decides nothing.
    alone("leverage two-rows", "LeverageScorePress", "two-rows", 5, 27),
    alone("leverage three-heads", "LeverageScorePress", "three-heads", 21, 100),
    alone("leverage two-layers", "LeverageScorePress", "two-layers", 33, 150),
    alone("compactor c25 three-heads", "CompactorPress", "three-heads", 25, 77, chunk_size=25, blending=0.35),
    alone("compactor s2 r1 ungrouped", "CompactorPress", "ungrouped", 16, 40, chunk_size=31, **COMPACTOR),
    Asked(
        name="compactor by ratio",
        press="CompactorPress",
        geometry="two-layers",
        tokens=(80,),
        ratio=0.6,
        settings={"chunk_size": 47},
    ),
    alone("cur two-rows", "CURPress", "two-rows", 9, 31),
    alone("cur w7 mean three-heads", "CURPress", "three-heads", 35, 90, leverage_type="kv_avg", local_window_size=7),
    alone("cur whole keys", "CURPress", "one-head", 50, leverage_type="key", use_local_approximation=False),
    alone("cur values two-layers", "CURPress", "two-layers", 45, 160, leverage_type="value", num_sinks=2),
    alone("capkv two-rows", "CapPress", "two-rows", 8, 30),
    alone("capkv t2 f64 three-heads", "CapPress", "three-heads", 28, 95, tau=2.0, n_future_positions=64, n_sink=2),
    alone("capkv ungrouped", "CapPress", "ungrouped", 11, 37),
    *(
        Asked(
            name=f"finch w{window} {where}{'' if normalised else ' plain'}",
            press="FinchPress",
            geometry=where,
            tokens=tokens,
            settings={"normalize_scores": normalised, "rerotate_keys": False},
            given={"question": window},
            scores=True,
        )
        for window, where, tokens, normalised in (
            (7, "two-rows", (9, 28), True),
            (19, "three-heads", (24, 88), True),
            (19, "three-heads", (41,), False),
            (5, "ungrouped", (9, 33), True),
        )
    ),
    alone("qfilters two-layers", "QFilterPress", "two-layers", 20, 100),
    alone("critical h2o two-rows", "CriticalKVPress", "two-rows", 20, press=HEAVY),
    alone("critical h2o first 0.25", "CriticalKVPress", "three-heads", 40, press=HEAVY, first_stage_ratio=0.25),
    alone("critical snapkv three-heads", "CriticalKVPress", "three-heads", 40, press=SNAP),
    around("criticalada h2o three-heads", "CriticalAdaKVPress", "three-heads", 40, press=HEAVY),
    around("criticalada snapkv three-heads", "CriticalAdaKVPress", "three-heads", 40, press=SNAP),
    around("adakv snapkv a0.2", "AdaKVPress", "three-heads", 40, press=SNAP, alpha_safeguard=0.2),
    around("adakv snapkv a0.9", "AdaKVPress", "three-heads", 40, press=SNAP, alpha_safeguard=0.9),
    around("adakv h2o a0.2", "AdaKVPress", "two-layers", 20, 50, press=HEAVY, alpha_safeguard=0.2),
    around("adakv h2o a0.9", "AdaKVPress", "two-rows", 20, 40, press=HEAVY, alpha_safeguard=0.9),
    around(
        "adakv lagkv cross", "AdaKVPress", "two-rows", 45, press=inner("LagKVPress", lag_size=16, cross_scoring=True)
    ),
    Asked(
        name="pyramid snapkv",
        press="PyramidKVPress",
        geometry="two-layers",
        tokens=(80,),
        ratio=0.6,
        settings={"window_size": 8, "kernel_size": 5, "beta": 2},
    ),
    around(
        "chunks l20 knorm one-head", "ChunkKVPress", "one-head", 100, 200, press=inner("KnormPress"), chunk_length=20
    ),
    around("chunks l10 snapkv one-head", "ChunkKVPress", "one-head", 60, press=SNAP, chunk_length=10),
    gated("gated l10 knorm one-head", "one-head", 60, 171, press=inner("KnormPress")),
    gated("gated l7 s2 keydiff ungrouped", "ungrouped", 15, 38, press=inner("KeyDiffPress"), **GATES),
    gated("gated l10 capkv three-heads", "three-heads", 29, 81, press=inner("CapPress", n_sink=0)),
    around("chunks l20 three-heads", "ChunkKVPress", "three-heads", 60, 120, press=SNAP, chunk_length=20),
    *(
        Asked(
            name=f"kvzip {'per layer' if layerwise else 'all layers'} c{chunk}",
            press="KVzipPress",
            geometry="two-layers",
            tokens=(60,),
            ratio=0.7,
            settings={"layerwise": layerwise, "n_sink": 4, "chunk_size": chunk},
            scores=layerwise,
            given={"instruction": 5},
        )
        for layerwise, chunk in ((False, 2048), (True, 2048), (False, 100))
    ),
    around(
        "lukv expected",
        "LUKVPress",
        "two-layers",
        60,
        100,
        press=inner("ExpectedAttentionPress", epsilon=0.02),
        sink=4,
        window=0,
    ),
    *(
        Asked(
            name=f"kvcompose {'layers' if structured else 'heads'}",
            press="KVComposePress",
            geometry="two-layers",
            tokens=(60,),
            ratio=0.7,
            settings={"structured": structured},
            scores=structured,
            given={"instruction": 5},
        )
        for structured in (True, False)
    ),
    around(
        "dms knorm", "DMSPress", "three-heads", 0, press=inner("KnormPress"), threshold=-5.0, sliding_window_size=16
    ),
    Asked(
        name="duo half",
        press="DuoAttentionPress",
        geometry="two-layers",
        tokens=(0,),
        settings={"head_compression_ratio": 0.5},
        given={"sinks": 4, "recents": 16},
    ),
    Asked(
        name="rolling s4 two-rows",
        press="KeyRerotationPress",
        geometry="two-rows",
        tokens=(20,),
        settings={"press": inner("StreamingLLMPress", n_sink=4)},
        returned_keys=True,
    ),
]

# Layers, tokens of the prompt, window, beta, fraction that goes.
PYRAMIDS = [
    (2, 200, 4, 20, 0.5),
    (5, 400, 8, 20, 0.5),
    (4, 1000, 4, 20, 0.88),
    (8, 1000, 8, 20, 0.7),
    (3, 500, 8, 5, 0.6),
    (4, 400, 16, 20, 0.4),
    (7, 300, 8, 20, 0.25),
    (6, 240, 8, 1, 0.5),
    (2, 63, 8, 20, 0.5),
    (2, 63, 8, 20, 0.75),
]
