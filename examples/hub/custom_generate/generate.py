"""`model.generate(..., custom_generate=REPOSITORY, plan=...)`: generation from a cache that kvtailor compresses.

Nothing of kvtailor is copied in here: the installed package does the work, so that this file does not grow old.
"""

import kvtailor


def generate(model, *args, plan=None, tokenizer=None, cache=None, past_key_values=None, **kwargs):
    """Return what `model.generate` returns, from a cache under a plan.

    Args:
        model: the model; transformers gives it.
        *args: see `model.generate`.
        plan: what the cache does, in one line, such as "snapkv + adakv @ keep=0.25". It must be given.
        tokenizer: of the model, for plans that read the prompt twice, such as "kvzip @ keep=0.25".
        cache: None, or a cache of `kvtailor.cache_for` under the same plan, for the next turn.
        past_key_values: the same; the argument's name before transformers 5.24.
        **kwargs: see `model.generate`. With `return_dict_in_generate=True` the cache comes back as `cache` (before
            transformers 5.24 as `past_key_values`), and its `ledger()` has its bytes.

    Raises:
        ValueError: no plan was given, or a cache of another plan, or two caches.
    """
    if plan is None:
        raise ValueError(
            'asked for generation with kvtailor without a plan: give plan="snapkv + adakv @ keep=0.25" or another one '
            "(`kvtailor ls` lists what there is)"
        )
    asked = kvtailor.Plan.parse(plan) if isinstance(plan, str) else plan
    if cache is not None and past_key_values is not None:
        raise ValueError("a cache was given as cache and as past_key_values, two names of one argument: give one")
    cache = past_key_values if cache is None else cache
    if cache is not None:
        found = getattr(cache, "plan", None)
        if found != asked:
            what = f"a {type(cache).__name__}" if found is None else f"a cache under the plan {found}"
            raise ValueError(
                f"asked for generation under the plan {asked}, and the cache given is {what}: leave it out, or give "
                "kvtailor.cache_for(model, plan)"
            )
        kwargs["cache"] = cache
    if kwargs.get("inputs") is None:
        # transformers passes all of its own arguments on, those that were not given as None.
        kwargs.pop("inputs", None)
    with kvtailor.session(model, asked, tokenizer) as session:
        return session.generate(*args, **kwargs)
