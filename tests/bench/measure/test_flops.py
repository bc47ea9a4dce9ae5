"""Arithmetic is known by hand, and by torch's own counter on the model's own forward."""

import warnings
from dataclasses import replace

import pytest
import torch
import transformers
from tests.contract.test_score import rows_of
from tests.support.bench.dummy import FULL, UniformModel, subject
from tests.support.discover import sample_of
from tests.support.held_rows import held_of
from tests.support.seam import zoo
from torch.utils.flop_counter import FlopCounterMode

from kvtailor.attend.contract import FlopsRequest
from kvtailor.bench.contestant import OWN, Contestant
from kvtailor.bench.measure.flops import CountedFlops, Weights, count, prefill_flops, token_flops
from kvtailor.bench.subject import Subject
from kvtailor.encode.hadamard import Hadamard
from kvtailor.encode.kivi import Kivi
from kvtailor.encode.unrotated import Unrotated
from kvtailor.encode.vector import Vector
from kvtailor.hf.model.geometry import Geometry
from kvtailor.hf.versions import hand_cache, read_cache
from kvtailor.ops.dispatch import using
from kvtailor.plan import registry
from kvtailor.score.contract import Scorer
from kvtailor.score.snapkv import SnapKV

ROWS, PROMPT = 3, 17
EVERY = [(stage, name) for stage in registry.stages() if stage != "store" for name in registry.methods(stage)]


def tiny(layers: int = 1) -> transformers.PreTrainedModel:
    """6 query heads, 3 kv heads of size 10: 23400 weights of a layer multiply, and 5820 in the output head."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=60,
        intermediate_size=70,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=10,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def work(plan: str, tokens: int = 4, model=None, prompt: int = PROMPT) -> CountedFlops:
    ids = torch.randint(97, (ROWS, prompt), generator=torch.Generator().manual_seed(1))
    one = OWN if plan == "own" else Contestant.of(plan)
    found = count(Subject(name="tiny", model=model or tiny()), one, ids, tokens)
    assert found is not None
    return found


def counted(model: torch.nn.Module, ids: torch.Tensor, cache=None) -> tuple[int, object]:
    # The counter sees torch's own operations alone.
    with torch.inference_mode(), using("reference"), FlopCounterMode(display=False) as counter:
        cache = read_cache(model(input_ids=ids, **hand_cache(cache), use_cache=True, logits_to_keep=1))
    # Until 5.2x transformers makes the angles of the positions by a product, which no weight has a part in.
    angles = sum(
        sum(found.values()) for name, found in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - angles, cache


def test_full_by_hand() -> None:
    body, head = 60 * 60 * 2 + 60 * 30 * 2 + 3 * 60 * 70, 60 * 97
    assert Weights.of(tiny()) == Weights(body=body, head=head)
    for plan in ("full", "own"):
        found = work(plan)
        assert found.prefill == 3 * (2 * (17 * body + head) + 2 * 6 * 10 * 17**2) == 2_525_760
        # The three tokens after the first read 18, 19 and 20 tokens.
        assert found.token == 2 * (body + head) + 4 * 6 * 10 * 19 == 63_000
        assert found.method_prefill == 0 and found.method_token == 0


def test_what_was_evicted_is_not_read() -> None:
    found = work("position(sinks=2) @ tokens=8")
    assert found.prefill == 2_525_760
    assert found.token == 2 * (23_400 + 5_820) + 4 * 6 * 10 * 10
    assert found.method_prefill == found.method_token == 0


def test_snapkv_by_hand() -> None:
    found = work("snapkv(window=4, kernel=3) @ tokens=8")
    votes = 6 * 4 * 17 * (2 * 10 + 4 + 2)
    assert found.method_prefill == 3 * (votes + 3 * 17 * (2 + 3)) == 32_589
    assert found.method_token == 0
    assert work("snapkv(window=4, kernel=3, reduce='max', pooling='max') @ tokens=8").method_prefill == 3 * votes


def test_h2o_pays_for_its_mass_at_every_token() -> None:
    found = work("h2o(recent=3) @ tokens=8")
    assert found.method_prefill == 3 * 6 * 17**2
    assert found.method_token == 2 * 6 * (9 + 10 + 11) / 3
    assert work("h2o(recent=3, normalise=true) @ tokens=8").method_prefill == 3 * (6 * 17**2 + 3 * 17)


def test_a_walk_while_decoding_is_counted() -> None:
    # Held during the forwards: 9, 10, 11, of which the last is past the slack of 2 and so is scored.
    found = work("random @ tokens=8, slack=2")
    assert found.method_prefill == 3 * 3 * 17
    assert found.method_token == 3 * 11 / 3
    assert found.token == 2 * (23_400 + 5_820) + 4 * 6 * 10 * 10


def test_kivi_by_hand() -> None:
    # 16 tokens stay in full precision, and after 16 more a block of 16 is encoded at once.
    found = work("kivi(bits=4, group=8, recent=16)", tokens=34, prompt=45)
    one_way = lambda n: n * 20 * 2 + 2 * (-(-n // 8) * 10 + n * 2)  # noqa: E731
    assert found.method_prefill == 3 * 3 * one_way(29)
    read = 16 * 29 + 16 * 45 + 61
    assert found.method_token == pytest.approx(3 * (2 * one_way(16) + read * 2 * 20) / 33, rel=1e-12)
    assert found.token == 2 * (23_400 + 5_820) + 4 * 6 * 10 * (45 + 17)


def test_what_stands_in_other_coordinates_is_paid_for_by_the_query() -> None:
    """Channels of size 10 are five blocks of 2: 2 * 2 operations for each channel of a query and of a sum."""
    sizes = {"key_size": 10, "value_size": 10}
    rotated, codes = Hadamard(of=Vector(bits=8)), Vector(bits=8)
    for tokens in (1, 50):
        mapped = rotated.read_flops(tokens=tokens, queries=2, **sizes) - codes.decode_flops(tokens=tokens, **sizes)
        assert mapped == 2 * 2 * (2 * 2 * 10)
        # Turned back token by token: as much for each of them.
        assert Unrotated(of=rotated).read_flops(tokens=tokens, queries=2, **sizes) >= tokens * 2 * (2 * 2 * 10)
    # 3 kv heads with 2 query heads each, and what is encoded beside it costs the same in both.
    encoding = 3 * (rotated.encode_flops(tokens=1, **sizes) - codes.encode_flops(tokens=1, **sizes))
    plans = work("hadamard(of=vector(bits=8))", tokens=3), work("vector(bits=8)", tokens=3)
    assert plans[0].method_token - plans[1].method_token in (3 * 160, 3 * 160 + encoding)


def test_what_moves_as_codes_is_not_encoded_again() -> None:
    # The first forward after the prompt is past the slack: 5 tokens are in the tail, 20 in codes.
    found = work("position(sinks=2) + kivi(bits=4, group=4, recent=4) @ tokens=20, slack=0", tokens=2, prompt=40)
    codec = Kivi(bits=4, group=4, recent=4)
    sizes = {"key_size": 10, "value_size": 10}
    # Nothing is recent to this scorer, so all that stays of the prompt is encoded.
    assert found.method_prefill == 3 * 3 * codec.encode_flops(tokens=20, **sizes)
    # Read by attention, and counted once more for the eviction, which moves codes; the new token waits in the tail.
    assert found.method_token == 3 * 2 * codec.decode_flops(tokens=20, **sizes)


def test_ragged_heads_count_what_each_holds() -> None:
    model = zoo.build("llama")
    found = work("snapkv(window=4) + adakv(floor=0.1) @ tokens=12", model=model, prompt=40)
    cache = Subject(name="m", model=model).new_cache(Contestant.of("snapkv(window=4) + adakv(floor=0.1) @ tokens=12"))
    ids = torch.randint(97, (ROWS, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        model(input_ids=ids, **hand_cache(cache), use_cache=True)
    held = cache.held()
    assert len(set(held.flatten().tolist())) > 3
    weights = Weights.of(model)
    each = 4 * 2 * 16 * int((held + 2).sum()) / ROWS
    assert found.token == pytest.approx(2 * (weights.body + weights.head) + each, rel=1e-12)


def test_quest_reads_pages_and_pays_for_their_bounds() -> None:
    plan = "indexed(page=4, block_size=8) + quest(tokens=8, least=1, dense_layers=0)"
    found = work(plan, tokens=2, prompt=45)
    # All 45 tokens are stored in 12 pages; 2 pages (the last has 1 token) and the new token are read.
    assert found.method_token == 3 * 4 * 2 * 10 * 12
    least, most = (2 * (23_400 + 5_820) + 4 * 6 * 10 * read for read in (4 + 1 + 1, 8 + 1))
    assert least <= found.token <= most
    assert work(plan, tokens=2, prompt=48).token == 2 * (23_400 + 5_820) + 4 * 6 * 10 * 9


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_torch_counts_the_same_on_the_forward_of(family: str) -> None:
    """Torch counts all n x n of the attention, where the formula counts the causal half."""
    model = zoo.build(family, attention="eager")
    weights, geometry = Weights.of(model), Geometry.of(model.config)
    ids = torch.randint(97, (ROWS, PROMPT))
    square = 2 * geometry.q_heads * geometry.head_dim * PROMPT**2 * geometry.layers * ROWS
    total, cache = counted(model, ids)
    assert total - square == prefill_flops(
        weights,
        replace(geometry, shapes=tuple(replace(shape, window=None) for shape in geometry.shapes)),
        rows=ROWS,
        tokens=PROMPT,
    )
    read = sum(min(PROMPT + 1, window or PROMPT + 1) for window in geometry.windows) * geometry.kv_heads * ROWS
    assert counted(model, ids[:, :1], cache)[0] == token_flops(weights, geometry, rows=ROWS, read=read)


def test_windows_hide_what_is_older() -> None:
    model = zoo.build("gemma3")
    weights, geometry = Weights.of(model), Geometry.of(model.config)
    assert geometry.windows == (16, None, 16, None)
    matrices = 2 * (40 * weights.body + weights.head)
    attention = 2 * 4 * 16 * (2 * 40**2 + 2 * (40**2 - 24**2))
    assert prefill_flops(weights, geometry, rows=1, tokens=40) == matrices + attention
    for plan in ("own", "full"):
        token = work(plan, model=model, prompt=40).token
        assert token == 2 * (weights.body + weights.head) + 4 * 4 * 16 * 2 * (42 + 16)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_of_experts_only_the_chosen_ones_count(kind: str) -> None:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4} if kind == "mixtral" else {"num_experts": 4, "moe_intermediate_size": 32}
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts_per_tok=2,
        **experts,
    )
    # torch does not count the grouped products that are the default here.
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="batched_mm"
    ).eval()
    weights, geometry = Weights.of(model), Geometry.of(model.config)
    square = 2 * 4 * 16 * PROMPT**2 * 2 * ROWS
    total, _ = counted(model, torch.randint(97, (ROWS, PROMPT)))
    assert total - square == prefill_flops(weights, geometry, rows=ROWS, tokens=PROMPT)


def test_a_matrix_of_unknown_use_makes_it_unknown() -> None:
    model = tiny()
    model.model.layers[0].adapter = torch.nn.Module()
    model.model.layers[0].adapter.matrix = torch.nn.Parameter(torch.zeros(60, 4))
    assert Weights.of(model) is None
    ids = torch.zeros((1, 5), dtype=torch.int64)
    assert count(Subject(name="odd", model=model), OWN, ids, 2) is None
    assert count(subject(UniformModel()), FULL, ids, 2) is None


@pytest.mark.parametrize(("stage", "name"), EVERY, ids=lambda value: value)
def test_every_method_says_what_it_computes_or_that_it_does_not_know(stage: str, name: str) -> None:
    method = sample_of(registry.load(stage, name))
    for tokens in (1, 37, 4096):
        found = {
            "score": lambda n: [method.flops(tokens=n, group=3, size=20)],
            "allocate": lambda n: [method.flops(tokens=n, heads=2, group=3, size=20)],
            "select": lambda n: [method.flops(tokens=n)],
            "merge": lambda n: [method.flops(tokens=n, kept=n // 3, group=3, size=20)],
            "attend": lambda n: [method.flops(FlopsRequest(encoded=[], group=3, size=20))],
            "encode": lambda n: [
                method.encode_flops(tokens=n, key_size=20, value_size=24),
                method.decode_flops(tokens=n, key_size=20, value_size=24),
                method.read_flops(tokens=n, queries=6, key_size=20, value_size=24),
            ],
        }[stage](tokens)
        assert all(one is None or (isinstance(one, int) and one >= 0) for one in found), found
        if name == registry.null(stage):
            assert found == [0] * len(found)


def test_a_part_that_does_not_say_makes_the_whole_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapKV, "flops", Scorer.flops)
    found = work("snapkv(window=4) @ tokens=8")
    assert found.method_prefill is None and found.method_token == 0


def test_torch_counts_the_same_votes() -> None:
    scorer, n, group, size = SnapKV(window=5), 63, 2, 7
    held = held_of(rows_of((n,)), scorer.needs)
    with FlopCounterMode(display=False) as counter:
        scorer.score(held)
    heads = held.keys.shape[1]
    rest = heads * n * (group * 5 * 4 + group + scorer.kernel)
    assert counter.get_total_flops() + rest == heads * scorer.flops(tokens=n, group=group, size=size)


@pytest.mark.parametrize("prompt", [45, 64])
def test_torch_counts_the_same_bounds_of_pages(prompt: int) -> None:
    model = tiny()
    made = Contestant.of("indexed(page=4, block_size=8) + quest(tokens=8, least=1, dense_layers=0)")
    cache = Subject(name="tiny", model=model).new_cache(made)
    counted(model, torch.randint(97, (ROWS, prompt)), cache)
    quest, segments = cache.plan.attend, cache.engine.states[0].stored.segments
    pages = ROWS * 3 * -(-prompt // 4)
    assert quest.flops(FlopsRequest(encoded=segments, group=2, size=10)) == 4 * 2 * 10 * pages
    ids = torch.randint(97, (ROWS, 1))
    total, _ = counted(model, ids, cache)
    # Two whole pages and the new token are multiplied, whatever of them is filler.
    weights = Weights.of(model)
    assert total == 2 * ROWS * (weights.body + weights.head) + 4 * 6 * 10 * ROWS * 9 + 4 * 2 * 10 * pages


def test_rocket_reads_half_of_its_budget_and_pays_for_the_choice() -> None:
    """60 tokens and 30 expected by a budget of 20: c2 = 4.5, chunks of 3 tokens, int(10 * 3 / 4.5) = 6 channels."""
    plan, model = "rocket(tokens=20, expect=30)", tiny()
    weights = Weights.of(model)
    found = work(plan, tokens=2, prompt=60)
    assert found.method_token == 3 * (20 + 1) * 2 * (2 * 6 + 5)
    assert found.token == 2 * (weights.body + weights.head) + 4 * 6 * 10 * 10
    cache = Subject(name="tiny", model=model).new_cache(Contestant.of(plan))
    counted(model, torch.randint(97, (ROWS, 60)), cache)
    total, _ = counted(model, torch.randint(97, (ROWS, 1)), cache)
    softmax = ROWS * 3 * (20 + 1) * 2 * 5
    assert total + softmax == ROWS * (found.token + found.method_token)


def test_counting_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work("snapkv(window=4) + kivi(bits=4, group=4, recent=8) @ tokens=12", tokens=3)


def test_a_table_of_codecs_costs_on_each_layer_what_its_codec_does() -> None:
    """Of three layers one is encoded: it costs what it does in a model of one layer, and the plain ones nothing."""
    three = tiny(layers=3)
    alone = work("kivi(bits=4, group=8, recent=16)", tokens=34, prompt=45)
    for layers in ([0, 1, 1], [1, 0, 1], [1, 1, 0]):
        plan = f"by_layer(of=[kivi(bits=4, group=8, recent=16), plain], layers={layers})"
        found = work(plan, tokens=34, prompt=45, model=three)
        assert (found.method_prefill, found.method_token) == (alone.method_prefill, alone.method_token)


def test_heads_that_are_projected_together_cost_their_whole_width() -> None:
    """Both sides of 45 tokens of 3 rows: 3 heads of 10 channels along 15 directions, or each along 5 of its own."""
    together, apart = (
        work(f"lowrank(rank=0.5, heads={heads}, basis=random, block_size=8)", prompt=45) for heads in (0, 1)
    )
    assert together.method_prefill == 3 * 2 * 45 * 2 * 30 * 15
    assert apart.method_prefill == 3 * 2 * 45 * 2 * 10 * 5 * 3
