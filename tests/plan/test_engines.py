"""What comes nearest in other engines, and what they cannot express."""

from itertools import chain, combinations, product
from random import Random
from types import SimpleNamespace

import pytest
from tests.support.fitting.made_fits import made_fit

from kvtailor.errors import ArgumentError, UnknownName
from kvtailor.plan import Plan
from kvtailor.plan.engines import ENGINES, widths_by_layer

VLLM = next(each for each in ENGINES if each.name == "vLLM")


def settings(text, **more):
    return {each.engine: each for each in Plan.parse(text).exports(**more)}


def losses(state, layers=6, widths=(0, 8, 4, 3)):
    """Losses of layers of made-up sizes; some are below 0, as noise is."""
    chance = Random(state)
    rows = [[(0.0, *(chance.uniform(-0.2, 1) for _ in widths[1:])) for _ in range(layers)] for _ in range(2)]
    return SimpleNamespace(widths=widths, keys=rows[0], values=rows[1])


def test_eight_bits_are_what_engines_have():
    found = settings("fp8")
    assert found["vLLM"].setting == "--kv-cache-dtype fp8"
    assert (
        found["vLLM"].lacks
        == "It has the scale 1, or the checkpoint's, and not the plan's own for each head and run of tokens."
    )
    assert found["llama.cpp"].setting == "--flash-attn on --cache-type-k q8_0 --cache-type-v q8_0"


def test_layers_that_are_not_encoded_are_skipped_where_an_engine_can():
    found = settings("by_layer(of=[plain, kivi(bits=8, recent=32)], layers=[0, 1, 1, 0])")
    assert found["vLLM"].setting == "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 0 3"
    assert "one setting for all layers" in found["SGLang"].lacks


@pytest.mark.parametrize(
    "text, keys, values",
    [
        ("kivi(key_bits=8, value_bits=4)", "q8_0", "q4_1"),
        ("sides(keys=kivi(bits=8), values=plain)", "q8_0", "f16"),
        ("kivi(bits=4, only=values)", "f16", "q4_1"),
        ("hadamard(of=vector(bits=5, symmetric=false))", "q5_1", "q5_1"),
        ("vector(bits=5)", "q5_0", "q5_0"),
        ("vector(bits=6)", "q5_0", "q5_0"),
        ("turboquant4", "q4_0", "q4_0"),
        ("sides(keys=unrotated(of=nuq(bits=8)), values=kivi(bits=4))", "q8_0", "q4_1"),
        ("sides(keys=centred(of=hadamard(of=vector(bits=8))), values=hadamard(of=vector(bits=5)))", "q8_0", "q5_0"),
        ("sides(keys=hadamard(of=vector(bits=4)), values=plain)", "q4_0", "f16"),
        ("by_layer(of=[sides(keys=kivi(bits=8), values=hadamard(of=kivi(bits=4)))], layers=[0, 0])", "q8_0", "q4_1"),
    ],
)
def test_each_side_has_its_own_width(text, keys, values):
    assert settings(text)["llama.cpp"].setting == f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}"


@pytest.mark.parametrize(
    "text, dtype",
    [
        ("fp8", "fp8"),
        ("kivi(bits=8)", "int8_per_token_head"),
        ("kivi4", "int4_per_token_head"),
        ("nvfp4", "nvfp4"),
        ("turboquant4", "turboquant_4bit_nc"),
        ("turboquant3", "turboquant_3bit_nc"),
        ("kivi(key_bits=8, value_bits=4)", "turboquant_k8v4"),
        ("kivi(bits=2)", "turboquant_3bit_nc"),
    ],
)
def test_the_nearest_of_vllm_has_the_plan_s_bits_and_form(text, dtype):
    assert settings(text)["vLLM"].setting == f"--kv-cache-dtype {dtype}"


@pytest.mark.parametrize(
    ("text", "engine", "lacking"),
    [
        ("palu_int4", "vLLM", "has nothing of unrotated or lowrank, inside of which the plan's codes lie"),
        ("unrotated(of=vector(bits=8))", "llama.cpp", "has nothing of unrotated,"),
        ("centred(of=hadamard(of=gaussian))", "llama.cpp", "has nothing of centred,"),
        ("kvquant4", "llama.cpp", "stores integers with a step where the plan has levels that are no even steps"),
        ("fp8", "llama.cpp", "stores integers with a step where the plan has small floats"),
        ("h2o + d2o @ tokens=62", "vLLM", "drops no tokens, so h2o + d2o @ tokens=62 is missing"),
        ("snapkv + adakv + kivi4 @ keep=0.5", "vLLM", "so snapkv + adakv @ keep=0.5 is missing"),
        ("kivi4 + disk", "vLLM", "does nothing of disk"),
        ("quest", "llama.cpp", "does nothing of quest"),
    ],
)
def test_what_a_setting_has_nothing_of_is_said(text, engine, lacking):
    assert lacking in settings(text, layers=24)[engine].lacks


@pytest.mark.parametrize("text", ["vector(bits=4)", "hadamard(of=vector(bits=8))", "ggml(type=q8_0)"])
def test_nothing_is_missing_of_what_an_engine_does(text):
    assert settings(text)["llama.cpp"].lacks == ""


def test_the_bits_of_each_side_are_those_of_its_own_codec():
    """Of a preset whose keys are turned back and whose values are mixed: 3 and 2, and not twice the values' own."""
    assert widths_by_layer(Plan.parse("k3v2").encode, 2) == [(3.0, 2.0)] * 2
    assert "the plan has 3 and 2 on average" in settings("k3v2")["llama.cpp"].lacks


def test_no_type_of_an_engine_is_nearer_than_the_one_that_is_taken():
    """By the definition, over all widths: the sum of the differences of bits."""
    for keys, values in product(range(1, 9), repeat=2):
        found = settings(f"kivi(key_bits={keys}, value_bits={values})")
        for engine in ENGINES:
            away = {each.option: abs(each.keys.bits - keys) + abs(each.values.bits - values) for each in engine.types}
            assert away[found[engine.name].setting] == min(away.values()), (engine.name, keys, values)


def test_neighbours_are_plans_and_every_engine_has_a_version_and_a_source():
    for engine in ENGINES:
        assert engine.version and engine.source
        for each in engine.types:
            assert all(Plan.parse(near) for near in each.neighbours)


def test_a_codec_without_a_number_of_bits_has_no_neighbour():
    for text in ("channels", "minicache"):
        assert all(each.setting is None for each in settings(text).values()), text


def test_tokens_that_are_dropped_are_told_as_missing():
    found = settings("snapkv @ tokens=100")
    assert all(each.setting and "snapkv @ tokens=100 is missing" in each.lacks for each in found.values())
    assert "8 bits for keys and 8 for values" in found["vLLM"].lacks


@pytest.mark.parametrize("text", ["kivi(bits=8, recent=32)", "hadamard(of=vector(bits=4, recent=32))"])
def test_newest_tokens_that_no_setting_keeps_whole_are_told(text):
    for name, each in settings(text).items():
        assert "the newest 32, which the plan keeps whole, have no counterpart" in each.lacks, name
        assert ("residual_length" in each.lacks) == (name == "transformers"), name
    assert "counterpart" not in settings("vector(bits=4)")["llama.cpp"].lacks


def test_scales_that_a_setting_does_not_have_are_told_as_missing():
    """vLLM and SGLang have the scale 1 then."""
    for text in ("static_fp8", "by_layer(of=[static_fp8, plain], layers=[0, 1])"):
        found = settings(text)
        told = "the calibrated scales, which kvtailor export compressed-tensors"
        assert all(told in each.lacks for each in found.values()), text
        assert {name for name, each in found.items() if "has the scale 1 and not" in each.lacks} == {"vLLM", "SGLang"}
    assert settings("static_fp8(scale=0.02)")["vLLM"].lacks == "It has the scale 1 and not the plan's scale."
    assert settings("static_fp8(scale=1.0)")["vLLM"].lacks == ""


@pytest.mark.parametrize("budget", ["keep=0.25", "bytes=2MiB"])
def test_every_kind_of_budget_is_told(budget):
    assert f"snapkv @ {budget} is missing" in settings(f"snapkv @ {budget}")["vLLM"].lacks


def test_a_fit_names_the_setting_of_its_plan():
    made = made_fit(8)
    setting = made.export("vllm")
    assert setting in made.engines and setting == Plan.parse(made.plan).export("vLLM", measured=made.layers)
    assert "Layers were compared by what each lost alone" in setting.skipping
    assert made.export("vllm", layers=range(1, 12, 2)).skipped == tuple(2 * place + 1 for place in setting.skipped)
    with pytest.raises(UnknownName, match="vllm"):
        made.export("vlm")


def test_skipped_layers_and_type_are_those_of_the_least_loss_in_as_many_bits():
    """By the definition: every type whose widths were measured, and every set of layers."""
    plans = ("kivi(bits=8)", "kivi(bits=6)", "by_layer(of=[plain, kivi4], layers=[0, 1, 1, 1, 0, 1])")
    for text, state in product(plans, range(4)):
        measured = losses(state)
        mean = {"kivi(bits=8)": 8, "kivi(bits=6)": 6}.get(text, (4 * 4 + 2 * 16) / 6)
        best = None
        for each in VLLM.types:
            if not {each.keys.bits, each.values.bits} <= {*measured.widths}:
                continue
            own = {0, 1, 4, 5} if each.ends else set()
            for chosen in chain.from_iterable(combinations(range(6), count) for count in range(7)):
                coded = [layer for layer in range(6) if layer not in own and layer not in chosen]
                bits = len(coded) * (each.keys.bits + each.values.bits) + 32 * (6 - len(coded))
                left = sum(
                    rows[layer][measured.widths.index(bits)]
                    for rows, bits in ((measured.keys, each.keys.bits), (measured.values, each.values.bits))
                    for layer in coded
                )
                if bits <= 6 * 2 * mean and (best is None or left < best):
                    best = left
        found = settings(text, measured=measured)["vLLM"]
        assert f"of which {best:.4f} in the layers that are encoded" in found.skipping, (text, state)
        assert (VLLM.skip in found.setting) == bool(found.skipped)
        assert {Plan.parse(near).encode.table_layers for near in found.neighbours} <= {None, 6}


def test_a_setting_that_skips_layers_has_the_same_layers_whole_in_its_neighbour():
    measured = SimpleNamespace(widths=(0, 8), keys=[(0.0, 3.0), (0.0, 1.0), (0.0, 2.0)], values=[(0.0, 0.0)] * 3)
    found = Plan.parse("by_layer(of=[plain, fp8], layers=[0, 1, 1])").export("vllm", measured=measured)
    assert found.setting == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0"
    assert "by_layer(of=[fp8, plain], layers=[1, 0, 0])" in found.neighbours
    assert all(Plan.parse(near) for near in found.neighbours)
    numbered = Plan.parse("by_layer(of=[plain, fp8], layers=[0, 1, 1])").export(
        "vllm", layers=(3, 7, 11), measured=measured
    )
    assert numbered.skipped == (3,) and "Layers are counted" in found.skipping
    assert "Layers are counted" not in numbered.skipping


def test_what_was_not_measured_is_said():
    without = settings("kivi4")
    assert "what each layer loses was not measured" in without["vLLM"].skipping
    assert without["SGLang"].skipping == ""
    few = settings("kivi4", measured=losses(0, widths=(0, 2)))["vLLM"]
    assert "a width that was measured (2)" in few.skipping and few.skipped == ()
    assert few.setting == without["vLLM"].setting
    narrow = settings("kivi(bits=2)", measured=losses(0))["vLLM"]
    assert "no cache type has as few bits as the plan" in narrow.skipping and narrow.skipped == ()


def test_numbers_of_layers_that_differ_are_refused():
    plan = Plan.parse("by_layer(of=[plain, fp8], layers=[0, 1, 1])")
    for more in ({"layers": 4}, {"layers": (1, 2)}, {"measured": losses(0)}):
        with pytest.raises(ArgumentError, match="the plan's table are for 3"):
            plan.export("vllm", **more)


@pytest.mark.parametrize("layers", [100_001, range(100_001)], ids=["count", "numbers"])
def test_more_layers_than_any_model_has_are_refused(layers):
    with pytest.raises(ArgumentError, match="for 100,001 layers: at most 100,000"):
        Plan.parse("kivi4").export("vllm", layers=layers)


def test_layers_that_the_engine_itself_leaves_whole_are_whole_in_the_neighbour():
    assert "layers=[1, 1, 0, 0, 1, 1]" in settings("turboquant4", layers=6)["vLLM"].neighbours[0]
    assert settings("turboquant4", layers=4)["vLLM"].neighbours == ()
    # At most a half from each end, as TurboQuantConfig.get_boundary_skip_layers has it.
    assert "layers=[1, 0, 1]" in settings("turboquant4", layers=3)["vLLM"].neighbours[0]
    assert "by_layer" not in settings("turboquant4", layers=1)["vLLM"].neighbours[0]
    assert settings("turboquant4", layers=2)["vLLM"].neighbours == ()


def test_a_plan_that_depends_on_the_number_of_layers_stands_beside_nothing_until_it_is_known():
    for text in ("turboquant4", "turboquant3", "sides(keys=fp8, values=vector(bits=4, symmetric=false))"):
        unknown = settings(text)["vLLM"]
        assert "turboquant" in unknown.setting and unknown.neighbours == ()
        assert "before it is known how many layers the model has (--model NAME or --layers N" in unknown.lacks
        known = settings(text, layers=6)["vLLM"]
        assert known.neighbours and "how many layers" not in known.lacks
    for each in settings("turboquant4").values():
        assert all(Plan.parse(near).encode.table_layers is None for near in each.neighbours)


@pytest.mark.parametrize("text", ["asymkv1", "bit_table(of=kivi, keys=0.01, values=0.0, high=8, low=4)"])
def test_a_plan_whose_bits_depend_on_the_number_of_layers_asks_for_it(text):
    with pytest.raises(ArgumentError, match=r"depend on how many layers the model has: say how many \(--model NAME"):
        Plan.parse(text).exports()
    assert len(settings(text, layers=30)) == len(ENGINES)


@pytest.mark.parametrize(
    "layers", [0, -3, True, 2.5, "30", [], [-1, 2], [0, 0], [3, 2], ["a"], [1.5], [True], {1, 2}], ids=repr
)
def test_numbers_that_are_no_layers_are_refused(layers):
    with pytest.raises(ArgumentError, match="give how many there are, from 1 on, or their numbers"):
        Plan.parse("kivi4").export("vllm", layers=layers)


@pytest.mark.parametrize(
    "keys, values",
    [([(0, 1)], []), ([(0,)], [(0,)]), ([(0, float("nan"))], [(0, 1.0)]), ([(0, 1.0)], [(0, float("inf"))])],
)
def test_losses_that_are_not_one_for_each_width_are_refused(keys, values):
    with pytest.raises(ArgumentError, match="at each width: fit again"):
        Plan.parse("kivi4").export("vllm", measured=SimpleNamespace(widths=(0, 8), keys=keys, values=values))


def test_layers_that_share_keys_and_values_have_no_counterpart():
    assert all(each.setting is None for each in settings("minicache").values())
    assert all(each.setting is None for each in settings("minicache", layers=30).values())
    assert "has no layers that share their keys and values" in settings("minicache4", layers=30)["vLLM"].lacks


@pytest.mark.parametrize(
    "text, keys, values",
    [
        ("ggml", "q8_0", "q8_0"),
        ("hadamard(of=ggml(type=q4_1))", "q4_1", "q4_1"),
        ("ggml(key_type=q5_0, value_type=q4_0)", "q5_0", "q4_0"),
        ("ggml(key_type=q5_1, only=keys)", "q5_1", "f16"),
    ],
)
def test_llama_cpp_s_own_formats_are_told_as_themselves(text, keys, values):
    found = settings(text)["llama.cpp"]
    assert found.setting == f"--flash-attn on --cache-type-k {keys} --cache-type-v {values}"
    assert found.neighbours and all(Plan.parse(near) for near in found.neighbours)
