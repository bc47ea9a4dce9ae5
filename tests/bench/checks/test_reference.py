"""What is farther from a model in a finer dtype than its own ways are, lost something; rounding is no fraud."""

from dataclasses import replace

import pytest
import torch
from tests.support.seam.zoo import build

from kvtailor import cache_for
from kvtailor.bench.checks import Fraud
from kvtailor.bench.checks.reference import ReferenceScores, finer, judge, reference_of
from kvtailor.bench.checks.scores import check_identity
from kvtailor.bench.contestant import OTHER_ATTENTION, OWN, OWN_ROUNDED, Contestant
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity, score_window
from kvtailor.errors import KvtailorError
from kvtailor.ops.dispatch import using

ODD = " ".join(f"word{i} and number {i * i} stand here." for i in range(500))
TASK = Perplexity(text=ODD, source="odd text", context=64, continuation=16, windows=5)


@pytest.fixture(scope="module")
def half():
    return Subject.load("demo", dtype="bfloat16")


def normal(state, size=(4, 128), scale=1.0):
    return [*(scale * torch.randn(*size, generator=torch.Generator().manual_seed(state), dtype=torch.float64))]


def moved(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


TRUTH = normal(0, scale=3.0)


def reference(scale, truth=TRUTH, state=1):
    """What a model rounds by: its two ways are `scale` from the truth."""
    ways = {"sdpa": moved(TRUTH, normal(state, scale=scale)), "eager": moved(TRUTH, normal(state + 1, scale=scale))}
    return ReferenceScores(truth, torch.float32, ways, "a test")


@pytest.mark.parametrize("scale", [3e-4, 3e-2, 1.0])
@pytest.mark.parametrize("known", [True, False])
def test_scores_are_judged_by_what_rounding_does_here(scale, known):
    """A limit in nats would be wrong for two of the three."""
    wrong = 0
    for state in range(10, 60):
        held = reference(scale, TRUTH if known else None, 1000 + 2 * state)
        wrong += not judge(moved(TRUTH, normal(state, scale=scale)), held)[0]
        assert not judge(moved(TRUTH, normal(state, scale=2 * scale)), held)[0]
    assert wrong == 0


@pytest.mark.parametrize("side", [1, -1])
def test_scores_that_lean_to_one_side_are_caught_within_the_noise(side):
    scale = 3e-2
    leaning = [each + side * scale / 2 for each in moved(TRUTH, normal(7, scale=scale))]
    fits, sentence = judge(leaning, reference(scale))
    assert not fits and "float32" in sentence and "under sdpa" in sentence and "under eager" in sentence
    assert "512 tokens" in sentence


def test_a_few_tokens_that_are_far_off_are_caught():
    ours = moved(TRUTH, normal(7, scale=3e-2))
    for each in ours:
        each[::16] -= 0.5
    assert not judge(ours, reference(3e-2))[0]


def test_what_no_report_shows_is_no_fraud():
    assert judge(moved(TRUTH, normal(7, scale=9e-5)), reference(1e-7))[0]
    assert not judge(moved(TRUTH, normal(7, scale=9e-4)), reference(1e-7))[0]


def test_what_is_no_number_never_fits():
    ours = [*TRUTH]
    ours[2] = ours[2].clone().index_fill(0, torch.tensor([5]), torch.nan)
    assert not judge(ours, reference(3e-2))[0]


def test_the_sentence_has_no_limit_that_contradicts_it():
    """Such as 3.69e-02 nats where 4e-02 is allowed."""
    own = moved(TRUTH, normal(1, scale=3e-2))

    def held(which):
        whole = reference(3e-2)
        ways = {name: [scores[i] for i in which] for name, scores in whole.ways.items()}
        return ReferenceScores([TRUTH[i] for i in which], whole.dtype, ways)

    said = check_identity(moved(TRUTH, normal(7, scale=3e-2)), own, torch.bfloat16, "t", held)
    assert said.startswith("Identity: plan 'full' is 2.") and "allowed" not in said
    with pytest.raises(Fraud, match="identity: plan 'full' is 4.*more than rounding and chance give") as caught:
        check_identity(moved(TRUTH, normal(7, scale=6e-2)), own, torch.bfloat16, "t", held)
    assert "allowed" not in str(caught.value)


def test_the_windows_that_differ_most_are_held_to_the_truth():
    own, asked = [torch.zeros(200) for _ in range(9)], []
    ours = [each.clone() for each in own]
    for index, much in ((3, 0.1), (7, 0.3), (8, 0.2), (1, 0.01)):
        ours[index] += much

    def held(which):
        asked.append(which)
        return ReferenceScores(None, torch.bfloat16, {"own": [own[i] for i in which]}, "a test")

    with pytest.raises(Fraud):
        check_identity(ours, own, torch.bfloat16, "t", held)
    assert asked == [[7, 8, 3]]


def test_nobody_asks_where_scores_are_the_same():
    def never(which):
        raise AssertionError

    for dtype, apart in ((torch.bfloat16, 0.0), (torch.float32, 9e-5)):
        assert check_identity([torch.zeros(9)], [torch.full((9,), apart)], dtype, "t", never) is None


def scores(subject, contestant, windows):
    return [score_window(subject, contestant, each.context, each.targets)[0] for each in windows]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("dtype", "up"), [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float64")])
def test_the_truth_is_that_of_the_whole_model_in_the_finer_dtype_and_leaves_nothing_behind(
    dtype, up, at_once, monkeypatch
):
    from kvtailor.bench.checks import reference as module

    monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 40 if at_once else 1 << 26)
    subject = Subject.load("demo", dtype=dtype)
    windows = TASK.cut(subject)[:2]

    def stand():
        tensors = [*subject.model.named_parameters(), *subject.model.named_buffers()]
        return [(name, each.dtype, each.data_ptr()) for name, each in tensors]

    before, own = stand(), scores(subject, OWN, windows)
    found = reference_of(subject, lambda contestant: scores(subject, contestant, windows), 80)
    assert found.why == "" and found.dtype is getattr(torch, up) and list(found.ways) == ["sdpa", "eager"]
    assert stand() == before and subject.model.config._attn_implementation in ("sdpa", "eager")
    assert all(map(torch.equal, found.ways["sdpa"], own)) and all(map(torch.equal, scores(subject, OWN, windows), own))
    hooks = [each for each in subject.model.modules() if each._forward_pre_hooks or each._forward_hooks]
    assert not hooks
    whole = Subject(name="demo", model=subject.model.to(getattr(torch, up)), tokenizer=subject.tokenizer)
    whole.model.set_attn_implementation("sdpa")
    # Of one processor's products only the order of sums may differ.
    for a, b in zip(found.truth, scores(whole, OWN, windows), strict=True):
        assert float((a - b.double()).abs().max()) < (1e-12 if up == "float64" else 1e-5)


@pytest.mark.parametrize("free", [1 << 40, 1 << 26])
def test_weights_are_put_back_when_the_forward_fails(half, free, monkeypatch):
    from kvtailor.bench.checks import reference as module

    monkeypatch.setattr(module, "free_bytes", lambda device: free)
    before = [each.data_ptr() for each in half.model.parameters()]
    with pytest.raises(ZeroDivisionError), finer(half):
        handle = half.model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            half.forward(torch.tensor([[1, 2, 3]]), None)
        finally:
            handle.remove()
    assert [each.data_ptr() for each in half.model.parameters()] == before and half.dtype == torch.bfloat16


def test_a_truth_that_is_not_to_be_had_says_why(half, monkeypatch):
    from kvtailor.bench.checks import reference as module

    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    windows = TASK.cut(half)[:2]
    found = reference_of(half, lambda contestant: scores(half, contestant, windows), 80)
    assert found.truth is None and "1000 are free" in found.why
    assert "1000 are free" in judge(scores(half, Contestant.of("full"), windows), found)[1]
    with pytest.raises(KvtailorError, match="it has no weights"), finer(Subject(name="x", model=object())):
        pass


def test_the_other_attention_is_another_and_is_put_back(half):
    [window, *_] = TASK.cut(half)
    config = half.model.config
    own = score_window(half, OWN, window.context, window.targets)[0]
    assert config._attn_implementation == half.stock_attention == "sdpa"
    other = score_window(half, OTHER_ATTENTION, window.context, window.targets)[0]
    assert config._attn_implementation == "eager" and not torch.equal(own, other)
    assert torch.equal(score_window(half, OWN, window.context, window.targets)[0], own)


@pytest.mark.parametrize("with_truth", [True, False])
def test_rounding_on_an_odd_text_is_no_fraud(half, with_truth, monkeypatch):
    from kvtailor.bench.checks import reference as module

    if not with_truth:
        monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    # The plain forms round the most: they add up in bfloat16 where kernels add up in float32.
    with using("reference"):
        full, h2o = run(half, contestants_of(["h2o @ keep=0.25"]), [TASK], bandwidth=False)
    assert full.error is None and h2o.error is None


@pytest.fixture(scope="module")
def rounded():
    return Subject.load("demo", dtype="float32", cache_dtype="bfloat16")


def test_a_cache_in_less_than_its_model_is_held_to_the_models_own_that_rounds_as_it_does(rounded):
    """And not to one that rounds nothing, from which it is farther away."""
    (window, *_) = TASK.cut(rounded)
    full, own, unrounded = (
        score_window(rounded, each, window.context, window.targets)[0]
        for each in (Contestant.of("full"), OWN_ROUNDED, OWN)
    )
    assert float((full - own).abs().mean()) < 0.2 * float((full - unrounded).abs().mean())
    (record,) = run(rounded, contestants_of(["full"]), [TASK], bandwidth=False)
    assert record.error is None and (record.dtype, record.cache_dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", None), ("float32", "bfloat16")])
@pytest.mark.parametrize("with_truth", [True, False])
def test_lost_tokens_on_an_odd_text_are_one(dtypes, with_truth, monkeypatch):
    from kvtailor.bench.checks import reference as module

    if not with_truth:
        monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    model = Subject.load("demo", dtype=dtypes[0], cache_dtype=dtypes[1])
    broken = Subject(
        name="demo",
        model=model.model,
        tokenizer=model.tokenizer,
        make_cache=lambda model, plan: cache_for(model, "streaming @ keep=0.5"),
    )
    with pytest.raises(Fraud, match="identity: .*plan 'full'"):
        run(broken, contestants_of(["full"]), [TASK], bandwidth=False)


def test_a_model_whose_logits_are_nan_is_told_so(half):
    model = build("llama")
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data[0, 3] = torch.nan
    given = Subject(name="broken", model=model, tokenizer=half.tokenizer)
    with pytest.raises(KvtailorError, match=r"own logits .*are NaN.*model.layers.1.mlp.down_proj.weight") as caught:
        run(given, contestants_of(["full"]), [TASK], bandwidth=False)
    assert not isinstance(caught.value, Fraud) and "report" not in str(caught.value)


def test_a_row_that_only_the_text_reads_is_told_too(half):
    model = Subject.load("demo", dtype="float32")
    row = int(TASK.cut(model)[0].context[20])
    assert row > 8
    model.model.get_input_embeddings().weight.data[row] = torch.nan
    with pytest.raises(KvtailorError, match=r"own logits of .* are NaN.*embed_tokens"):
        run(model, contestants_of(["full"]), [TASK], bandwidth=False)


@pytest.mark.parametrize("plan", ["streaming @ keep=0.99", "kivi(bits=8, group=8, recent=8)"])
@pytest.mark.parametrize(("of", "finest"), [("half", "float32"), ("rounded", "float64")])
def test_half_precision_hides_nothing_since_a_finer_dtype_is_asked_too(of, finest, plan, request):
    """In bfloat16 alone neither is farther from the truth than the model's own cache."""
    given = request.getfixturevalue(of)
    broken = replace(given, make_cache=lambda model, asked: cache_for(model, plan))
    with pytest.raises(Fraud, match=f"identity: with the weights in {finest}, plan 'full' .* 80 tokens of odd text"):
        run(broken, contestants_of(["full"]), [TASK], bandwidth=False)
