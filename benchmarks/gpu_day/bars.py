"""The bars: what the project asks of a GPU, point by point, and where each is read from.

The words are those of `specs/performance.md`, section 4. One bar has several points, since it names several lengths
and batches. A point that no step measures is null, with the reason; it stays here so that no bar is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_day.readings import Reading, Readings, extra_peak, field, linked, packed, ratio, share_of_floor

__all__ = ["BARS", "Point"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One number that a bar asks for.

    Attributes:
        bar: such as "G1".
        asks: what the number is, and where.
        at_least, at_most: what it must be; both None: it stands there beside the others, and is no bar.
        read: finds it; None: nothing measures it.
        reason: why nothing does.
    """

    bar: str
    asks: str
    at_least: float | None = None
    at_most: float | None = None
    read: Reading | None = None
    reason: str = ""

    def measured(self, found: Readings) -> float | None:
        """The number; None where it was not measured."""
        return None if self.read is None else self.read(found)

    def met(self, found: Readings) -> bool | None:
        """Whether it is what the bar asks for; None where it was not measured, or where this is no bar."""
        value = self.measured(found)
        if value is None or (self.at_least is None and self.at_most is None):
            return None
        low, high = self.at_least, self.at_most
        return (low is None or value >= low) and (high is None or value <= high)


_READ, _BF16 = "a plain read of the bfloat16 bytes", "kvtailor bfloat16"
_SDPA = ("sdpa, heads folded", "sdpa as transformers calls it")
_KIVI4, _INT4, _INT8, _KIVI2 = "kvtailor kivi 4 bits", "kvtailor int4", "kvtailor int8", "kvtailor kivi 2 bits"
_GROUPED, _SINGLE = "grouped heads, 32 on 8", "single heads, 32 on 32"
_OWN = "DynamicCache + sdpa"
_8B, _7B = "random-llama3-8b", "random-llama2-7b"
_FORMS = ("reference", "triton")
_KIVI_PLAN, _INT4_PLAN = "kivi(bits=4, group=64, recent=128)", "vector(bits=4)"
_SNAPKV, _H2O, _STREAMING = "snapkv @ keep=0.25", "h2o @ keep=0.25", "streaming @ keep=0.25"


def _kernels(heads: str, tokens: int, rows: int = 1) -> str:
    return f"{heads}, {tokens} tokens" + (f", {rows} rows" if rows > 1 else "")


def _decode(model: str, tokens: int, rows: int) -> str:
    return f"decode {model} {tokens} tokens {rows} rows"


def _replayed(plan: str) -> tuple[str, ...]:
    return tuple(f"{plan}, {form}, graphs" for form in _FORMS)


def _either(plan: str) -> tuple[str, ...]:
    return tuple(f"{plan}, {form}" for form in _FORMS)


def _over_full(model: str, tokens: int, rows: int, plan: str) -> Reading:
    """Tokens per second of a plan over those of the faster `full`, both replayed."""
    return ratio(_decode(model, tokens, rows), _replayed("full"), _replayed(plan))


def _over_prompt(tokens: int, plan: str) -> Reading:
    return ratio(f"prompt {_8B} {tokens} tokens", _either(plan), _either("full"))


def _g() -> list[Point]:
    found = []
    for heads, tokens, rows in ((_GROUPED, 32768, 1), (_GROUPED, 32768, 8), (_SINGLE, 32768, 1), (_GROUPED, 131072, 1)):
        table = _kernels(heads, tokens, rows)
        found.append(
            Point(
                bar="G1",
                asks=f"bfloat16 kernel, share of a plain read; {table}",
                at_least=0.85,
                read=ratio(table, _READ, _BF16),
            )
        )
    found.append(
        Point(
            bar="G1",
            asks="bfloat16 kernel over FlashInfer or FlashAttention, where installed",
            at_least=0.95,
            reason="neither is on the machine",
        )
    )
    least = ((4096, 1, 1.0), (32768, 1, 1.8), (32768, 8, 2.3), (131072, 1, 2.3))
    for side, of in ((_KIVI4, "4 bits, groups of 64"), (_INT4, "4 bits by token")):
        for heads in (_GROUPED, _SINGLE):
            for tokens, rows, bar in least:
                table = _kernels(heads, tokens, rows)
                found.append(
                    Point(
                        bar="G2",
                        asks=f"times faster than torch's attention, {of}; {table}",
                        at_least=bar,
                        read=ratio(table, _SDPA, side),
                    )
                )
    at = _kernels(_GROUPED, 32768, 8)
    quest = "Quest's pages, {} tokens"
    packing = "packing, 32768 tokens"
    return [
        *found,
        Point(bar="G3", asks=f"the same, int8; {at}", at_least=1.6, read=ratio(at, _SDPA, _INT8)),
        Point(bar="G4", asks=f"the same, 2 bits; {at}", at_least=3.0, read=ratio(at, _SDPA, _KIVI2)),
        Point(
            bar="G5",
            asks=f"times faster than decoding first, 4 bits; {at}",
            at_least=6.0,
            read=ratio(at, "decoded first, kivi 4 bits", _KIVI4),
        ),
        Point(
            bar="G6",
            asks="Quest with scoring over everything, 32k, 2,048 tokens, 8 rows",
            at_least=4.0,
            reason="the bench has one row",
        ),
        Point(
            bar="G6",
            asks="the same, one row, launched by the host",
            read=ratio(quest.format(32768), "everything, bfloat16", "quest, 2048 tokens"),
        ),
        Point(
            bar="G6",
            asks="its pages alone, one row",
            read=ratio(quest.format(32768), "everything, bfloat16", "2048 tokens of pages"),
        ),
        Point(
            bar="G6",
            asks="Quest with scoring over everything, 128k, one row",
            at_least=10.0,
            read=ratio(quest.format(131072), "everything, bfloat16", "quest, 2048 tokens"),
        ),
        Point(
            bar="G7",
            asks="ragged heads over uniform ones, 32k",
            at_most=1.15,
            read=ratio("ragged heads, 32768 tokens", "ragged heads, bfloat16", "uniform heads, bfloat16"),
        ),
        Point(
            bar="G8",
            asks="appending a token over attention, 32k",
            at_most=0.05,
            read=ratio("appending, 32768 tokens", "a token into its slot", "attention, bfloat16"),
        ),
        Point(bar="G8", asks="copies of the whole cache", at_most=0, reason="no step traces the allocator"),
        *(
            Point(
                bar="E7",
                asks=f"making codes, {side}: share of a copy's bytes a second",
                at_least=0.7,
                read=packed(packing, side),
            )
            for side in ("int8 by token", "4 bits by token", "4 bits by channel")
        ),
    ]


def _e() -> list[Point]:
    at = _decode(_8B, 8192, 1)
    found = [
        Point(
            bar="E1",
            asks="full replayed, share of the read floor; 8B, 8k",
            at_least=0.75,
            read=share_of_floor(at, _replayed("full")),
        ),
        Point(
            bar="E1",
            asks="full replayed, times faster than DynamicCache; 8B, 8k",
            at_least=2.5,
            read=ratio(at, _OWN, _replayed("full")),
        ),
        Point(
            bar="E1",
            asks="full launched by the host, times faster than DynamicCache; 8B, 8k",
            read=ratio(at, _OWN, _either("full")),
        ),
    ]
    points = ((_8B, 8192, 1, 0.97), (_8B, 131072, 1, 1.35), (_8B, 32768, 8, 1.5), (_7B, 32768, 1, 1.35))
    for plan in (_KIVI_PLAN, _INT4_PLAN):
        for model, tokens, rows, bar in points:
            found.append(
                Point(
                    bar="E2",
                    asks=f"{plan} over full; {model}, {tokens} tokens, {rows} rows",
                    at_least=bar,
                    read=_over_full(model, tokens, rows, plan),
                )
            )
    more = _decode(_8B, 32768, 8)
    return [
        *found,
        Point(
            bar="E2",
            asks="4 bits over full; 8B, 32k, 32 rows",
            at_least=1.9,
            reason="full takes 137 GB beside 16 GB of weights, more than the machine has",
        ),
        Point(bar="E3", asks=f"{_SNAPKV} over full; 7B, 32k", at_least=1.59, read=_over_full(_7B, 32768, 1, _SNAPKV)),
        Point(
            bar="E3",
            asks="eviction to a quarter over full; 7B, 32k, 8 rows",
            at_least=2.7,
            reason="full takes 137 GB beside 13 GB of weights, more than the machine has",
        ),
        Point(
            bar="E3",
            asks=f"{_SNAPKV} over full; 8B, 32k, 8 rows",
            read=ratio(more, _replayed("full"), _replayed(_SNAPKV)),
        ),
        Point(
            bar="E4",
            asks="times faster than transformers' QuantizedCache, 32k",
            at_least=3.0,
            reason="its libraries, hqq and quanto, are not on the machine",
        ),
        *(
            Point(
                bar="E4",
                asks=f"bytes of {plan} over full, by the allocator; 8B, 32k",
                at_most=0.31,
                read=_over_bytes(plan),
            )
            for plan in (_KIVI_PLAN, _INT4_PLAN)
        ),
        Point(bar="E5", asks="rows that fit, 4 bits over full, 32k", at_least=3.0, reason="no step fills the memory"),
        Point(
            bar="E5", asks="tokens a second at those rows, over full", at_least=2.0, reason="no step fills the memory"
        ),
        *(
            Point(
                bar="E6",
                asks=f"a prompt under {plan} over full; 8B, {tokens} tokens",
                at_most=bar,
                read=_over_prompt(tokens, plan),
            )
            for plan, bar in ((_SNAPKV, 1.02), (_KIVI_PLAN, 1.01), (_STREAMING, 1.05))
            for tokens in (8192, 32768)
        ),
        Point(
            bar="E6",
            asks=f"a prompt under {_INT4_PLAN} over full; 8B, 8192 tokens",
            at_most=1.01,
            read=_over_prompt(8192, _INT4_PLAN),
        ),
        *(
            Point(
                bar="E6",
                asks=f"a prompt under {_H2O} over full; 8B, {tokens} tokens",
                at_most=bar,
                read=_over_prompt(tokens, _H2O),
            )
            for tokens, bar in ((8192, 1.12), (32768, 1.25))
        ),
        *(
            Point(
                bar="E6",
                asks=f"MB for each 1,000 tokens at the peak of {_H2O} above full; {tokens} tokens",
                at_most=1.0,
                read=extra_peak(f"prompt {_8B} {tokens} tokens", f"{_H2O}, triton", "full, triton", tokens),
            )
            for tokens in (8192, 32768)
        ),
        *_e8(),
        Point(
            bar="E9",
            asks="share of rounds whose tokens a greedy draft left as they were (demo, drafts by eviction)",
            at_least=1.0,
            read=field("speculation", "full", "identical"),
        ),
        Point(
            bar="E9",
            asks="self-speculation over plain decoding; 7B, 32k",
            at_least=1.15,
            reason="random weights accept by chance, and no trained model of that size is there",
        ),
        Point(bar="E9", asks="the same with a small draft", at_least=1.8, reason="as above"),
    ]


def _over_bytes(plan: str) -> Reading:
    def read(found: Readings) -> float | None:
        mine, full = (field("memory", name, "bytes_resident")(found) for name in (plan, "full"))
        return None if mine is None or not full else mine / full

    return read


def _e8() -> list[Point]:
    found = []
    for codec in ("plain(block_size=1024)", "vector(bits=8)", "kivi(bits=4, group=64, recent=128)"):
        found += [
            Point(
                bar="E8",
                asks=f"share of a bare copy's rate, nothing stays; {codec}, 32k",
                at_least=0.85,
                read=linked(32768, codec, "nothing", "share_of_link"),
            ),
            Point(
                bar="E8",
                asks=f"share of the longer of link and model, nothing stays; {codec}, 32k",
                at_least=0.85,
                read=linked(32768, codec, "nothing", "share_of_floor"),
            ),
            Point(
                bar="E8",
                asks=f"the same, two layers stay; {codec}, 32k",
                at_least=0.9,
                read=linked(32768, codec, "resident_layers=2", "share_of_floor"),
            ),
            Point(
                bar="E8",
                asks=f"seconds of a token with everything resident; {codec}, 32k",
                read=linked(32768, codec, "nothing", "resident_seconds"),
            ),
        ]
    return [
        *found,
        Point(
            bar="E8",
            asks="bytes to the host a token, over those of the new token",
            at_most=1.1,
            reason="the bench counts what comes back alone",
        ),
        Point(bar="E8", asks="int8 over transformers' offloaded cache", at_least=1.8, reason="it is no side yet"),
        Point(bar="E8", asks="4 bits over transformers' offloaded cache", at_least=3.0, reason="it is no side yet"),
    ]


def _host() -> list[Point]:
    """The goals of the host, which no section 4 has: what a plan takes where arithmetic is nothing."""
    plain = ("full", "snapkv @ tokens=128")
    small = ("snapkv + adakv @ tokens=128", "vector(bits=8)", "kivi(bits=4, group=32, recent=32)")
    return [
        Point(
            bar="host",
            asks=f"a token of {plan} over DynamicCache, no arithmetic",
            at_most=bar,
            read=ratio("host", plan, _OWN),
        )
        for plans, bar in ((plain, 1.08), (small, 1.20))
        for plan in plans
    ]


def _cpu() -> list[Point]:
    reason = "a bar of CPUs: `python -m benchmarks.micro kernels` there, and LOG.md"
    asks = {
        "C1": "bfloat16 kernel: 0.75 of a read, 3 times the best of torch",
        "C2": "int8 over bfloat16: 1.35 times, 1.65 with single heads",
        "C3": "4 bits over bfloat16: 1.7 times, 2.2 with single heads",
        "C4": "without a compiler int8 no slower than torch's attention",
        "C5": "a token of a small model over DynamicCache: 1.5 times",
        "C6": "scoring at most 3 % of a prompt's attention, packing 4 and 6 copies",
    }
    return [Point(bar=bar, asks=words, reason=reason) for bar, words in asks.items()]


BARS = (*_g(), *_e(), *_host(), *_cpu())
"""All points, in the order of the page."""
