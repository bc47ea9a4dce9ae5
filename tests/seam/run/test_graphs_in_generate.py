"""`cache_for(..., graphs=True)`: plain `model.generate` by steps that are replayed gives what it gives without.

The tape of `tests/support/seam/tape.py` stands for CUDA graphs; `test_graphs_behind_forwards.py` has what else may
happen between two tokens.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList

import kvtailor
from kvtailor.errors import CacheMisuse, UnsupportedModel
from kvtailor.hf.graphs import replay
from kvtailor.hf.graphs.open_steps import _WORTH_RECORDING
from kvtailor.hf.versions import hand_cache, read_cache
from tests.seam.run.test_replay import KIVI, PLANS
from tests.support.crossed import crossed
from tests.support.seam.long_rope import BORDER, LONG_ROPE, long_rope_model
from tests.support.seam.tape import Tape
from tests.support.seam.zoo import COMPRESSIBLE, VOCABULARY, build, prompts

TOLD = {"max_new_tokens": 30, "do_sample": False}
A_PROMPT = "a prompt, a turn or a draft of several tokens"


pytestmark = pytest.mark.usefixtures("tapes")


def both(model, plan: str):
    return kvtailor.cache_for(model, plan), kvtailor.cache_for(model, plan, graphs=True)


def alike(plain, replayed) -> None:
    """The same tokens are held, of the same conversation, and every byte is accounted for."""
    assert plain.seen == replayed.seen
    assert torch.equal(plain.held(), replayed.held())
    assert plain.conversation.known == replayed.conversation.known
    ledger = replayed.ledger()
    assert ledger.total == ledger.closed_form and ledger.held == plain.ledger().held


def ended(text: Tensor, prompt: int) -> int:
    """A token that the first row says in the midst of its answer and not before."""
    answer = text[0, prompt:].tolist()
    return next(token for at, token in enumerate(answer) if at > len(answer) // 3 and token not in answer[:at])


@pytest.mark.parametrize(("plan", "lengths"), crossed(PLANS, [(33,), (23, 17, 9)]), ids=str)
def test_generate_says_the_same(plan: str, lengths: tuple[int, ...]) -> None:
    model = build("llama")
    ids, mask = prompts(lengths)
    plain, replayed = both(model, plan)
    expected = model.generate(ids, attention_mask=mask, **hand_cache(plain), **TOLD)
    found = model.generate(ids, attention_mask=mask, **hand_cache(replayed), **TOLD)
    assert torch.equal(found, expected)
    counts = replayed.replays
    assert counts.replayed > 20 and counts.recordings and counts.reasons[A_PROMPT] == 1
    assert counts.replayed + counts.plain == TOLD["max_new_tokens"]
    alike(plain, replayed)
    # One row ends in the midst of its answer, and the others go on.
    eos = ended(expected, ids.shape[1])
    plain, replayed = both(model, plan)
    texts = [
        model.generate(ids, attention_mask=mask, **hand_cache(each), eos_token_id=eos, **TOLD)
        for each in (plain, replayed)
    ]
    assert torch.equal(*texts)
    alike(plain, replayed)


@pytest.mark.parametrize(
    "family",
    [name if name in ("gemma3", "gpt2") else pytest.param(name, marks=pytest.mark.long) for name in COMPRESSIBLE],
)
def test_so_with_every_family(family: str) -> None:
    model = build(family)
    ids, mask = prompts((21, 9, 4))
    plain, replayed = both(model, KIVI)
    texts = [model.generate(ids, attention_mask=mask, **hand_cache(each), **TOLD) for each in (plain, replayed)]
    assert torch.equal(*texts)
    assert replayed.replays.replayed > 20
    alike(plain, replayed)


def test_a_cache_that_its_model_would_drop_for_nothing_goes_on() -> None:
    """Phi-3 without long rope, see `test_long_rope.py`; with it, no step can be recorded."""
    model = AutoModelForCausalLM.from_config(transformers.Phi3Config(**LONG_ROPE)).eval()
    ids, mask = prompts((BORDER - 12, BORDER - 15))
    plain, replayed = both(model, KIVI)
    texts = [model.generate(ids, attention_mask=mask, **hand_cache(each), **TOLD) for each in (plain, replayed)]
    assert torch.equal(*texts)
    assert replayed.replays.replayed > 20 and replayed.replays.reasons[A_PROMPT] == 1
    alike(plain, replayed)
    with pytest.raises(UnsupportedModel, match="rotary frequencies anew"):
        kvtailor.cache_for(long_rope_model("phi3"), KIVI, graphs=True)


def test_a_session_replays_in_every_cache(tapes: list[Tape]) -> None:
    model, (ids, mask) = build("llama"), prompts((21, 9, 4))
    own = model.forward
    with kvtailor.session(model, KIVI) as plain, kvtailor.session(model, KIVI, graphs=True) as replayed:
        for _ in range(2):
            texts = [each.generate(ids, attention_mask=mask, **TOLD) for each in (plain, replayed)]
            assert torch.equal(*texts)
            assert replayed.last.replays.replayed > 20 and plain.last.replays is None
            alike(plain.last, replayed.last)
    plain.last = replayed.last = None
    assert model.forward == own
    with pytest.raises(UnsupportedModel, match="chooses anew"), kvtailor.session(model, "quest", graphs=True):
        pass
    assert model.forward == own


def test_a_loaded_cache_replays_what_follows(tmp_path: Path) -> None:
    model, (ids, mask) = build("llama"), prompts((21, 9, 4))
    plain, replayed = both(model, KIVI)
    texts = [model.generate(ids, attention_mask=mask, **hand_cache(each), **TOLD) for each in (plain, replayed)]
    loaded = []
    for number, each in enumerate((plain, replayed)):
        each.save(tmp_path / str(number))
        # Whether the saved cache was one that replays does not matter.
        loaded.append([kvtailor.load_cache(model, tmp_path / str(number), graphs=graphs) for graphs in (False, True)])
    turn = torch.cat([texts[0], ids], 1)
    mask = torch.cat([mask, mask.new_ones(turn.shape[0], turn.shape[1] - ids.shape[1])], 1)
    every = [plain, *loaded[0], *loaded[1]]
    found = [model.generate(turn, attention_mask=mask, **hand_cache(each), **TOLD) for each in every]
    assert all(torch.equal(each, found[0]) for each in found)
    for going_on, replaying in loaded:
        assert going_on.replays is None and replaying.replays.replayed > 20
        alike(plain, replaying)
    kvtailor.cache_for(model, "quest").save(tmp_path / "quest")
    with pytest.raises(UnsupportedModel, match="chooses anew"):
        kvtailor.load_cache(model, tmp_path / "quest", graphs=True)


def test_full_says_what_transformers_own_cache_says() -> None:
    model = build("llama")
    ids, mask = prompts((20, 13))
    expected = model.generate(ids, attention_mask=mask, **TOLD)
    cache = kvtailor.cache_for(model, "full", graphs=True)
    assert torch.equal(model.generate(ids, attention_mask=mask, **hand_cache(cache), **TOLD), expected)
    assert cache.replays.replayed == 29


def test_sampling_draws_the_same() -> None:
    model = build("llama")
    ids, mask = prompts((20, 13))
    texts = []
    for cache in both(model, KIVI):
        torch.manual_seed(4)
        told = {"max_new_tokens": 30, "do_sample": True, "top_k": 20, "temperature": 1.3}
        texts.append(model.generate(ids, attention_mask=mask, **hand_cache(cache), **told))
    assert torch.equal(*texts)
    assert len({tuple(row) for row in texts[0][:, 20:].tolist()}) == 2
    assert cache.replays.replayed > 20


def test_what_generate_returns_besides_is_the_same() -> None:
    """Scores, logits and the cache itself, with a processor that counts how often it was called."""
    model = build("llama")
    ids, mask = prompts((20, 13))
    calls = []

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(input_ids.shape[1])
        return scores + 0.1 * torch.arange(scores.shape[1]) % 3

    told = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **TOLD}
    outputs = [
        model.generate(
            ids, attention_mask=mask, **hand_cache(each), logits_processor=LogitsProcessorList([process]), **told
        )
        for each in both(model, "full")
    ]
    assert calls == 2 * list(range(20, 50))
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for name in ("scores", "logits"):
        for plain, replayed in zip(outputs[0][name], outputs[1][name], strict=True):
            torch.testing.assert_close(replayed, plain, rtol=1e-4, atol=1e-4)
    assert read_cache(outputs[1]).replays.replayed == 29


def test_beams_are_plain_and_counted(tapes: list[Tape]) -> None:
    model = build("llama")
    ids, mask = prompts((20, 13))
    texts = []
    for cache in both(model, KIVI):
        texts.append(model.generate(ids, attention_mask=mask, **hand_cache(cache), num_beams=3, **TOLD))
    assert torch.equal(*texts)
    assert not tapes and cache.replays.replayed == 0
    assert cache.replays.reasons == {
        A_PROMPT: 1,
        "rows were put in another order since the token before (beam search)": cache.replays.plain - 1,
    }
    # Another text on the same cache is replayed again.
    cache.reset()
    model.generate(ids, attention_mask=mask, **hand_cache(cache), **TOLD)
    assert cache.replays.replayed > 20


@pytest.mark.parametrize("plan", ["full", KIVI, "snapkv(window=6) + adakv @ tokens=16"])
def test_a_chat_goes_on(plan: str) -> None:
    """Three turns on one cache: the whole conversation each time, then the new ids alone with a longer mask."""
    model = build("llama")
    turns = [prompts((24, 11), state=state)[0] for state in (1, 2, 3)]
    start = prompts((24, 11))[1]
    plain, replayed = both(model, plan)
    told = {**TOLD, "max_new_tokens": 12}
    for cache in (plain, replayed):
        text, mask = turns[0], start
        for turn in (*turns[1:], None):
            text = model.generate(text, attention_mask=mask, **hand_cache(cache), **told)
            mask = torch.cat([mask, mask.new_ones((2, text.shape[1] - mask.shape[1]))], 1)
            if turn is not None:
                text = torch.cat([text, turn.clamp(min=3)], 1)
                mask = torch.cat([mask, torch.ones_like(turn)], 1)
        last = torch.cat([text[:, -1:], turns[0][:, -3:]], 1)
        mask = torch.cat([mask[:, :-1], torch.ones_like(last)], 1)
        end = model.generate(last, attention_mask=mask, **hand_cache(cache), **told)
        if cache is plain:
            expected = text, end
    assert torch.equal(text, expected[0]) and torch.equal(end, expected[1])
    assert replayed.replays.replayed >= 4 * 8
    alike(plain, replayed)


def test_a_stop_before_the_end_and_a_question_after_it() -> None:
    """The steps that no forward follows land when the cache is next used, here by a deep copy and by a file."""
    model = build("llama")
    ids, _ = prompts((30,))
    plain, replayed = both(model, KIVI)
    for each in (plain, replayed):
        text = model.generate(ids, **hand_cache(each), **TOLD)
    more = torch.cat([text, ids[:, :5]], 1)
    answers = [model.generate(more, **hand_cache(copy.deepcopy(each)), **TOLD) for each in (plain, replayed)]
    assert torch.equal(*answers)
    alike(plain, replayed)


def test_a_saved_cache_holds_what_was_replayed(tmp_path) -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    cache = kvtailor.cache_for(model, KIVI, graphs=True)
    text = model.generate(ids, **hand_cache(cache), **TOLD)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvtailor.load_cache(model, tmp_path / "cache.safetensors")
    more = torch.cat([text, ids[:, :5]], 1)
    assert torch.equal(*(model.generate(more, **hand_cache(each), **TOLD) for each in (cache, loaded)))


def test_no_slot_is_kept_for_a_token_that_is_not_asked_for() -> None:
    model = build("llama")
    ids, _ = prompts((20,))
    cache = kvtailor.cache_for(model, "full", graphs=True)
    text = model.generate(ids, **hand_cache(cache), **TOLD)
    slots = cache.engine.states[0].stored.tail.tensors()["keys"].shape[1]
    assert 49 <= slots <= 50
    # The whole conversation once more, and a loop that goes on where generate() has ended.
    model.generate(torch.cat([text, ids[:, :5]], 1), **hand_cache(cache), **{**TOLD, "max_new_tokens": 9})
    assert cache.seen == 63


def test_short_answers_are_not_recorded(tapes: list[Tape]) -> None:
    model = build("llama")
    ids, _ = prompts((20,))
    cache = kvtailor.cache_for(model, "full", graphs=True)
    model.generate(ids, **hand_cache(cache), do_sample=False, max_new_tokens=_WORTH_RECORDING)
    assert not tapes and cache.replays.replayed == 0
    assert cache.replays.reasons[f"fewer than {_WORTH_RECORDING} tokens were left"] == _WORTH_RECORDING - 1


def test_what_acts_at_every_token_is_plain() -> None:
    model = build("llama")
    ids, _ = prompts((20,))
    plan = "position(sinks=2) @ tokens=14, slack=0"
    plain, replayed = both(model, plan)
    assert torch.equal(*(model.generate(ids, **hand_cache(each), **TOLD) for each in (plain, replayed)))
    assert replayed.replays.replayed == 0
    assert replayed.replays.reasons[f"the plan acts again within {_WORTH_RECORDING - 1} tokens"] == 29


def test_kvtailors_own_functions_take_such_a_cache() -> None:
    """A context in chunks, held back until all of it has come, then a question by plain generate()."""
    model = build("llama")
    ids, _ = prompts((41,))
    plain, replayed = both(model, KIVI)
    for each in (plain, replayed):
        kvtailor.prefill(model, ids[:, :33], cache=each, chunk=8, hold=True)
    answers = [model.generate(ids, **hand_cache(each), **TOLD) for each in (plain, replayed)]
    assert torch.equal(*answers)
    assert replayed.replays.replayed > 20


def test_drafts_that_may_be_taken_back_are_plain() -> None:
    model = build("llama")
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(5)).repeat(1, 3)
    plain, replayed = both(model, "full")
    told = {**TOLD, "prompt_lookup_num_tokens": 3}
    texts = [model.generate(ids, **hand_cache(each), **told) for each in (plain, replayed)]
    assert torch.equal(*texts)
    assert replayed.replays.replayed == 0
    more = torch.cat([texts[0], ids[:, :5]], 1)
    assert torch.equal(*(model.generate(more, **hand_cache(each), **TOLD) for each in (plain, replayed)))
    assert replayed.replays.replayed > 20


def test_what_cannot_be_recorded_is_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = build("llama")
    for model, plan, why in (
        (llama, "h2o(recent=4) @ tokens=8", "keeps account of what every new token attends to"),
        (llama, "quest(tokens=12) + indexed(page=4)", "chooses anew at every token what it reads"),
        (llama, "full + disk", "moves segments between tiers"),
        (llama, "full + device(device_bytes=1MiB)", "limits the bytes on the device"),
        (build("mistral_window"), "full", "a sliding window of its own"),
    ):
        own = model.config._attn_implementation
        with pytest.raises(UnsupportedModel, match="steps cannot be recorded and replayed: .*" + re.escape(why)):
            kvtailor.cache_for(model, plan, graphs=True)
        assert "forward" not in vars(model) and model.config._attn_implementation == own
    with pytest.raises(CacheMisuse, match="graphs=True replays steps of one token, and with a draft several"):
        kvtailor.generate(llama, prompts((12,))[0], graphs=True, draft_plan="full")
    monkeypatch.setattr(replay, "recorder_of", lambda device: None)
    with pytest.raises(UnsupportedModel, match="the model is on cpu, and graphs are CUDA's; decode without graphs"):
        kvtailor.cache_for(llama, "full", graphs=True)
    assert "forward" not in vars(llama)


def test_without_graphs_there_are_no_counts() -> None:
    cache = kvtailor.cache_for(build("llama"), "full")
    assert cache.replays is None and "replayed" not in repr(cache)
