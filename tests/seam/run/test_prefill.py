"""`kvtailor.prefill`: a compressed cache that `generate()` goes on from, whichever way the context was fed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import kvtailor
from kvtailor.engine.state import LayerState
from kvtailor.errors import CacheMisuse
from kvtailor.hf.versions import hand_cache
from tests.seam.test_modes import PLANS
from tests.support.crossed import crossed
from tests.support.seam.zoo import ROUNDING, build, error, held_columns, prompts

TWICE = (
    "kvzip(chunk=16) @ keep=0.4",
    "kvzip_pooled @ tokens=16",
    "kvzip + kivi(bits=4, group=8, recent=8) @ keep=0.5",
)


def asked(model, cache, context, mask, question, *, only_new: bool = False):
    """Greedy answer (b, 4) to a question on a copy of the cache."""
    whole = torch.cat([mask, torch.ones_like(question)], 1)
    ids = question if only_new else torch.cat([context, question], 1)
    out = model.generate(
        ids, attention_mask=whole, **hand_cache(copy.deepcopy(cache)), max_new_tokens=4, do_sample=False
    )
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize(
    ("family", "plan"),
    [("llama", plan) for plan in ("full", *PLANS, *TWICE)] + [("gemma3", plan) for plan in (PLANS[2], *TWICE[:2])],
)
@torch.no_grad()
def test_several_questions_on_copies_of_one_context(family: str, plan: str) -> None:
    """A padded batch; all ids or only the new ones; the order of the questions and the batch change nothing."""
    model = build(family)
    lengths = (48, 31)
    ids, mask = prompts(lengths)
    one, two = prompts((7, 7), state=5)[0], prompts((3, 3), state=6)[0]
    cache = kvtailor.prefill(model, ids, mask, plan=plan)
    held = cache.held()
    first, second = asked(model, cache, ids, mask, one), asked(model, cache, ids, mask, two)
    assert torch.equal(asked(model, cache, ids, mask, one, only_new=True), first)
    assert torch.equal(asked(model, cache, ids, mask, two), second)
    assert torch.equal(cache.held(), held) and cache.seen == 48
    for row, length in enumerate(lengths):
        mine = ids[row : row + 1, -length:]
        alone = kvtailor.prefill(model, mine, plan=plan)
        answer = asked(model, alone, mine, torch.ones_like(mine), one[row : row + 1])
        assert torch.equal(answer[0], first[row]), f"row {row}"


@pytest.mark.parametrize("plan", PLANS)
@torch.no_grad()
def test_a_prefill_is_the_models_own_forward(plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((48, 31))
    ours, plain = kvtailor.prefill(model, ids, mask, plan=plan), kvtailor.cache_for(model, plan)
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=places, **hand_cache(plain))
    chunked, by_hand = kvtailor.prefill(model, ids, mask, plan=plan, chunk=20), kvtailor.cache_for(model, plan)
    for last in (20, 40, 48):
        here = slice(last // 20 * 20 - 20 if last < 48 else 40, last)
        options = {"attention_mask": mask[:, :last], "position_ids": places[:, here]}
        model(ids[:, here], **hand_cache(by_hand), **options)
    for a, b in ((ours, plain), (chunked, by_hand)):
        assert a.ledger().total == b.ledger().total
        assert all(torch.equal(x, y) for x, y in zip(held_columns(a).values(), held_columns(b).values(), strict=True))


def spied(model, cache) -> list[tuple[int, float]]:
    """Tokens seen, and the most that a row holds per head, after each forward."""
    found: list[tuple[int, float]] = []
    model.register_forward_hook(lambda *_: found.append((cache.seen, float(cache.held().double().mean((1, 2)).max()))))
    return found


@pytest.mark.parametrize(
    "plan", ["streaming @ tokens=20", "snapkv(window=6) + adakv @ tokens=20", "h2o(recent=6) @ tokens=20, slack=3"]
)
@pytest.mark.parametrize("chunk", [16, 33])
def test_a_chunked_prefill_never_holds_more_than_its_budget_and_a_chunk(
    plan: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    ids, mask = prompts((190, 150))
    cache = kvtailor.cache_for(model, plan)
    after, during = spied(model, cache), []
    append = LayerState.append

    def spying(self, *args, **kwargs):
        append(self, *args, **kwargs)
        during.append(float(self.counts().double().mean(1).max()))

    monkeypatch.setattr(LayerState, "append", spying)
    ledgers = []
    model.register_forward_hook(lambda *_: ledgers.append(cache.ledger()))
    kvtailor.prefill(model, ids, mask, cache=cache, chunk=chunk)
    assert [seen for seen, _ in after] == [*range(chunk, 190, chunk), 190]
    assert 0 < max(held for _, held in after) <= 20
    assert chunk < max(during) <= 20 + chunk + 6
    assert all(each.total == each.closed_form for each in ledgers)
    assert max(each.total for each in ledgers) < 0.5 * ledgers[-1].full


@pytest.mark.parametrize(("plan", "most"), [("streaming @ tokens=20", 52), ("snapkv(window=6) @ tokens=20", 100)])
def test_single_tokens_are_fed_as_decoded_ones(plan: str, most: int) -> None:
    """They are cut back as the plan's slack says, or never."""
    model = build("llama")
    cache = kvtailor.cache_for(model, plan)
    after = spied(model, cache)
    kvtailor.prefill(model, prompts((100,))[0], cache=cache, chunk=1)
    assert max(held for _, held in after) == most


def test_the_last_chunk_is_never_a_single_token() -> None:
    model = build("llama")
    ids, _ = prompts((49,))
    for chunk, expected in ((16, [16, 32, 47, 49]), (24, [24, 47, 49]), (2, [*range(2, 48, 2), 47, 49]), (49, [49])):
        cache = kvtailor.cache_for(model, "snapkv(window=6) @ tokens=16")
        found = spied(model, cache)
        kvtailor.prefill(model, ids, cache=cache, chunk=chunk)
        assert [seen for seen, _ in found] == expected
        assert cache.held().unique().tolist() == [16]


@pytest.mark.parametrize(("plan", "chunk"), crossed(PLANS, [1, 7]))
@torch.no_grad()
def test_held_chunks_leave_what_the_whole_context_leaves(plan: str, chunk: int | None) -> None:
    model = build("llama")
    ids, mask = prompts((48, 31))
    whole, held = kvtailor.prefill(model, ids, mask, plan=plan), kvtailor.cache_for(model, plan)
    found = spied(model, held)
    kvtailor.prefill(model, ids, mask, cache=held, chunk=chunk, hold=True)
    assert found[-1] == (48, 48.0), "something was dropped before the whole context was seen"
    assert held.ledger().by_stage.keys() == whole.ledger().by_stage.keys()
    assert torch.equal(held.held(), whole.held())
    token, mask = prompts((1, 1), state=7)[0], torch.cat([mask, mask[:, -1:]], 1)
    mine, theirs = (model(token, attention_mask=mask, **hand_cache(cache)).logits for cache in (held, whole))
    assert error(mine, theirs) < 1e-4


@torch.no_grad()
def test_a_used_cache_goes_on_with_what_follows() -> None:
    model = build("llama")
    ids, mask = prompts((48, 31))
    plan = "snapkv(window=6) @ tokens=16"
    cache = kvtailor.prefill(model, ids[:, :30], mask[:, :30], plan=plan)
    kvtailor.prefill(model, ids[:, 30:], mask, cache=cache)
    chunked = kvtailor.prefill(model, ids, mask, plan=plan, chunk=30)
    assert cache.seen == chunked.seen == 48
    for a, b in zip(held_columns(cache).values(), held_columns(chunked).values(), strict=True):
        assert torch.equal(a, b)


def test_what_does_not_fit_together_is_said_before_anything_is_fed() -> None:
    model = build("llama")
    ids, mask = prompts((30, 20))
    cache = kvtailor.cache_for(model, "snapkv(window=6) @ tokens=16")
    for arguments, sentence in (
        ({"attention_mask": mask[:, :20]}, r"must be \(2, 30\), and is \(2, 20\)"),
        ({"chunk": 0}, "chunk=0"),
        ({"input_ids": ids[:, :0]}, r"\(2, 0\)"),
        ({"input_ids": ids[0]}, r"\(30,\)"),
    ):
        with pytest.raises(CacheMisuse, match=sentence):
            kvtailor.prefill(model, cache=cache, **{"input_ids": ids, **arguments})
    assert cache.seen == 0


@pytest.mark.parametrize("plan", TWICE)
def test_a_session_reads_a_prompt_twice_by_itself(plan: str) -> None:
    model = build("llama")
    ids, mask = prompts((40, 29))
    options = {"max_new_tokens": 6, "do_sample": False}
    with kvtailor.session(model, plan) as s:
        found = s.generate(ids, attention_mask=mask, **options)
        assert s.last.held().double().mean() < 30
        by_hand = kvtailor.prefill(model, ids[:, :-1], mask[:, :-1], plan=plan)
        assert torch.equal(found, model.generate(ids, attention_mask=mask, **hand_cache(by_hand), **options))
        assert torch.equal(s.generate(input_ids=ids, attention_mask=mask, **options), found)
        several = s.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False)
        assert several.shape == (2, 44) and s.last.held().shape[0] == 6
        drawn = s.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=True, num_return_sequences=2)
        assert drawn.shape == (4, 44)
        assert s.generate(ids[:1, -1:], **options).shape == (1, 7)
        cache = s.prefill(ids, mask, chunk=16)
        assert cache is s.last and cache.seen == 40


@pytest.mark.parametrize("plan", TWICE)
def test_prompt_lookup_behind_a_prompt_that_was_read_twice_is_right_or_refused(plan: str) -> None:
    """transformers feeds all of it once more, to its own cache too, and gets another text."""
    own, model, ids = build("llama"), build("llama"), prompts((40,))[0].repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 6, "do_sample": False}
    cache = DynamicCache(config=own.config)
    with torch.no_grad():
        own(ids[:, :-1], **hand_cache(cache))
    own.generate(ids, **hand_cache(cache), **options)
    with kvtailor.session(model, plan) as s:
        if cache.get_seq_length() > 86:
            with pytest.raises(CacheMisuse, match="feed the whole prompt again|pass a mask of"):
                s.generate(ids, **options)
        else:
            plain = s.generate(ids, max_new_tokens=6, do_sample=False)
            assert torch.equal(s.generate(ids, **options), plain)


@torch.no_grad()
def test_recorded_tokens_are_fewer_than_those_before() -> None:
    model, (ids, _) = build("llama"), prompts((40,))
    cache = kvtailor.prefill(model, ids[:, :10], plan="snapkv(window=6) @ tokens=16")
    cache.activate_past_recording()
    with pytest.raises(CacheMisuse, match="10 tokens when recording began, and 30 come at once"):
        model(ids[:, 10:], **hand_cache(copy.deepcopy(cache)))
    few = kvtailor.prefill(model, ids[:, :30], plan="snapkv(window=6) @ tokens=16")
    few.activate_past_recording()
    model(ids[:, 30:], **hand_cache(few))
    few.crop(-3)
    assert few.seen == 37
    model(ids, **hand_cache(few))


@torch.no_grad()
def test_a_session_scores_after_a_context_that_was_read_twice() -> None:
    """The first token from the full context, the others from what a prefill leaves of it."""
    model = build("llama")
    ids, _ = prompts((40,))
    plan = "kvzip @ keep=0.4"
    with kvtailor.session(model, plan) as s:
        scores = s.score(ids[:, :30], ids[:, 30:])
        full = model(ids[:, :30], **hand_cache(kvtailor.cache_for(model, "full"))).logits[:, -1:]
        cache = kvtailor.prefill(model, ids[:, :30], plan=plan)
        rest = model(ids[:, 30:-1], **hand_cache(cache)).logits
    expected = torch.cat([full, rest], 1).log_softmax(-1).gather(-1, ids[:, 30:, None])[..., 0]
    assert error(scores, expected) < ROUNDING


class Words:
    """A tokenizer whose every character is a token."""

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool):
        assert not add_special_tokens
        return {"input_ids": [3 + ord(letter) % 128 for letter in text]}


@torch.no_grad()
def test_a_tokenizer_makes_the_instruction() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    plan = "kvzip @ keep=0.5, slack=9"
    told = kvtailor.prefill(model, ids, plan=plan, tokenizer=Words())
    spelled = kvtailor.prefill(
        model,
        ids,
        plan=plan,
        instruction=[3 + ord(c) % 128 for c in "\n\nNow repeat all of the text above, word for word:\n"],
    )
    silent = kvtailor.prefill(model, ids, plan=plan)
    looked = [cache.engine.states[0].observed.reconstruction for cache in (told, spelled, silent)]
    assert torch.equal(looked[0], looked[1]) and error(looked[2], looked[0]) > 1e-3


@torch.no_grad()
def test_a_saved_context_is_asked_in_another_cache(tmp_path) -> None:
    model = build("llama")
    ids, mask = prompts((48, 31))
    question = prompts((7, 7), state=5)[0]
    for plan in TWICE:
        cache = kvtailor.prefill(model, ids, mask, plan=plan)
        cache.save(tmp_path / "context.safetensors")
        later = kvtailor.load_cache(model, tmp_path / "context.safetensors")
        assert torch.equal(asked(model, later, ids, mask, question), asked(model, cache, ids, mask, question))


@torch.no_grad()
@pytest.mark.parametrize(("window", "same"), [(4, True), (8, False)])
def test_windows_of_a_padded_second_turn_are_counted_in_columns(window: int, same: bool) -> None:
    """A row whose turn is as long as the window holds what it holds alone, and a shorter one need not."""
    model, ids, (asked, mask) = build("llama"), prompts((40,))[0], prompts((9, 4), state=7)
    plan = f"snapkv(window={window}) @ tokens=20"
    cache, alone = kvtailor.prefill(model, ids, plan=plan), kvtailor.prefill(model, ids, plan=plan)
    cache.batch_repeat_interleave(2)
    kvtailor.prefill(model, asked, torch.cat([mask.new_ones(2, 40), mask], 1), cache=cache)
    kvtailor.prefill(model, asked[1:, -4:], cache=alone)
    found = [held_columns(each)[layer][row] for each, row in ((cache, 1), (alone, 0)) for layer in range(3)]
    batched, solo = torch.stack(found[:3]), torch.stack(found[3:])
    # Five columns of padding stand between the context and the turn of the shorter row.
    assert torch.equal(torch.cat([batched[..., :40], batched[..., 45:]], -1), solo) is same
