"""Other engines' settings for a plan whose table is as long as the model has layers."""

from kvtailor.plan import Plan


def test_a_table_of_codecs_that_all_differ_has_as_many_layers_as_codecs():
    """Such a table is written without `layers=`, so that their number is not there to be counted."""
    plan = Plan.parse("by_layer(of=[kivi(bits=4), kivi(bits=8), plain], layers=[0, 1, 2])")
    assert "layers" not in str(plan)
    found = {each.engine: each for each in plan.exports()}
    assert found["vLLM"].setting == "--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers 2"
    assert found["llama.cpp"].setting is not None and "one setting for all layers" in found["llama.cpp"].lacks
