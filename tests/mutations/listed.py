"""Faults that the tests have to find, each one change of one place of the package.

`tests` are where the fault should show; paths are below `src/kvtailor/` and `tests/`. They are narrow, so that a round
of all of them takes minutes: what another file of the suite finds besides does not count here, for neither side.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """`new` in the place of `old`, which stands once in `path`."""

    path: str
    old: str
    new: str
    wrong: str
    tests: tuple[str, ...]


BUDGET = ("engine/test_budget.py", "contract/test_every_pair.py")
BYTES = (
    "engine/test_budget.py",
    "seam/methods/test_bytes.py",
    "seam/methods/test_merging.py",
    "seam/test_window_budgets.py",
)
EVICT = ("engine/test_apply.py", "engine/test_evict.py", "engine/test_often_evicted.py")
CODES = ("engine/test_dropped_codes.py", "seam/methods/test_truth.py")
PADDING = ("engine/test_evict.py", "seam/methods/test_pairs.py", "contract/test_score.py", "seam/run/test_prefill.py")
LANES = ("ops/test_rows.py", "ops/test_pieces.py", "engine/test_apply.py")
ATTENTION = ("ops/test_attention.py", "ops/test_stored_parts.py", "attend/test_readings.py", "contract/test_attend.py")
FACES = ("bench/checks/test_sanity_checks.py",)
STATISTICS = ("bench/measure/test_statistics.py",)
PAIRED = ("bench/measure/test_paired_hits.py",)
PLAN = ("plan/test_plan.py", "plan/test_plan_faults.py", "plan/test_plan_text.py", "plan/test_plan_nested.py")
QUANT = ("ops/test_quant.py",)

MUTATIONS = (
    # Engine: budgets.
    Mutation(
        "engine/budget.py",
        "(tokens, plan.tokens * heads)",
        "(tokens, plan.tokens * heads + 1)",
        "a token too many",
        BUDGET,
    ),
    Mutation("engine/budget.py", "+ 1e-6).floor()", "+ 1e-6).ceil()", "a fraction of a token is rounded up", BUDGET),
    Mutation(
        "engine/budget.py", "(8 if plan.merge.weighted else 4)", "4", "weights of merged tokens cost nothing", BYTES
    ),
    Mutation(
        "engine/budget.py", "share -= heads * page * each", "share -= each", "half-empty pages cost nothing", BYTES
    ),
    Mutation(
        "engine/budget.py",
        "each.clamp(max=plan.score.recent)",
        "each.clamp(min=plan.score.recent)",
        "the newest may exceed the budget",
        BUDGET,
    ),
    Mutation(
        "engine/budget.py",
        "least = plan.slack_tokens, min(codec.block, _AT_ONCE)",
        "least = plan.slack_tokens, codec.block",
        "too many tokens wait in full precision",
        ("engine/test_often_evicted.py", "engine/test_budget.py"),
    ),
    # Engine: evictions.
    Mutation(
        "engine/apply.py",
        "leaving = counts.kept - recent",
        "leaving = counts.kept",
        "the newest tokens are held twice",
        EVICT,
    ),
    Mutation(
        "engine/apply.py",
        "            leaving = leaving - cut.counts.view_as(leaving)\n",
        "            pass\n",
        "moved codes are counted as waiting",
        CODES,
    ),
    Mutation(
        "engine/apply.py",
        "        into = into & ~held.recent(recent)\n",
        "        pass\n",
        "a token of the tail takes a weight that nothing stores",
        (
            "merge/test_matching.py",
            "seam/methods/test_matching_in_models.py",
            "contract/test_merge.py",
            "seam/methods/test_truth_of_merging.py",
        ),
    ),
    Mutation(
        "engine/apply.py",
        "keep & ~_mark_codes(state, plan, slots, keep)",
        "keep",
        "tokens are folded into codes that do not change",
        ("seam/methods/test_truth_of_merging.py", "seam/methods/test_merging.py", "engine/test_apply.py"),
    ),
    Mutation(
        "engine/apply.py",
        "torch.where(here, each.lane + lanes, lane)",
        "torch.where(here, each.lane, lane)",
        "codes of a later part are taken from the first",
        CODES,
    ),
    Mutation(
        "engine/apply.py",
        "weights.flatten(0, 1)[cut.owners[:, None], index]",
        "weights.flatten(0, 1)[cut.owners[:, None], cut.index]",
        "weights go to other tokens",
        (
            "merge/test_matching.py",
            "seam/methods/test_matching_in_models.py",
            "seam/methods/test_truth_of_merging.py",
            "engine/test_apply.py",
        ),
    ),
    Mutation(
        "engine/apply.py",
        "bool((newest.sum(-1) == recent).all())",
        "bool((newest.sum(-1) == recent).any())",
        "one head's newest tokens stand for all heads",
        EVICT,
    ),
    Mutation(
        "engine/apply.py",
        "more // codec.block * codec.block if",
        "more if",
        "a block is encoded before it is full",
        ("contract/test_encode_appending.py", "seam/methods/test_codecs.py", "encode/test_kivi.py"),
    ),
    Mutation(
        "engine/apply.py",
        "mass += [last[:, :count].clone(), last[:, count:].clone()]",
        "mass += [last[:, :count].clone() * 0, last[:, count:].clone()]",
        "encoded tokens lose their attention mass",
        ("engine/test_observe.py", "seam/methods/test_codecs.py", "seam/methods/test_truth.py"),
    ),
    Mutation(
        "engine/apply.py",
        "        begin += size\n",
        "",
        "every run encodes the oldest tokens",
        ("encode/test_by_age.py", "engine/test_precision_by_age.py"),
    ),
    Mutation(
        "engine/view.py", "valid = valid & real[row, positions.clamp(min=0)]", "pass", "padding can be chosen", PADDING
    ),
    Mutation(
        "engine/view.py",
        "first = first_real(real)",
        "first = real.sum(-1)",
        "a row begins where it has as many tokens",
        PADDING,
    ),
    Mutation(
        "engine/evict.py",
        'order).masked_fill(filler, float("-inf"))',
        "order)",
        "filler has scores at a second cut",
        ("seam/test_progressive.py", "contract/test_allocate_progressive.py", "engine/test_evict.py"),
    ),
    Mutation(
        "engine/state.py",
        "self.growth = False, seen, slack, 0",
        "self.growth = False, seen, slack, 1",
        "evicts a token too early",
        ("engine/test_evict.py", "engine/test_often_evicted.py"),
    ),
    # Allocation and selection.
    Mutation(
        "allocate/adakv.py",
        ".double() * self.floor)",
        ".double() * (1 - self.floor))",
        "the floor is what is left of it",
        ("allocate/test_composite.py", "allocate/test_budgets_against_kvpress.py", "contract/test_allocate.py"),
    ),
    Mutation(
        "allocate/pyramid.py",
        "mean / self.beta",
        "mean / (self.beta + 1)",
        "the last layer's share is another",
        ("allocate/test_pyramid.py", "allocate/test_budgets_against_kvpress.py"),
    ),
    Mutation(
        "ops/lanes/apportion.py",
        "remainder.argsort(dim=-1, descending=True, stable=True)",
        "remainder.argsort(dim=-1, descending=False, stable=True)",
        "the smallest remainder is rounded up",
        ("ops/test_apportion.py",),
    ),
    Mutation(
        "ops/lanes/apportion.py",
        "(stop > scale)",
        "(stop >= scale)",
        "who is full still takes part",
        ("ops/test_apportion.py",),
    ),
    Mutation(
        "ops/lanes/apportion.py",
        "total = total.clamp(low.sum(-1), high.sum(-1))",
        "total = total.clamp(low.sum(-1))",
        "more is handed out than all may hold",
        ("ops/test_apportion.py", "contract/test_allocate.py"),
    ),
    Mutation(
        "ops/lanes/ragged.py",
        "page_size(float(on_host.float().mean()), multiple)",
        "page_size(float(on_host.float().mean()))",
        "a page ends within a codec's group",
        ("ops/test_ragged.py", "engine/test_apply.py"),
    ),
    Mutation(
        "ops/lanes/ragged.py",
        "before[owners][:, None] + (lane - first_lane)",
        "before[owners][:, None] + (lane - first_lane) * 0",
        "a head's later pages are taken for its first",
        LANES,
    ),
    Mutation(
        "ops/lanes/pool.py",
        "return values.masked_fill(~member, 0.0)",
        "return values",
        "votes for padding count where nothing is pooled",
        ("ops/test_pool.py", "score/test_snapkv.py"),
    ),
    # Scores, merging, reading.
    Mutation(
        "score/snapkv.py",
        "(held.positions < columns[0])",
        "(held.positions <= columns[0])",
        "the window's first token is pooled as history",
        ("score/test_snapkv.py",),
    ),
    Mutation(
        "score/snapkv.py",
        'if self.reduce == "sum" else votes.mean(1)',
        'if self.reduce == "mean" else votes.mean(1)',
        "sums and means are exchanged",
        ("score/test_snapkv.py",),
    ),
    Mutation(
        "score/h2o.py",
        "(held.seen - held.positions).clamp_min(1)",
        "(held.seen - held.positions - 1).clamp_min(1)",
        "a token's own query is not counted",
        ("score/test_h2o.py",),
    ),
    Mutation(
        "score/tova.py",
        "(held.positions - first).float() / (held.seen - first)",
        "held.positions.float() / held.seen",
        "padding makes tokens older",
        ("score/test_tova.py", "contract/test_score.py"),
    ),
    Mutation(
        "score/expected.py",
        "held.scaling**2 / 2",
        "held.scaling**2",
        "the variance counts twice",
        ("score/test_expected.py",),
    ),
    Mutation(
        "score/expected.py",
        "(held.seen - held.first)[:, None]",
        "(held.seen + 0 * held.first)[:, None]",
        "padding moves the queries to come",
        ("score/test_expected.py", "contract/test_score.py"),
    ),
    Mutation(
        "types/held.py",
        "ahead - self.holes[:, None]",
        "ahead",
        "padding in the midst of a row moves the queries to come",
        ("seam/test_padding_within_rows.py",),
    ),
    Mutation(
        "types/held.py",
        "(torch.stack([self.held_by_first(), any_here]) & asks).gather(-1, order.expand(2, -1, -1))",
        "torch.stack([self.held_by_first(), any_here]) & asks",
        "queries of padding count where a row has padding in its midst",
        ("seam/test_padding_within_rows.py",),
    ),
    Mutation(
        "engine/observe.py",
        "columns = (ages + first_real",
        "columns = columns + 0 * (ages + first_real",
        "queries are turned back by the padding before them too",
        ("seam/test_padding_within_rows.py",),
    ),
    Mutation(
        "engine/apply.py",
        "is_of_others(codec) or bool((positions == columns - first[:, None])[real].all())",
        "True",
        "a constant is taken off where padding in the midst of a row would have it",
        ("seam/test_padding_within_rows.py",),
    ),
    Mutation(
        "merge/cam.py",
        ".tiny)).clamp(max=1.0)",
        ".tiny))",
        "a dropped token counts for more than one",
        ("merge/test_cam.py",),
    ),
    Mutation(
        "merge/blend.py",
        "counts * lengths / (",
        "counts * kept_lengths / (",
        "the shares of dropped and kept are exchanged",
        ("merge/test_blend.py",),
    ),
    Mutation(
        "merge/matching.py",
        "grown = weight + factors",
        "grown = factors",
        "an earlier weight is forgotten",
        ("merge/test_matching.py", "seam/methods/test_matching_in_models.py"),
    ),
    Mutation(
        "merge/matching.py", "now < dropped", "now > dropped", "what fits worse is taken", ("merge/test_matching.py",)
    ),
    Mutation(
        "attend/quest.py",
        "max(self.least, self.tokens // page)",
        "max(self.least, self.tokens // page + 1)",
        "a page too many is read",
        ("attend/test_quest.py",),
    ),
    Mutation(
        "attend/quest.py",
        "layer < self.dense_layers",
        "layer <= self.dense_layers",
        "a layer too many is read whole",
        ("attend/test_quest.py",),
    ),
    Mutation(
        "ops/attention/parts.py",
        "visible.new_tokens == 1)",
        "visible.new_tokens <= 2)",
        "the first of two tokens sees the second",
        ATTENTION,
    ),
    Mutation("ops/attention/parts.py", "return sees & mask", "return sees", "filler of a page is seen", ATTENTION),
    Mutation(
        "ops/attention/parts.py",
        "counts = None if weight is None else weight[:, first:end]",
        "counts = None if weight is None else weight[:, : end - first]",
        "mass of a block is that of the first queries",
        ATTENTION,
    ),
    Mutation(
        "ops/attention/parts.py",
        "own.log_weight if reading is None",
        "None if reading is None",
        "a token that stands for several counts once",
        (*ATTENTION, "ops/test_stored_sides.py"),
    ),
    Mutation(
        "ops/attention/parts.py",
        "weight[:, first:end].repeat_interleave(h, 0)",
        "weight[:, first:end].repeat(h, 1)",
        "queries of other rows are counted",
        ATTENTION,
    ),
    Mutation(
        "hf/mask.py",
        "self.new_tokens + count, self.first_column - count",
        "self.new_tokens + count, self.first_column",
        "earlier tokens are taken for later ones",
        ("seam/test_speculation.py", "seam/test_assisted.py", "seam/test_handed.py", "seam/run/test_conversation.py"),
    ),
    # Codes and kernels.
    Mutation(
        "ops/codes/quant.py",
        "codes.round_().clamp_(0, 2**bits - 1)",
        "codes.floor_().clamp_(0, 2**bits - 1)",
        "codes are rounded down",
        QUANT,
    ),
    Mutation(
        "ops/codes/quant.py",
        "step = torch.where(step > 0, step, torch.full_like(step, FLAT))",
        "pass",
        "a flat group is divided by zero",
        QUANT,
    ),
    Mutation(
        "ops/codes/quant.py",
        "((words >> i * bits) & mask)",
        "((words >> i * bits) & -1)",
        "codes keep their neighbours' bits",
        QUANT,
    ),
    Mutation(
        "ops/codes/quant.py",
        "(scale * 256)",
        "(scale * 128)",
        "numbers of eight bits are halved",
        (*QUANT, "encode/test_fp8.py"),
    ),
    Mutation("ops/codes/quant.py", "shift += width", "shift += 1", "planes of three bits overlap", QUANT),
    Mutation(
        "ops/codes/nonuniform.py",
        "(share * count.float() + 0.5).floor()",
        "(share * count.float() + 0.5).ceil()",
        "one value too many is kept exact",
        ("encode/test_nuq.py", "ops/cpu/test_quantise.py"),
    ),
    Mutation(
        "encode/kivi.py",
        "2 * element_size * size / self.group",
        "element_size * size / self.group",
        "the low end of a group costs nothing",
        ("contract/test_encode.py", "encode/test_kivi.py", "encode/test_one_sided.py"),
    ),
    Mutation(
        "encode/kivi.py",
        "self.group if self.codes_keys else 1",
        "1",
        "a lane may end within a group",
        ("contract/test_encode.py", "encode/test_kivi.py", "seam/methods/test_truth.py"),
    ),
    # Tables, statistics, checks of the bench.
    Mutation(
        "bench/measure/statistics.py",
        "place = share * (len(ordered) - 1)",
        "place = min(share * len(ordered), len(ordered) - 1)",
        "a quantile lies too high",
        STATISTICS,
    ),
    Mutation(
        "bench/measure/statistics.py",
        "17 * z**3 - 15 * z",
        "17 * z**3 + 15 * z",
        "Student's quantile is off in its third term",
        STATISTICS,
    ),
    Mutation(
        "bench/measure/statistics.py",
        "math.sqrt(drawn / (drawn - 1))",
        "math.sqrt(1.0)",
        "intervals of few samples are too narrow",
        STATISTICS,
    ),
    Mutation(
        "bench/measure/statistics.py",
        "z * z / (4 * count * count)",
        "z * z / (4 * count)",
        "Wilson's interval is too wide",
        STATISTICS,
    ),
    Mutation(
        "bench/measure/statistics.py",
        "sum(map(abs, total))",
        "abs(sum(total))",
        "too sure and too unsure cancel",
        ("bench/tasks/test_fidelity.py",),
    ),
    Mutation(
        "bench/measure/paired_hits.py", "_INNER = 0.7", "_INNER = 1.0", "intervals of pairs are too narrow", PAIRED
    ),
    Mutation(
        "bench/measure/paired_hits.py",
        "b * b - 8 * count * c",
        "b * b - 4 * count * c",
        "the nuisance parameter is another",
        PAIRED,
    ),
    Mutation(
        "bench/checks/holdings.py",
        "form is not None and form != held",
        "form is not None and form > held",
        "bytes that nobody can account for pass",
        FACES,
    ),
    Mutation(
        "bench/checks/holdings.py",
        "held <= seen / 2 and taken - observed >= full",
        "held <= seen / 2 and taken - observed > full",
        "a mask in place of an eviction passes",
        (*FACES, "bench/checks/test_frauds.py"),
    ),
    Mutation(
        "bench/checks/results.py",
        "if one.same_as(other) and one.held != other.held:",
        "if one.same_as(other) and one.held == other.held:",
        "different plans with the same results pass",
        FACES,
    ),
    Mutation(
        "bench/checks/results.py",
        "level = _FALSE_ALARMS / len(questions)",
        "level = _FALSE_ALARMS * len(questions)",
        "more questions make more false alarms",
        FACES,
    ),
    Mutation(
        "bench/checks/results.py",
        "student_quantile(1 - level, len(gains) - 1)",
        "0.0",
        "any gain is beyond chance",
        FACES,
    ),
    # Plans.
    Mutation(
        "plan/grammar.py", "elif name in read:", "elif name == read:", "the second of two values wins silently", PLAN
    ),
    Mutation(
        "plan/grammar.py",
        "mark in separators and depth == 0",
        "mark in separators and depth <= 1",
        "an argument is cut at its own commas",
        PLAN,
    ),
    Mutation("plan/check.py", "0 < keep <= 1", "0 < keep < 1", "keeping everything is refused", PLAN),
    Mutation("plan/check.py", "if len(asked) > 1:", "if len(asked) > 2:", "two budgets pass", PLAN),
    Mutation(
        "plan/check.py",
        "if evicts is False and slack is not None:",
        "if evicts and slack is not None:",
        "slack without a scorer passes",
        PLAN,
    ),
)
