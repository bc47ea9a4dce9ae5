"""vLLM's own words for cache types, lists of layers and names of scales: what is exported is among them.

`CACHE_TYPES` are those of vllm 0.33.0 (`vllm/config/cache.py`, `CacheDType`). Where `VLLM_WHEEL` names a folder that
its wheel was unpacked to, or vllm is installed, its own code reads what is exported: the class of its cache's
configuration, the list of layers at the ends for TurboQuant, and the names of scales. The package is not imported: it
needs others that no CPU has use for. What these files import of it is replaced here by what is named below.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvtailor.plan import Plan
from kvtailor.plan.engines import ENGINES

VLLM = next(each for each in ENGINES if each.name == "vLLM")
CACHE_TYPES = frozenset(
    [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_inc",
        "fp8_ds_mla",
        "nvfp4_ds_mla",
        "turboquant_k8v4",
        "turboquant_4bit_nc",
        "turboquant_k3v4_nc",
        "turboquant_3bit_nc",
        "octave_k3v4",
        "octave_k3v3",
        "octave_k3v3_compact",
        "ultraquant_4bit",
        "int4_per_token_head",
        "int8_per_token_head",
        "fp8_per_token_head",
        "nvfp4",
        "nvfp4_4over6",
    ]
)
SETTINGS = [
    Plan.parse(text).export("vllm", layers=30)
    for text in ("fp8", "kivi4", "turboquant4", "turboquant3", "nvfp4", "snapkv @ tokens=100", "asymkv1")
] + [
    Plan.parse(f"by_layer(of=[plain, {codec}], layers=[0, 1, 1, 0])").export("vllm", layers=(0, 5, 11, 17))
    for codec in ("fp8", "nvfp4", "kivi(bits=8)")
]


def source() -> Path | None:
    """The folder of vllm's package, unpacked or installed."""
    unpacked = os.environ.get("VLLM_WHEEL")
    if unpacked:
        return Path(unpacked) / "vllm"
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


needs_vllm = pytest.mark.skipif(
    source() is None,
    reason="vllm is not here: pip download --no-deps vllm==0.33.0, unpack it, and name the folder in VLLM_WHEEL",
)


def parsed(setting: str) -> argparse.Namespace:
    """The options as a shell and vLLM's command line split them: a list of strings after the second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-cache-dtype", choices=CACHE_TYPES, default="auto")
    parser.add_argument("--kv-cache-dtype-skip-layers", nargs="+", default=[])
    return parser.parse_args(setting.split())


@pytest.mark.parametrize("each", SETTINGS, ids=lambda each: each.setting)
def test_what_is_exported_are_options_of_vllm(each: Any) -> None:
    found = parsed(each.setting)
    assert tuple(map(int, found.kv_cache_dtype_skip_layers)) == each.skipped
    # vLLM compares these with str(index).
    assert all(re.fullmatch(r"0|[1-9]\d*", number) for number in found.kv_cache_dtype_skip_layers)


def test_every_type_of_the_table_is_one_of_vllm() -> None:
    named = {each.option.removeprefix("--kv-cache-dtype ") for each in VLLM.types}
    others = {name for name in CACHE_TYPES for pattern in VLLM.others if re.fullmatch(pattern.replace("*", ".*"), name)}
    assert named <= CACHE_TYPES and not named & others
    # What is left are dtypes of the model, other names for fp8, and types of models with latents.
    left = {"auto", "float16", "bfloat16", "fp8_e4m3", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla"}
    assert named | others | left == CACHE_TYPES


@needs_vllm
@pytest.mark.parametrize("each", SETTINGS, ids=lambda each: each.setting)
def test_vllm_s_own_configuration_takes_what_is_exported(each: Any) -> None:
    config = cache_module().CacheConfig
    given = vars(parsed(each.setting))
    made = config(cache_dtype=given["kv_cache_dtype"], kv_cache_dtype_skip_layers=given["kv_cache_dtype_skip_layers"])
    assert made.cache_dtype == given["kv_cache_dtype"]
    with pytest.raises(ValueError, match="Invalid kv_cache_dtype"):
        config(cache_dtype="kivi4")
    with pytest.raises(ValueError, match="string"):
        config(kv_cache_dtype_skip_layers=[3])


@needs_vllm
def test_the_types_are_those_of_vllm_s_source() -> None:
    assert {*cache_module().KV_CACHE_DTYPES} == CACHE_TYPES


@needs_vllm
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 30])
def test_turboquant_s_own_layers_are_those_that_vllm_leaves_whole(count: int) -> None:
    function = function_of("model_executor/layers/quantization/turboquant/config.py", "get_boundary_skip_layers")
    model = SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace(num_hidden_layers=count))
    kind = next(each for each in VLLM.types if "turboquant" in each.option)
    assert {*map(int, function(model))} == kind.own_whole(count)


@needs_vllm
def test_names_of_scales_are_mapped_to_those_of_vllm_s_attention() -> None:
    function = function_of("model_executor/model_loader/weight_utils.py", "maybe_remap_kv_scale_name")
    for side in "kv":
        name = f"model.layers.3.self_attn.attn.{side}_scale"
        for written in (
            f"model.layers.3.self_attn.{side}_scale",
            f"model.layers.3.self_attn.{side}_proj.{side}_scale",
            f"model.layers.3.self_attn.qkv_proj.{side}_scale",
        ):
            assert function(written, {name: torch.ones(())}) == name


def cache_module() -> ModuleType:
    """`vllm/config/cache.py`, with what it imports of vllm replaced."""
    from pydantic import ConfigDict
    from pydantic.dataclasses import dataclass

    def config(cls: type) -> type:
        return dataclass(cls, config=ConfigDict(extra="forbid"))

    given: dict[str, dict[str, Any]] = {
        "vllm.config.utils": {"config": config},
        "vllm.logger": {"init_logger": lambda name: SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)},
        "vllm.utils.torch_utils": {"STR_DTYPE_TO_TORCH_DTYPE": {}},
        "vllm.v1.kv_cache_interface": {
            "KVQuantMode": object,
            "is_quantized_kv_cache": lambda name: False,
            "kv_cache_uses_per_token_head_scales": lambda name: False,
        },
        "vllm.v1.kv_cache_layout": {"KVCacheLayout": object},
    }
    names = {".".join(name.split(".")[:count]) for name in given for count in range(1, 5)}
    kept = {name: sys.modules.get(name) for name in (*names, "vllm_cache")}
    try:
        for name in names:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(given.get(name, {}))
        path = source()
        assert path is not None
        made = ModuleType("vllm_cache")
        # pydantic looks up the names of annotations there.
        sys.modules["vllm_cache"] = made
        exec(compile((path / "config" / "cache.py").read_text(encoding="utf-8"), "cache.py", "exec"), made.__dict__)
        return made
    finally:
        for name, module in kept.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def function_of(file: str, name: str) -> Any:
    """One function of vLLM's source, whose loggers are silent."""
    path = source()
    assert path is not None
    tree = ast.parse((path / file).read_text(encoding="utf-8"))
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef) and each.name == name)
    node.decorator_list, node.returns = [], None
    for argument in node.args.args:
        argument.annotation = None
    silent = SimpleNamespace(**dict.fromkeys(("info", "warning_once", "debug_once"), lambda *_: None))
    space: dict[str, Any] = {"logger": silent}
    sys.modules.setdefault("regex", re)
    exec(compile(ast.Module(body=[node], type_ignores=[]), file, "exec"), space)
    return space[name]
