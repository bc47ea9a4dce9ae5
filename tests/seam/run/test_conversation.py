"""A used cache gets what does not continue it: one sentence that shows the right call, never an answer."""

from __future__ import annotations

import copy
from pathlib import Path

import jinja2
import pytest
import torch
from torch import Tensor

import kvtailor
from kvtailor.errors import CacheMisuse
from kvtailor.hf.conversation import NOTES, Conversation
from kvtailor.hf.versions import CACHE_ARGUMENT, hand_cache
from tests.support.seam.zoo import COMPRESSIBLE, build, prompts

SNAP = "snapkv(window=6) @ tokens=16"
GREEDY = {"max_new_tokens": 3, "do_sample": False}


def other(length: int, state: int = 9) -> Tensor:
    return prompts((length,), state=state)[0]


# 40 seen: transformers feeds nothing of up to 20 tokens, a part of 21 to 39, and all of 40 once more.
@pytest.mark.parametrize("family", ["mistral_window", *COMPRESSIBLE])
@pytest.mark.parametrize("length", [1, 20, 21, 30, 40])
@pytest.mark.filterwarnings("ignore:all 3 layers")
def test_a_question_alone_is_refused_through_plain_generate(family: str, length: int) -> None:
    model = build(family)
    cache = kvtailor.prefill(model, prompts((40,))[0], plan=SNAP)
    with pytest.raises(CacheMisuse, match="whole conversation|columns") as caught:
        model.generate(other(length), **hand_cache(cache), **GREEDY)
    assert "40 tokens" in str(caught.value) and f"{CACHE_ARGUMENT}=cache" in str(caught.value)


@pytest.mark.parametrize("rows", [(40, 33), (40, 40)])
def test_a_padded_batch_of_questions_alone_is_refused(rows: tuple[int, int]) -> None:
    model = build("llama")
    ids, mask = prompts(rows)
    for lengths in ((10, 10), (30, 30), (30, 24), (40, 40), (37, 37)):
        question, real = prompts(lengths, state=4)
        cache = kvtailor.prefill(model, ids, mask, plan=SNAP)
        for given in ({}, {"attention_mask": real}):
            with pytest.raises(CacheMisuse, match=f"{CACHE_ARGUMENT}=cache|padding"):
                model.generate(question, **hand_cache(copy.deepcopy(cache)), **given, **GREEDY)


def test_what_was_refused_left_the_cache_as_it_was() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    whole = torch.cat([ids, other(5)], 1)
    expected = model.generate(whole, **hand_cache(copy.deepcopy(cache)), **GREEDY)
    for length in (10, 30, 40, 60):
        with pytest.raises(CacheMisuse):
            model.generate(other(length), **hand_cache(cache), **GREEDY)
    with kvtailor.session(model, SNAP) as s, pytest.raises(CacheMisuse):
        s.generate(other(50), **hand_cache(cache), **GREEDY)
    assert torch.equal(model.generate(whole, **hand_cache(cache), **GREEDY), expected)


@pytest.mark.parametrize("family", COMPRESSIBLE)
def test_right_calls_stay_right(family: str) -> None:
    """All ids, new ids with the whole mask, a forward of new ids alone, chunks; padded and not."""
    model = build(family)
    for lengths in ((40,), (40, 31)):
        ids, mask = prompts(lengths)
        new = prompts((6,) * len(lengths), state=3)[0]
        whole, seen = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        cache = kvtailor.prefill(model, ids, mask, plan=SNAP)
        found = model.generate(whole, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        alone = model.generate(new, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        assert torch.equal(alone[:, 6:], found[:, 46:])
        with torch.no_grad():
            logits = model(new, attention_mask=seen if len(lengths) > 1 else None, **hand_cache(cache)).logits
        if len(lengths) == 1:
            assert torch.equal(logits[:, -1].argmax(-1), found[:, 46])


def made(model, how: str, ids: Tensor, mask: Tensor, folder: Path):
    """A cache that has seen (b, n) ids, by one of the ways in which kvtailor sees them too."""
    if how == "prefill":
        return kvtailor.prefill(model, ids, mask, plan=SNAP)
    if how == "chunks":
        return kvtailor.prefill(model, ids, mask, plan=SNAP, chunk=7)
    if how == "pieces":
        cache = kvtailor.prefill(model, ids[:, :25], mask[:, :25], plan=SNAP)
        return kvtailor.prefill(model, ids[:, 25:], mask, cache=cache)
    if how == "reset":
        cache = kvtailor.prefill(model, other(33).expand(len(ids), -1), plan=SNAP)
        cache.reset()
        return kvtailor.prefill(model, ids, mask, cache=cache)
    if how == "saved":
        kvtailor.prefill(model, ids, mask, plan=SNAP).save(folder / "cache")
        return kvtailor.load_cache(model, folder / "cache")
    if how == "generate":
        return kvtailor.generate(model, ids, mask, plan=SNAP, max_new_tokens=1, eos_token_id=[]).cache
    with kvtailor.session(model, SNAP) as s:
        if how == "session":
            return s.prefill(ids, mask)
        s.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
        return s.last


@pytest.mark.parametrize(
    "how", ["prefill", "chunks", "pieces", "reset", "saved", "generate", "session", "session.generate"]
)
@pytest.mark.parametrize("lengths", [(40,), (40, 31)])
def test_a_session_refuses_another_conversation_and_goes_on_with_its_own(
    how: str, lengths: tuple[int, ...], tmp_path: Path
) -> None:
    """In the last, any one token of any row is another one; nothing but lengths would let it pass."""
    model = build("llama")
    ids, mask = prompts(lengths)
    cache = made(model, how, ids, mask, tmp_path)
    new = prompts((8,) * len(lengths), state=3)[0]
    whole, seen = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
    with kvtailor.session(model, SNAP) as s:
        for row in range(len(lengths)):
            for column in (9, 20, 35):
                wrong = whole.clone()
                wrong[row, column] = 3 + (wrong[row, column] - 2) % 100
                with pytest.raises(CacheMisuse, match=f"row {row} .*another conversation") as caught:
                    s.generate(wrong, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
                assert f"{CACHE_ARGUMENT}=cache" in str(caught.value)
        for question in (new, whole[:, :30], whole[:, : cache.seen]):
            with pytest.raises(CacheMisuse, match="whole conversation"):
                s.generate(question, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        expected = model.generate(whole, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        # What stands at padding says nothing.
        whole = whole.masked_fill(seen == 0, 17)
        found = s.generate(whole, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        assert torch.equal(found[:, whole.shape[1] :], expected[:, whole.shape[1] :])
        alone = s.generate(new, attention_mask=seen, **hand_cache(copy.deepcopy(cache)), **GREEDY)
        assert torch.equal(alone[:, 8:], expected[:, 48:])


def test_turns_of_a_session_are_followed_answers_included() -> None:
    model = build("llama")
    ids, _ = prompts((30,))
    with kvtailor.session(model, SNAP) as s:
        one = s.generate(ids, **GREEDY)
        cache = s.last
        two = s.generate(torch.cat([one, other(5)], 1), **hand_cache(cache), **GREEDY)
        wrong = torch.cat([two, other(5)], 1)
        wrong[0, 31] += 1
        with pytest.raises(CacheMisuse, match="row 0 .*another conversation"):
            s.generate(wrong, **hand_cache(cache), **GREEDY)
        three = s.generate(torch.cat([two, other(5)], 1), **hand_cache(cache), **GREEDY)
        alone = other(4, state=2)
        everything = torch.ones((1, cache.seen + 4), dtype=torch.int64)
        s.generate(alone, attention_mask=everything, **hand_cache(cache), **GREEDY)
        assert three.shape == (1, 49) and cache.conversation.columns == cache.seen


@pytest.mark.parametrize("lengths", [(40,), (40, 31)])
def test_plain_generate_follows_its_own_prompts_and_refuses_others(lengths: tuple[int, ...]) -> None:
    model = build("llama")
    ids, mask = prompts(lengths)
    cache = kvtailor.cache_for(model, SNAP)
    out = model.generate(ids, attention_mask=mask, **hand_cache(cache), **GREEDY)
    assert cache.conversation.columns == 42 and cache.seen == 42
    whole = torch.cat([out, other(5).expand(len(lengths), -1)], 1)
    seen = torch.cat([mask, mask.new_ones((len(lengths), 8))], 1)
    wrong = whole.clone()
    wrong[-1, 39] += 1
    with pytest.raises(CacheMisuse, match=f"row {len(lengths) - 1} is another conversation"):
        model.generate(wrong, attention_mask=seen, **hand_cache(cache), **GREEDY)
    model.generate(whole, attention_mask=seen, **hand_cache(cache), **GREEDY)
    assert cache.conversation.columns == 50 and cache.seen == 50


@pytest.mark.parametrize("line", ["full", "snapkv(window=6) @ tokens=24"])
def test_a_mask_that_hides_what_a_row_got_behind_its_end_is_no_other_conversation(line: str, tmp_path: Path) -> None:
    """Row 0 ends early: `generate()` fills it up, and masks of later turns hide what it was filled with."""
    model = build("llama")
    ids, end, cache = other(40).repeat(2, 1), 7, kvtailor.cache_for(model, line)
    mask, asked = torch.ones_like(ids), {"pad_token_id": 0, "eos_token_id": end, "do_sample": False}
    for turn in range(4):
        first = ids.shape[1]

        def allowed(row: int, so_far: Tensor, first: int = first) -> list[int]:
            return [end] if row == 0 and len(so_far) == first + 2 else [11]

        handed = {**hand_cache(cache), "prefix_allowed_tokens_fn": allowed, "max_new_tokens": 6}
        out = model.generate(ids, attention_mask=mask, **handed, **asked)
        assert out[0, first:].tolist() == [11, 11, end, 0, 0, 0] and out[1, first:].tolist() == [11] * 6
        answered = torch.ones(2, 6, dtype=torch.long)
        answered[0, 3:] = 0
        new = other(5, state=turn).repeat(2, 1)
        ids, mask = torch.cat([out, new], 1), torch.cat([mask, answered, torch.ones_like(new)], 1)
    cache.save(tmp_path / "saved")
    for each in (cache, kvtailor.load_cache(model, tmp_path / "saved")):
        changed = ids.clone()
        changed[0, 42] = 13
        with pytest.raises(CacheMisuse, match="row 0 is another conversation .* differ"):
            each.check_ids(changed)
        each.check_ids(ids)


def test_what_a_broken_forward_left_says_so_when_the_call_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build("llama"), other(40)
    cache = kvtailor.cache_for(model, "full")
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[0].mlp, "forward", _fails)
        with pytest.raises(RuntimeError):
            model.generate(ids, **hand_cache(cache), max_new_tokens=2)
    with pytest.raises(CacheMisuse, match="a forward on this cache ended at layer 0"):
        model.generate(ids, **hand_cache(cache), max_new_tokens=2)


def test_a_mask_that_fits_neither_all_tokens_nor_the_new_ones_is_refused() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    for tokens, columns in ((5, 60), (50, 47), (5, 40)):
        with pytest.raises(CacheMisuse, match=f"{columns} columns.*{tokens} tokens"):
            mask = torch.ones((1, columns), dtype=torch.int64)
            model.generate(other(tokens), attention_mask=mask, **hand_cache(cache), **GREEDY)


def test_embeddings_are_judged_by_their_length() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    embedded = model.model.embed_tokens(torch.cat([ids, other(6)], 1)).detach()
    for length in (10, 30, 40):
        with pytest.raises(CacheMisuse, match=f"seen 40 tokens, and got a conversation of {length}"):
            model.generate(inputs_embeds=embedded[:, :length], **hand_cache(cache), **GREEDY)
    expected = model.generate(torch.cat([ids, other(6)], 1), **hand_cache(copy.deepcopy(cache)), **GREEDY)
    assert torch.equal(model.generate(inputs_embeds=embedded, **hand_cache(cache), **GREEDY), expected[:, 46:])


def test_a_prompt_that_was_not_fed_after_all_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    cache = kvtailor.cache_for(model, SNAP)
    with monkeypatch.context() as broken, pytest.raises(RuntimeError, match="no memory"):
        broken.setattr(model.lm_head, "forward", _fails)
        broken.setattr(model.model, "forward", _fails)
        model.generate(other(40), **hand_cache(cache), **GREEDY)
    out = model.generate(other(45, state=2), **hand_cache(cache), **GREEDY)
    cache.check_ids(torch.cat([out, other(3)], 1))


def _fails(*_: object, **__: object) -> None:
    raise RuntimeError("no memory")


def test_rows_move_with_their_hashes() -> None:
    model = build("llama")
    ids, mask = prompts((40, 31, 36))
    cache = kvtailor.prefill(model, ids, mask, plan=SNAP)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
    kept = torch.tensor([2, 2, 0, 0])
    new = other(5).expand(4, -1)
    whole, seen = torch.cat([ids[kept], new], 1), torch.cat([mask[kept], torch.ones_like(new)], 1)
    cache.check_ids(whole)
    with pytest.raises(CacheMisuse, match="row 0"):
        cache.check_ids(torch.cat([ids[kept.flip(0)], new], 1))
    with pytest.raises(CacheMisuse, match="holds 4 rows, and got token ids .3, 45"):
        cache.check_ids(torch.cat([ids, other(5).expand(3, -1)], 1))
    with kvtailor.session(model, SNAP) as s:
        found = s.generate(
            whole[1:3],
            attention_mask=seen[1:3],
            **hand_cache(_repeated(model, ids, mask)),
            num_beams=2,
            max_new_tokens=3,
        )
        assert found.shape[0] == 2


def _repeated(model, ids: Tensor, mask: Tensor):
    cache = kvtailor.prefill(model, ids[[2, 0]], mask[[2, 0]], plan=SNAP)
    cache.batch_repeat_interleave(2)
    return cache


def test_what_beams_leave_is_no_conversation_of_the_sequences_they_returned() -> None:
    model = build("llama")
    ids, mask = prompts((40, 31))
    with kvtailor.session(model, SNAP) as s:
        s.generate(ids, attention_mask=mask, num_beams=2, **GREEDY)
        assert s.last.conversation.columns == 40 < s.last.seen
        with pytest.raises(CacheMisuse, match="beam search has left its beams in this cache"):
            s.last.check_ids(torch.cat([ids.repeat_interleave(2, 0), other(9).expand(4, -1)], 1))
        s.generate(ids, attention_mask=mask, num_return_sequences=2, max_new_tokens=3, do_sample=True)
        assert s.last.conversation.columns == s.last.seen == 42


def test_the_whole_conversation_again_is_no_prefill() -> None:
    """Without a mask nothing else would tell that the context comes twice."""
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids, plan=SNAP)
    with pytest.raises(CacheMisuse, match=r"input_ids\[:, 40:\]"):
        kvtailor.prefill(model, torch.cat([ids, other(5)], 1), cache=cache)
    assert cache.seen == 40
    kvtailor.prefill(model, other(5), cache=cache)
    # The same words twice may be meant; and what begins with a word or two as the cache does is no conversation.
    small = kvtailor.prefill(model, ids[:, :4], plan=SNAP)
    kvtailor.prefill(model, ids[:, :12], cache=small)
    again = kvtailor.prefill(model, ids, plan=SNAP)
    with pytest.warns(UserWarning, match="these 40 token ids are those that this cache has seen"):
        kvtailor.prefill(model, ids, cache=again)
    assert again.seen == 80


@torch.no_grad()
def test_a_crop_takes_the_knowledge_back_with_the_tokens() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.prefill(model, ids[:, :30], plan="full")
    kvtailor.prefill(model, ids[:, 30:], cache=cache)
    cache.crop(-4)
    assert cache.seen == 36 and cache.conversation.columns == 36
    fresh = torch.cat([ids[:, :36], other(6)], 1)
    cache.check_ids(fresh)
    wrong = fresh.clone()
    wrong[0, 35] += 1
    with pytest.raises(CacheMisuse, match="another conversation"):
        cache.check_ids(wrong)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral_window", "gpt2", "opt"])
@pytest.mark.parametrize(
    "fed", ["one tensor", "new tensors", "new tensors that were written to", "slices", "inference"]
)
@pytest.mark.filterwarnings("ignore:all 3 layers", "ignore:no layer")
def test_what_plain_forwards_fed_is_known(family: str, fed: str) -> None:
    model = build(family)
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, "full")
    with torch.inference_mode() if fed == "inference" else torch.no_grad():
        model(ids[:, :30], **hand_cache(cache))
        step, text = ids[:, 30:31].clone(), ids.new_zeros((1, 40))
        for column in range(30, 40):
            if fed == "new tensors that were written to":
                step = torch.empty_like(step)
            elif fed == "slices":
                step = text[:, column : column + 1]
            step.copy_(ids[:, column : column + 1])
            model(step.clone() if fed == "new tensors" else step, **hand_cache(cache))
    # Before anybody has looked, and after.
    assert copy.deepcopy(cache).conversation.columns == cache.conversation.columns == 40
    cache.check_ids(torch.cat([ids, other(5)], 1))
    for column in (3, 29, 30, 35, 39):
        wrong = torch.cat([ids, other(5)], 1)
        wrong[0, column] = (wrong[0, column] + 1) % 131
        with pytest.raises(CacheMisuse, match="another conversation"):
            copy.deepcopy(cache).check_ids(wrong)
        with pytest.raises(CacheMisuse, match="another conversation"):
            model.generate(wrong, **hand_cache(copy.deepcopy(cache)), **GREEDY)
    with pytest.raises(CacheMisuse, match="whole conversation"):
        cache.check_ids(other(40))


REASONS = "<think>the harbour has a code, 48213</think>"
ANSWER = "It is 48213."
KEEPS = """{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% endfor %}{% if open %}<assistant>{% endif %}"""
# As those of Qwen 3 and of DeepSeek R1.
STRIPS = KEEPS.replace("m.content", "m.content.split('</think>')[-1]")


def written(template: str, *turns: str) -> Tensor:
    """(1, n) ids of a chat, one for each character."""
    roles = ["user", "assistant"] * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    text = jinja2.Template(template).render(messages=messages, open=len(turns) % 2 == 1)
    return torch.tensor([[ord(each) for each in text]])


@pytest.mark.parametrize("how", ["generate", "forwards", "a session", "sampled rows"])
@pytest.mark.parametrize("question", ["And the island?", "And the island? " * 6])
def test_a_template_that_leaves_reasoning_out_of_earlier_turns_is_noticed(how: str, question: str) -> None:
    """What plain `generate` wrote is known as well, and what a loop of plain forwards has fed."""
    model = build("llama")
    turns = "What is the code?", REASONS + ANSWER
    first, answer = written(KEEPS, turns[0]), written("{{ messages[0].content }}", turns[1])
    rows = 2 if how == "sampled rows" else 1
    said = torch.cat([first, answer], 1)

    def forced(_: int, ids: Tensor) -> list[int]:
        return [int(said[0, min(len(ids), said.shape[1] - 1)])]

    words = {"max_new_tokens": answer.shape[1], "prefix_allowed_tokens_fn": forced}
    cache = kvtailor.cache_for(model, SNAP)
    if how == "forwards":
        with torch.no_grad():
            new = first
            for column in range(first.shape[1], said.shape[1]):
                model(new, **hand_cache(cache))
                new = said[:, column : column + 1]
    elif how == "a session":
        with kvtailor.session(model, SNAP) as s:
            s.generate(first, **words)
            cache = s.last
    else:
        more = {"do_sample": True, "num_return_sequences": 2} if rows == 2 else {"do_sample": False}
        assert torch.equal(model.generate(first, **hand_cache(cache), **words, **more), said.expand(rows, -1))
    assert cache.seen == said.shape[1] - 1
    stripped, kept = (written(each, *turns, question).expand(rows, -1) for each in (STRIPS, KEEPS))
    for _ in range(2):
        with pytest.raises(CacheMisuse, match="leaves the reasoning out of earlier turns") as caught:
            model.generate(stripped, **hand_cache(cache), **GREEDY)
        # A short one is told by its length.
        assert stripped.shape[1] <= cache.seen or f"from column {first.shape[1]} on" in str(caught.value)
    found = model.generate(kept, **hand_cache(copy.deepcopy(cache)), **GREEDY)
    with kvtailor.session(model, SNAP) as s:
        assert torch.equal(s.generate(kept, **hand_cache(cache), **GREEDY), found)


def test_ids_of_forwards_are_of_rows_and_of_what_is_left() -> None:
    model = build("llama")
    ids, mask = prompts((40, 33))
    cache = kvtailor.cache_for(model, "full")
    with torch.no_grad():
        model(ids[:, :38], attention_mask=mask[:, :38], **hand_cache(cache))
        embedded = model.get_input_embeddings()(ids[:, 38:39])
        model(inputs_embeds=embedded, attention_mask=mask[:, :39], **hand_cache(cache))
        model(ids[:, 39:], attention_mask=mask, **hand_cache(cache))
    # What embeddings brought has no ids, and what came behind it cannot join.
    assert cache.conversation.columns == 38
    whole = torch.cat([ids, other(5).expand(2, -1)], 1)
    cache.check_ids(whole)
    padded = whole.clone()
    padded[1, 0] += 1
    cache.check_ids(padded)
    swapped = copy.deepcopy(cache)
    swapped.batch_select_indices(torch.tensor([1, 0]))
    swapped.check_ids(whole.flip(0))
    with pytest.raises(CacheMisuse, match="another conversation"):
        swapped.check_ids(whole)


def test_a_forward_that_was_refused_leaves_no_ids() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, SNAP)
    with torch.no_grad():
        model(ids, **hand_cache(cache))
        with pytest.raises(CacheMisuse):
            model(other(4), attention_mask=torch.ones((1, 1, 2, 2), dtype=torch.bool), **hand_cache(cache))
        with pytest.raises(CacheMisuse):
            model(other(4).expand(2, -1), **hand_cache(cache))
        model(ids[:, :3], **hand_cache(cache))
    cache.check_ids(torch.cat([ids, ids[:, :3], other(5)], 1))
    assert cache.conversation.columns == 43


def test_many_notes_are_joined_and_cost_eight_bytes_a_token() -> None:
    model = build("llama")
    ids, _ = prompts((300,))
    cache = kvtailor.cache_for(model, "full")
    with torch.no_grad():
        model(ids[:, :100], **hand_cache(cache))
        for column in range(100, 300):
            model(ids[:, column : column + 1].clone(), **hand_cache(cache))
    known = cache._conversation
    assert known.columns == 0 and 0 < len(known.notes) <= NOTES
    cache.crop(-10)
    assert cache.conversation is known and known.columns == 290 and not known.notes
    assert known.bytes == 8 * 290
    other_way = Conversation()
    other_way.append(ids[:, :290], None, at=0)
    assert known.known[-1] == other_way.known[-1]


def test_passes_over_a_context_leave_no_ids() -> None:
    """They were taken back, and would be bytes beside the ledger."""
    model = build("llama")
    cache = kvtailor.prefill(model, prompts((60,))[0], plan="kvzip @ keep=0.5")
    assert not cache._conversation.notes and cache._conversation.columns == 60


def test_hashes_are_of_ids_in_order_and_join() -> None:
    ids = torch.tensor([[5, 0, 7, 2], [0, 5, 7, 2]])
    at_once, joined = Conversation(), Conversation()
    at_once.append(ids, None, at=0)
    joined.append(ids[:, :1], None, at=0)
    joined.append(ids[:, 1:], None, at=1)
    assert at_once.known[-1] == joined.known[-1]
    assert len(set(at_once.known[-1].hashes)) == 2
    joined.append(ids, None, at=9)
    assert joined.columns == 4
    # Padding is not a token with the id 0.
    real = torch.tensor([[True] * 4, [False, True, True, True]])
    padded = Conversation()
    padded.append(ids, real, at=0)
    assert padded.known[-1].hashes[0] == at_once.known[-1].hashes[0]
    assert padded.known[-1].hashes[1] != at_once.known[-1].hashes[1]


@torch.no_grad()
def test_a_cache_says_what_it_is() -> None:
    model = build("llama")
    ids, _ = prompts((40,))
    cache = kvtailor.cache_for(model, SNAP)
    assert repr(cache) == "KvCache('snapkv(window=6) @ tokens=16', seen=0)"
    kvtailor.prefill(model, ids, cache=cache)
    ledger = cache.ledger()
    assert repr(cache) == (
        f"KvCache('snapkv(window=6) @ tokens=16', seen=40, held=16.0, bytes={ledger.total} of {ledger.full})"
    )
