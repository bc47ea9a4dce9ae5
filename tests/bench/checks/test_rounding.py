import pytest
import torch

from kvtailor.bench.checks import Fraud, tolerances
from kvtailor.bench.checks.rounding import tolerances_here
from kvtailor.bench.contestant import OTHER_ATTENTION, OWN
from kvtailor.bench.runner import contestants_of, run
from kvtailor.bench.subject import Subject
from kvtailor.bench.tasks.perplexity import Perplexity, score_window
from kvtailor.ops.dispatch import using

ODD = " ".join(f"word{i} and number {i * i} stand here." for i in range(500))
TASK = Perplexity(text=ODD, source="odd text", context=64, continuation=16, windows=5)
LARGE = torch.full((9,), 0.3)


@pytest.fixture(scope="module")
def half():
    return Subject.load("demo", dtype="bfloat16")


def never(contestant):
    raise AssertionError(f"scored under {contestant.label}")


def test_what_is_usual_is_enough_where_it_is_kept(half):
    assert tolerances_here(half, (0.5, 0.02), torch.full((9,), 0.01), never, 80) == (0.5, 0.02)
    assert tolerances_here(half, (0.5, 0.02), LARGE, never, 5000) == (0.5, 0.02)
    whole = Subject(name="demo", model=torch.nn.Linear(1, 1))
    assert tolerances_here(whole, (1e-3, None), LARGE, never, 80) == (1e-3, None)


def test_elsewhere_the_models_own_two_attentions_say_what_rounding_does(half):
    scores = {OWN.hash: torch.tensor([0.0, 1.0, 2.0]), OTHER_ATTENTION.hash: torch.tensor([0.25, 1.0, 1.0])}
    found = tolerances_here(half, (0.5, 0.02), LARGE, lambda contestant: scores[contestant.hash], 80)
    assert found == (1.0, pytest.approx(1.25 / 3))
    small = {OWN.hash: torch.zeros(3), OTHER_ATTENTION.hash: torch.full((3,), 1e-3)}
    assert tolerances_here(half, (0.5, 0.02), LARGE, lambda contestant: small[contestant.hash], 80) == (0.5, 0.02)


def test_the_other_attention_is_another_and_is_put_back(half):
    [window, *_] = TASK.cut(half)
    config = half.model.config
    own = score_window(half, OWN, window.context, window.targets)[0]
    assert config._attn_implementation == half.stock_attention == "sdpa"
    other = score_window(half, OTHER_ATTENTION, window.context, window.targets)[0]
    assert config._attn_implementation == "eager" and not torch.equal(own, other)
    assert torch.equal(score_window(half, OWN, window.context, window.targets)[0], own)


def test_rounding_on_an_odd_text_is_no_fraud(half):
    # The plain forms round the most: they add up in bfloat16 where kernels add up in float32.
    with using("reference"):
        full, h2o = run(half, contestants_of(["h2o @ keep=0.25"]), [TASK], bandwidth=False)
        assert full.error is None and h2o.error is None
        [scored] = [torch.cat([score_window(half, c, w.context, w.targets)[0] for w in TASK.cut(half)])
                    for c in contestants_of(["full"])]  # fmt: skip
    own = torch.cat([score_window(half, OWN, w.context, w.targets)[0] for w in TASK.cut(half)])
    if float((scored - own).abs().mean()) <= tolerances(torch.bfloat16)[1]:
        pytest.skip("this processor rounds so little that the usual tolerance is enough")


def test_a_lost_token_on_an_odd_text_is_one(half):
    from kvtailor import cache_for

    broken = Subject(name="demo", model=half.model, tokenizer=half.tokenizer,
                     make_cache=lambda model, plan: cache_for(model, "streaming @ keep=0.5"))  # fmt: skip
    with pytest.raises(Fraud, match="identity: plan 'full'"):
        run(broken, contestants_of(["full"]), [TASK], bandwidth=False)
