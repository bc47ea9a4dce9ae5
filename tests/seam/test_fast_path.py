"""The fast path of a decoded token gives what the slow path gives, for every plan, and ends when anything changes."""

import copy
import weakref

import pytest
import torch

import kvtailor
from kvtailor.engine.engine import Engine
from kvtailor.engine.fast_path import FastPath, slow_path
from kvtailor.hf.versions import hand_cache
from kvtailor.ops.cpu.library import library
from kvtailor.ops.dispatch import using
from kvtailor.plan import Plan
from kvtailor.types import Needs
from tests.support.calibrated import shipped_for
from tests.support.every_plan import every_plan, first_of_each_method
from tests.support.seam.zoo import ROUNDING, VOCABULARY, build, error, prompts
from tests.support.sharp_model import sharp_model

pytestmark = pytest.mark.skipif(library() is None, reason="there are no C++ kernels, and so no fast path")
# A model on the CPU has no host to go to.
CASES = {case: plan for case, plan in every_plan().items() if not case.startswith("store: host")}
DEFAULT = {*first_of_each_method()} | {case for case in CASES if case.startswith("preset: ")}
# Of these nearly every token takes the fast path.
SHORT = (
    "full",
    "snapkv(window=6) @ tokens=24",
    "snapkv(window=6) + adakv @ tokens=24",
    "streaming @ tokens=24, slack=9",
    "kivi(bits=4, group=8, recent=8)",
    "vector(bits=8)",
    "snapkv(window=6) + adakv + kivi(bits=4, group=8, recent=16) @ tokens=40",
    "vector(bits=4)",
    "knorm + pyramid @ tokens=24",
    "h2o(recent=6) @ tokens=24, slack=9",
    "h2o(recent=6) + adakv @ tokens=24, slack=9",
    "h2o(recent=6) + kivi(bits=4, group=8, recent=16) @ tokens=40, slack=12",
    "hadamard(of=vector(bits=4, symmetric=false))",
    "hadamard(of=kivi(bits=4, group=8, recent=16), only=keys)",
    "orthogonal(rank=12, block_size=64, of=vector(bits=4))",
    "lowrank(rank=0.5, basis=random, block_size=64)",
    "lowrank(rank=0.5, heads=2, basis=random, block_size=64, of=hadamard(of=vector(bits=8)))",
    "h2o(recent=6) + hadamard(of=vector(bits=8)) @ tokens=40, slack=12",
    "nvfp4(group=8, block_size=16)",
    "h2o(recent=6) + nvfp4(group=8, recent=16) @ tokens=40, slack=12",
    "hadamard(of=mxfp4(block_size=16), signs=0)",
    "snapkv(window=6) + adakv + mxfp8(block_size=16) @ tokens=24",
    "fp8(group=8, block_size=16)",
    "h2o(recent=6) + fp8(group=8, recent=16) @ tokens=40, slack=12",
    "static_fp8(scale=0.05, block_size=16)",
    "hadamard(of=higgs(bits=2, block_size=16), signs=0)",
    "hadamard(of=gaussian(bits=3, qjl=both, block_size=16), signs=0)",
    "h2o(recent=6) + higgs(bits=3, recent=16) @ tokens=40, slack=12",
    "snapkv(window=6) @ tokens=24, slack=9",
    "rkv @ tokens=24, slack=12",
    "tova + kivi(bits=4, group=8, recent=16) @ tokens=40, slack=12",
    # They read all of these.
    "quest(dense_layers=9) + indexed(page=8, block_size=16)",
    "quest(tokens=96) + indexed(page=8, block_size=16)",
    "snapkv(window=6) + adakv + quest(tokens=160, dense_layers=1) + indexed(page=8, block_size=16) @ tokens=40",
    "snapkv(window=6) + rocket(tokens=400) @ tokens=48",
    "nuq(bits=3, group=8, block_size=16)",
    "unrotated(of=nuq(bits=3, group=8, block_size=16))",
    "unrotated(of=kivi(bits=4, group=8, recent=8))",
    "unrotated(of=lowrank(rank=0.5, heads=2, basis=random, block_size=64))",
    "snapkv(window=6) + adakv + unrotated(of=kivi(bits=4, group=8, recent=16)) @ tokens=40",
    "h2o(recent=6) + unrotated(of=vector(bits=8)) @ tokens=40, slack=12",
    # Two maps, one behind the other, and then a turn.
    "unrotated(of=lowrank(rank=0.5, heads=2, basis=random, block_size=64, of=hadamard(of=vector(bits=4))))",
    "h2o(recent=6) + unrotated(of=lowrank(basis=random, of=hadamard(of=vector(bits=8)))) @ tokens=40, slack=12",
    # Tokens count as often as others were merged into them.
    "pairs(window=6) + asymkv @ tokens=24",
    "pairs(window=6) + adakv + asymkv + kivi(bits=4, group=8, recent=8) @ tokens=40",
    "pairs(window=6) + asymkv + hadamard(of=vector(bits=4)) @ tokens=40",
    "snapkv(window=6) + matching + vector(bits=8) @ tokens=24",
    "pairs(window=6) + asymkv + unrotated(of=vector(bits=8)) @ tokens=24",
    "channels(keep=0.4, window=8, recent=8, block_size=16)",
    "minicache(start=0.0, block_size=16)",
    "minicache(start=0.0, of=kivi(bits=4, group=8, recent=8), only=values)",
    "streaming + minicache(start=0.0, block_size=16) @ tokens=40, slack=12",
    # The first tokens are turned, and are a segment of their own.
    "streamingllm + kivi(bits=4, group=8, recent=8) @ tokens=40",
    "position(sinks=3) + rolling @ tokens=99, slack=12",
    "position(sinks=3) + rolling + vector(bits=8) @ tokens=40, slack=12",
    "streamingllm + vector(bits=4) @ tokens=99",
    "streamingllm + hadamard(of=vector(bits=8)) @ tokens=40",
    "streamingllm + channels(keep=0.5, window=8, recent=8, block_size=16) @ tokens=40",
    "streamingllm + by_age(of=[vector(bits=8, block_size=32), vector(bits=4, block_size=32)], ages=[70]) @ tokens=99",
)
# They read the best pages, of heads of 32 channels.
PAGED = (
    "quest(tokens=17, least=2, dense_layers=0) + indexed(page=4, block_size=20)",
    "snapkv(window=6) + quest(tokens=16, dense_layers=1) + indexed(page=4, block_size=32) @ tokens=40",
)
FAMILIES = ("llama", "gpt_neox", "gemma3", "qwen3", "gpt_oss", "gemma2")


@pytest.fixture(scope="module", autouse=True)
def _calibrated(tmp_path_factory):
    with shipped_for([build("llama")], tmp_path_factory.mktemp("calibrations")):
        yield


@pytest.fixture
def taken(monkeypatch):
    """How many tokens of layers went either way."""
    found = {"short": 0, "general": 0}
    short, general = FastPath.take, Engine.attend

    def count_short(self, *args, **more):
        found["short"] += 1
        return short(self, *args, **more)

    def count_general(self, *args, **more):
        found["general"] += 1
        return general(self, *args, **more)

    monkeypatch.setattr(FastPath, "take", count_short)
    monkeypatch.setattr(Engine, "attend", count_general)
    return found


@torch.no_grad()
def decoded(model, plan, *, rows=2, prompt=70, steps=24, between=None):
    """Tokens (b, steps), logits (b, steps, v) and the cache; `between` is called with the cache before each token."""
    generator = torch.Generator().manual_seed(rows + prompt)
    ids = torch.randint(3, VOCABULARY, (rows, prompt), generator=generator)
    if Plan.parse(plan).needs.reconstruction:
        cache = kvtailor.prefill(model, ids[:, :-1], plan=plan)
        out = model(ids[:, -1:], **hand_cache(cache))
    else:
        cache = kvtailor.cache_for(model, plan)
        out = model(ids, **hand_cache(cache))
    tokens, logits = [], [out.logits[:, -1]]
    for step in range(steps):
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        if between is not None:
            cache, tokens[-1] = between(step, cache, tokens[-1])
        logits.append(model(tokens[-1], **hand_cache(cache)).logits[:, -1])
    return tokens, logits, cache


def check(model, plan, most=2e-5, **how):
    with slow_path():
        tokens, logits, cache = decoded(model, plan, **how)
    other_tokens, other_logits, other = decoded(model, plan, **how)
    assert all(torch.equal(a, b) for a, b in zip(tokens, other_tokens, strict=True))
    assert max(error(a, b) for a, b in zip(other_logits, logits, strict=True)) < most
    assert torch.equal(other.held(), cache.held()) and other.seen == cache.seen
    assert other.ledger() == cache.ledger()
    for state, reference in zip(other.engine.states, cache.engine.states, strict=True):
        mine, theirs = state.stored.tail, reference.stored.tail
        assert (mine.length, mine.start) == (theirs.length, theirs.start)
        for name, tensor in mine.state()[1].items():
            assert error(tensor.float(), theirs.state()[1][name].float()) < most
        assert state.clock == reference.clock
        mine, theirs = state.observed.tokens_read, reference.observed.tokens_read
        assert (mine is None) == (theirs is None) and (mine is None or torch.equal(mine, theirs))
        seen, expected = state.observed.evidence.tensors(), reference.observed.evidence.tensors()
        assert seen.keys() == expected.keys()
        for name, tensor in seen.items():
            assert error(tensor.float(), expected[name].float()) < most, name


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.long) for case in CASES]
)
def test_every_plan_is_the_same_both_ways(case):
    check(build("llama"), CASES[case], steps=12)


@pytest.mark.parametrize("plan", [plan for plan in SHORT if "fp8" in plan or "nvfp4" in plan or "kivi" in plan])
def test_scales_of_sixteen_bits_are_read_where_they_lie(plan, taken):
    """No copy of theirs in float32 stands between codes and kernel, which would rule the fast path out."""
    model = build("llama").to(torch.bfloat16)
    decoded(model, plan)
    assert taken["short"] > 0.4 * sum(taken.values())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", SHORT[1:7:2])
def test_models_with_windows_caps_and_sinks(family, plan, taken):
    check(build(family), plan)
    assert taken["short"]


@pytest.mark.parametrize("plan", SHORT)
def test_between_two_actions_every_token_takes_the_short_way(plan, taken):
    model = build("llama")
    decoded(model, plan, steps=33)
    layers = model.config.num_hidden_layers
    # The prompt, the token after it, and those at which the plan acts.
    assert taken["short"] + taken["general"] == 34 * layers
    assert taken["general"] <= 11 * layers, taken


@pytest.mark.parametrize(
    "plan", ["full", "snapkv(window=6) + adakv @ tokens=24", "h2o(recent=6) @ tokens=24, slack=60"]
)
def test_a_tail_that_grows_stays_on_the_short_way(plan, taken):
    model, layers = build("llama"), build("llama").config.num_hidden_layers
    slots = []

    def look(step, cache, token):
        slots.append(cache.engine.states[0].stored.tail.buffers()[0].shape[1])
        return cache, token

    decoded(model, plan, steps=55, between=look)
    # The prompt and the token after it.
    assert len(set(slots)) > 2 and taken == {"short": 54 * layers, "general": 2 * layers}
    check(model, plan, rows=3, steps=55)


@pytest.mark.parametrize("rows, prompt", [(1, 1), (1, 63), (3, 96)])
def test_awkward_sizes(rows, prompt):
    for plan in ("full", "snapkv(window=6) + adakv @ tokens=24", "vector(bits=3)"):
        check(build("llama", layers=1), plan, rows=rows, prompt=prompt, steps=40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long)])
@pytest.mark.parametrize("plan", [plan for plan in SHORT if not plan.startswith("h2o")])
def test_the_bits_are_the_same(plan, dtype):
    """Parts are read by the same kernels and merged in the same order, so that a tier or a copy may be compared."""
    check(build("llama", dtype=dtype), plan, most=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("plan", PAGED)
def test_chosen_pages_take_it_too(plan, dtype, taken):
    model = sharp_model(dtype, VOCABULARY)
    check(model, plan, most=1e-12, rows=3, prompt=63, steps=40)
    # The prompt, the token after it and those at which a block is stored take the slow path, and their successors.
    assert taken["short"] >= 33 * 2 and taken["general"] <= (41 + 8) * 2
    taken.update(short=0)
    cache = decoded(model, plan, rows=1, steps=9)[2]
    read, held = cache.engine.states[1].observed.tokens_read, cache.engine.states[1].counts()
    assert taken["short"] and int(read.max()) < int(held.min())
    segments = [*map(weakref.ref, cache.engine.states[1].stored.segments)]
    cache.batch_repeat_interleave(2)
    assert segments and all(each() is None for each in segments)


@pytest.mark.parametrize("plan", PAGED)
def test_chosen_pages_end_it_where_a_layer_changes_or_padding_is_hidden(plan, taken):
    model = sharp_model(vocabulary=VOCABULARY)
    for change in (crop, deep_copy, swap, repeat):
        check(model, plan, between=between_with(change))
    assert taken["short"]
    with slow_path():
        _, logits, cache = padded(model, plan)
    taken.update(short=0)
    _, other_logits, other = padded(model, plan)
    assert taken["short"] == 0 or "dense_layers=1" in plan
    assert max(error(a, b) for a, b in zip(other_logits, logits, strict=True)) < ROUNDING
    assert torch.equal(other.held(), cache.held()) and other.ledger() == cache.ledger()


@torch.no_grad()
def padded(model, plan, steps=24, hide=None):
    """As `decoded`, of a left-padded batch; `hide`: a token and a column that is masked from then on."""
    ids, mask = prompts((61, 20, 44))
    cache = kvtailor.cache_for(model, plan)
    out = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0), **hand_cache(cache))
    tokens, logits = [], [out.logits[:, -1]]
    for step in range(steps):
        mask = torch.cat([mask, mask.new_ones(3, 1)], 1)
        if hide is not None and step == hide[0]:
            mask[0, hide[1]] = 0
        tokens.append(logits[-1].argmax(-1, keepdim=True))
        where = mask.sum(-1, keepdim=True) - 1
        out = model(tokens[-1], attention_mask=mask, position_ids=where, **hand_cache(cache))
        logits.append(out.logits[:, -1])
    return tokens, logits, cache


@pytest.mark.parametrize("plan", [*SHORT[:3], *SHORT[4:7]])
def test_padded_batches_take_it_too(plan, taken):
    model = build("llama")
    with slow_path():
        tokens, logits, cache = padded(model, plan)
    assert not taken["short"]
    taken["general"] = 0
    other_tokens, other_logits, other = padded(model, plan)
    assert all(torch.equal(a, b) for a, b in zip(tokens, other_tokens, strict=True))
    assert max(error(a, b) for a, b in zip(other_logits, logits, strict=True)) < ROUNDING
    assert torch.equal(other.held(), cache.held()) and other.ledger() == cache.ledger()
    assert torch.equal(other.guard.real, cache.guard.real)
    assert taken["short"] >= 14 * 3, taken


def test_a_token_that_is_hidden_later_is_not_read(taken):
    """Row 0 has no padding there, so that only the mask of this forward says it."""
    model = build("llama")
    with slow_path():
        _, logits, _ = padded(model, "full", hide=(12, 30))
    _, other, _ = padded(model, "full", hide=(12, 30))
    _, seeing, _ = padded(model, "full")
    assert max(error(a, b) for a, b in zip(other, logits, strict=True)) < ROUNDING
    assert error(other[13], seeing[13]) > 1e-3
    assert taken["short"]


def between_with(*changes):
    def between(step, cache, token):
        return changes[step % len(changes)](cache, token) if step % 5 == 4 else (cache, token)

    return between


def crop(cache, token):
    cache.crop(-1)
    return cache, token


def deep_copy(cache, token):
    other = copy.deepcopy(cache)
    with torch.no_grad():
        # What the original takes must not reach the copy.
        build("llama")
    return other, token


def swap(cache, token):
    order = torch.tensor([1, 0])
    cache.reorder_cache(order)
    return cache, token[order]


def repeat(cache, token):
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2]))
    return cache, token


@pytest.mark.parametrize("change", [crop, deep_copy, swap, repeat])
@pytest.mark.parametrize(
    "plan",
    [
        "full",
        "snapkv(window=6) + adakv @ tokens=24",
        "kivi(bits=4, group=8, recent=24)",
        "minicache(start=0.0, block_size=24)",
        "channels(keep=0.5, window=8, recent=24, block_size=24)",
    ],
)
def test_what_changes_a_layer_ends_the_short_way(plan, change, taken):
    check(build("llama"), plan, between=between_with(change))
    assert taken["short"]


@torch.no_grad()
def test_a_copy_and_its_original_go_on_apart(taken):
    model, plan = build("llama"), "snapkv(window=6) @ tokens=24"
    _, logits, cache = decoded(model, plan, steps=5)
    other, token = copy.deepcopy(cache), logits[-1].argmax(-1, keepdim=True)
    for each in (cache, other):
        model((token + 1) % VOCABULARY if each is other else token, **hand_cache(each))
        model(token, **hand_cache(each))
    again = decoded(model, plan, steps=5)[2]
    with slow_path():
        model(token, **hand_cache(again))
        model(token, **hand_cache(again))
    for state, reference in zip(cache.engine.states, again.engine.states, strict=True):
        for name, tensor in state.stored.tail.state()[1].items():
            assert error(tensor.float(), reference.stored.tail.state()[1][name].float()) < ROUNDING


@pytest.mark.parametrize("plan", ["full", "kivi(bits=4, group=8, recent=24)"])
def test_what_a_layer_lets_go_of_is_freed(plan, taken):
    cache = decoded(build("llama"), plan, steps=6)[2]
    assert taken["short"]
    state = cache.engine.states[0]
    held = [*map(weakref.ref, state.stored.segments), *map(weakref.ref, state.stored.tail.buffers()[:2])]
    cache.batch_select_indices(torch.tensor([1]))
    assert len(held) >= 2 and all(each() is None for each in held)


@torch.no_grad()
def test_other_threads_masks_and_evidence_end_it(taken):
    model = build("llama")
    _, logits, cache = decoded(model, "full", steps=4)
    token = logits[-1].argmax(-1, keepdim=True)
    before = dict(taken)
    hidden = torch.ones(2, cache.seen + 1, dtype=torch.int64)
    model(token, **hand_cache(cache), attention_mask=hidden)
    assert taken["short"] == before["short"] + model.config.num_hidden_layers
    # A token that sees no longer all of the earlier ones.
    allowed = torch.ones(2, 1, 1, cache.seen + 1, dtype=torch.bool)
    allowed[:, :, :, 3:9] = False
    short = taken["short"]
    model(token, **hand_cache(cache), attention_mask=allowed)
    assert taken["short"] == short
    cache.engine.gather(Needs(window=4))
    model(token, **hand_cache(cache))
    assert taken["short"] == short
    model(token, **hand_cache(cache))
    assert taken["short"] > short and cache.engine.states[0].observed.evidence.queries.shape[2] == 2


@torch.no_grad()
def test_the_reference_is_not_skipped(taken):
    model = build("llama")
    _, logits, cache = decoded(model, "vector(bits=8)", steps=4)
    short = taken["short"]
    with using("reference"):
        model(logits[-1].argmax(-1, keepdim=True), **hand_cache(cache))
    assert taken["short"] == short


def test_gradients_go_the_general_way(taken):
    model = build("llama")
    _, logits, cache = decoded(model, "full", steps=4)
    short = taken["short"]
    out = model(logits[-1].argmax(-1, keepdim=True), **hand_cache(cache)).logits
    assert taken["short"] == short
    with pytest.raises(kvtailor.errors.CacheMisuse, match="no gradient"):
        out.sum().backward()
