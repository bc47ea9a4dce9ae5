"""A small suite on a model whose right answers are known, for the tests of running it and of its tables."""

import math
import random

from tests.support.bench.dummy import CountingModel, DummyCache, subject

from kvtailor.bench.suite.run import prepare
from kvtailor.bench.suite.suite import read_suite

CONTEXT, TARGETS, WINDOWS, KEEP = 90, 21, 6, 32
PLAN = f"snapkv @ tokens={KEEP}"
VERSIONS = {"python": "3", "torch": "2", "transformers": "5", "kvtailor": "0", "commit": "abc"}
SUITE = """
title = "A | small one"
awaits = ["tomorrow", "telepathy"]
[settings.default]
keep = 32
[tasks.ppl]
run = "perplexity"
text = "{Text}"
context = 90
continuation = 21
windows = 6
[tasks.needle]
run = "needle"
for = { kind = ["needle", "passkey"] }
kind = "{kind}"
lengths = [200]
depths = [0.0, 1.0]
documents = 2
[tasks.guess]
run = "telepathy"
gamma = 8
[[tables]]
name = "loss"
title = "Loss"
note = "A note."
labels = ["Method", "Text"]
for_rows = { Text = ["FILE", "c4"] }
columns = [
    { label = "PPL", task = "ppl", value = "metrics.perplexity", digits = 6 },
    { label = "ΔNLL", task = "ppl", value = "paired.nll", digits = 6 },
    { label = "PPL (%)", task = "ppl", value = "metrics.perplexity", shows = "change", scale = 7 },
    { label = "PPL (x)", task = "ppl", value = "metrics.perplexity", shows = "ratio" },
    { label = "KiB", task = "ppl", value = "bytes_held", scale = 0.0009765625, digits = 4 },
    { label = "kept", task = "ppl", value = "kept", digits = 3 },
    { label = "reduction", task = "ppl", value = "reduction", digits = 3 },
]
rows = [
    { Method = "full", plan = "full" },
    { Method = "snap", plan = "snapkv @ tokens={keep}" },
    { Method = "again", plan = "snapkv(window=32) @ tokens={keep}" },
    { Method = "rank", plan = "snapkv + tomorrow @ tokens={keep}" },
]
[[tables]]
name = "again"
title = "The same task once more, and two that are one cell"
labels = ["Method"]
columns = [
    { label = "PPL", task = "ppl", value = "metrics.perplexity" },
    { label = "needle (%)", task = "needle", value = "mean.hit", scale = 100 },
    { label = "nats", task = "needle", value = "metrics.answer_nll", digits = 6 },
]
rows = [{ Method = "full", plan = "full", Text = "FILE" }]
[[tables]]
name = "guess"
title = "Telepathy"
labels = ["Method"]
columns = [{ label = "rate", task = "guess", value = "metrics.rate" }]
rows = [{ Method = "snap", plan = "snapkv @ tokens={keep}" }]
"""


def write_text(folder):
    """A text of 1,501 random letters."""
    source = random.Random(731)
    path = folder / "letters.txt"
    path.write_text("".join(source.choices("abcdefghij \n", weights=range(1, 13), k=1501)))
    return path


def small_suite(folder, text):
    path = folder / "small.toml"
    path.write_text(SUITE.replace("FILE", str(text)))
    return read_suite(path)


def dummy(model=None, keep=KEEP, **more):
    caches = {plan.replace(" ", "_"): DummyCache(keep=keep) for plan in (PLAN, f"snapkv(window=32) @ tokens={KEEP}")}
    return subject(model or CountingModel(), **caches, **more)


def go(suite, model=None, **options):
    counted = []
    found = prepare(suite, dummy(model), data=options.pop("data", None))
    records = found.run(bandwidth=False, advance=counted.append, **options)
    assert len(counted) == found.size[1] > 0 and len(records) == found.size[0]
    return records


def nats(text, keep):
    """The mean NLL of each window, by counting letters."""
    codes, found = list(text.read_bytes()), []
    size = CONTEXT + TARGETS
    for i in range(WINDOWS):
        at = i * (len(codes) // size) // WINDOWS * size
        context, targets = codes[at : at + CONTEXT], codes[at + CONTEXT : at + size]
        memory, total = context, 0.0
        for j, target in enumerate(targets):
            total -= math.log((memory.count(target) + 1) / (len(memory) + 256))
            memory = (context if j == 0 and keep is None else context[-keep:] if keep else context) + targets[: j + 1]
        found.append(total / TARGETS)
    return found
