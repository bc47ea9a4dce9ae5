"""Tiny random vision-language models, offline, and prompts with images as their processors would make them.

Pixels are random and fixed; placeholders, grids and token types are made by hand, so no processor is needed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForImageTextToText

__all__ = ["FAMILIES", "IMAGE", "Prompt", "build", "prompt"]

VOCABULARY = 131
# Token ids with a meaning; text is drawn from those behind them.
IMAGE, VIDEO, START, END, PAD, BOS = 3, 4, 5, 6, 0, 1
FIRST_TEXT = 8
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
}
_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "projection_dim": 32,
}
# Of 16 channels 8 turn: 4 by time, 2 by height and 2 by width.
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "in_channels": 3, "patch_size": 2, "spatial_merge_size": 2}


@cache
def configs() -> dict[str, transformers.PreTrainedConfig]:
    """One configuration for each family."""
    found: dict[str, Callable[[], Any]] = {
        "qwen2_vl": lambda: transformers.Qwen2VLConfig(
            text_config={**_TEXT, "rope_parameters": _MROPE},
            vision_config={**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
            **_IDS,
        ),
        "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": _MROPE},
            vision_config={
                **_QWEN_VISION,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "window_size": 8,
                "fullatt_block_indexes": [1],
            },
            **_IDS,
        ),
        "qwen3_vl": lambda: transformers.Qwen3VLConfig(
            text_config={**_TEXT, "rope_parameters": {**_MROPE, "mrope_interleaved": True}},
            vision_config={
                **_QWEN_VISION,
                "hidden_size": 32,
                "out_hidden_size": 64,
                "intermediate_size": 48,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            **_IDS,
        ),
        "gemma3": lambda: transformers.Gemma3Config(
            text_config={
                **_TEXT,
                "num_hidden_layers": 4,
                "sliding_window": 24,
                "query_pre_attn_scalar": 1,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            vision_config={**_CLIP},
            mm_tokens_per_image=16,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        # Two head sizes, and layers that read another layer's keys.
        "gemma4": lambda: transformers.Gemma4Config(
            text_config={
                **_TEXT,
                "num_hidden_layers": 6,
                "sliding_window": 24,
                "global_head_dim": 32,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VOCABULARY,
                "use_bidirectional_attention": "vision",
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "pooling_kernel_size": 2,
                "patch_size": 4,
                "position_embedding_size": 64,
            },
            audio_config=None,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=7,
            boi_token_id=START,
            eoi_token_id=END,
        ),
        "paligemma": lambda: transformers.PaliGemmaConfig(
            text_config={**_TEXT, "model_type": "gemma"},
            vision_config={**_CLIP, "model_type": "siglip_vision_model"},
            image_token_index=IMAGE,
            projection_dim=64,
            hidden_size=64,
        ),
        "llava": lambda: transformers.LlavaConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_CLIP, "model_type": "clip_vision_model"},
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        "llava_next": lambda: transformers.LlavaNextConfig(
            text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
            vision_config={**_CLIP, "image_size": 8, "model_type": "clip_vision_model"},
            image_grid_pinpoints=[[8, 16], [16, 8], [16, 16]],
            image_token_index=IMAGE,
            vision_feature_layer=-1,
        ),
        "smolvlm": lambda: transformers.SmolVLMConfig(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_CLIP, "image_size": 24},
            scale_factor=2,
            image_token_id=IMAGE,
            pad_token_id=PAD,
        ),
        "idefics3": lambda: transformers.Idefics3Config(
            text_config={**_TEXT, "model_type": "llama"},
            vision_config={**_CLIP, "image_size": 24},
            scale_factor=2,
            image_token_id=IMAGE,
            pad_token_id=PAD,
        ),
        "internvl": lambda: transformers.InternVLConfig(
            text_config={**_TEXT, "model_type": "qwen2"},
            vision_config={**_CLIP, "image_size": [24, 24], "patch_size": [4, 4]},
            image_token_id=IMAGE,
            downsample_ratio=0.5,
        ),
        "mistral3": lambda: transformers.Mistral3Config(
            text_config={**_TEXT, "model_type": "mistral", "sliding_window": None},
            vision_config={**_CLIP, "model_type": "pixtral", "head_dim": 16},
            image_token_index=IMAGE,
            spatial_merge_size=2,
            vision_feature_layer=-1,
        ),
    }
    return {name: make() for name, make in found.items()}


FAMILIES = tuple(configs())
# Families whose positions of image tokens have three axes; transformers keeps the shift that follows on the model.
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
# Families whose image tokens (of PaliGemma: the whole prompt) see each other in both directions.
BIDIRECTIONAL = ("gemma3", "gemma4", "paligemma")

Item = int | tuple[int, int] | Tensor
"""A piece of a row: so many random text tokens, an image of (height, width) in the decoder's tokens, or token ids."""


def build(family: str, *, attention: str = "sdpa", dtype: torch.dtype = torch.float32, state: int = 0) -> Any:
    """A random model of its own whose attention is sharp enough that which tokens are attended matters."""
    return copy.deepcopy(_made(family, attention, dtype, state))


@cache
def _made(family: str, attention: str, dtype: torch.dtype, state: int) -> Any:
    torch.manual_seed(state)
    config = copy.deepcopy(configs()[family])
    # The images are always encoded by transformers' own attention.
    names = {"": "sdpa", "text_config": attention}
    model = AutoModelForImageTextToText.from_config(config, attn_implementation=names, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(state)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                # Gemma multiplies embeddings by the root of the hidden size, and they would drown what attention adds.
                embedded = 0.125 if "gemma" in family else 1.0
                scale = embedded if "embed_tokens" in name else 0.25
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            elif family == "gemma4" and "language_model" in name and "q_norm" in name:
                # It does not divide its logits by anything; sharper ones would show the rounding of float32.
                parameter.fill_(0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model


def _qwen(size: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    # A token of the language model is made of 2 x 2 patches of 3 channels, 2 frames and 2 x 2 pixels.
    grid = torch.tensor([[1, 2 * size[0], 2 * size[1]]])
    patches = torch.randn(4 * size[0] * size[1], 24, generator=generator)
    return {"pixel_values": patches, "image_grid_thw": grid}, size[0] * size[1]


def _square(pixels: int, tokens: int) -> Callable[..., tuple[dict[str, Tensor], int]]:
    def make(size: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
        return {"pixel_values": torch.randn(1, 3, pixels, pixels, generator=generator)}, tokens

    return make


def _gemma4(size: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    # 6 x 6 patches of 4 x 4 pixels and 3 channels, of which a token is made of 2 x 2.
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), -1).view(1, 36, 2)
    return {"pixel_values": torch.rand(1, 36, 48, generator=generator), "image_position_ids": places}, 9


def _llava_next(size: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    # 2 x 2 tokens of the whole image, and 4 rows of 4 tokens and a newline of its four tiles.
    pixels = torch.randn(1, 5, 3, 8, 8, generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}, 24


def _mistral3(size: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], int]:
    # Images of a batch are padded to one shape; a token is made of 2 x 2 patches of 4 x 4 pixels.
    pixels = torch.zeros(1, 3, 40, 40)
    pixels[:, :, : 8 * size[0], : 8 * size[1]] = torch.randn(1, 3, 8 * size[0], 8 * size[1], generator=generator)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[8 * size[0], 8 * size[1]]])}, size[0] * size[1]


_IMAGES: dict[str, Callable[..., tuple[dict[str, Tensor], int]]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "gemma3": _square(16, 16),
    "gemma4": _gemma4,
    "paligemma": _square(16, 16),
    "llava": _square(16, 16),
    "llava_next": _llava_next,
    "smolvlm": _square(24, 9),
    "idefics3": _square(24, 9),
    "internvl": _square(24, 9),
    "mistral3": _mistral3,
}


@dataclass(frozen=True)
class Prompt:
    """A batch of conversations with images, padded on the left.

    Attributes:
        ids, mask, types: (b, n) token ids, 0 for padding, and 1 for image tokens.
        images: of each row, the tensors of its images.
        prefix: columns of the first turn.
    """

    family: str
    ids: Tensor
    mask: Tensor
    types: Tensor
    images: tuple[tuple[dict[str, Tensor], ...], ...] = field(repr=False)
    prefix: int

    def inputs(self) -> dict[str, Tensor]:
        """What a processor would give."""
        return {**self.text(), **self.pixels()}

    def pixels(self, before: Prompt | None = None) -> dict[str, Tensor]:
        """Pixels and what belongs to them, of the images that the conversation `before` does not have."""
        rows = [row[0 if before is None else len(before.images[index]) :] for index, row in enumerate(self.images)]
        flat = [image for row in rows for image in row]
        given: dict[str, Tensor] = {}
        if not flat:
            return given
        for name in flat[0]:
            given[name] = torch.cat([image[name] for image in flat])
        if self.family in ("smolvlm", "idefics3"):
            # (b, images, 3, h, w); rows with fewer images get black ones, which the model leaves out.
            most, black = max(map(len, rows)), torch.zeros_like(flat[0]["pixel_values"])
            padded = [torch.cat([image["pixel_values"] for image in row] + [black] * (most - len(row))) for row in rows]
            given["pixel_values"] = torch.stack(padded)
        return given

    def text(self) -> dict[str, Tensor]:
        """Token ids, mask and token types."""
        given = {"input_ids": self.ids, "attention_mask": self.mask}
        if self.family in (*MROPE, "gemma4"):
            given["mm_token_type_ids"] = self.types
        elif self.family == "gemma3":
            given["token_type_ids"] = self.types
        elif self.family == "paligemma":
            # 0 is the prefix, whose tokens see each other; what comes after the first turn is none of it.
            given["token_type_ids"] = (torch.arange(self.ids.shape[1]) >= self.prefix).long().expand_as(self.ids)
        return given

    def row(self, index: int) -> Prompt:
        """One row without its padding."""
        first = int((self.mask[index] == 0).sum())
        cut = (each[index : index + 1, first:] for each in (self.ids, self.mask, self.types))
        return Prompt(self.family, *cut, (self.images[index],), self.prefix - first)


def prompt(family: str, rows: Sequence[Sequence[Item]], state: int = 1, prefix: int | None = None) -> Prompt:
    """A batch of conversations; an item has the same tokens and pixels wherever its row begins alike.

    `prefix`: columns of the first turn; None: all.
    """
    made, images = [], []
    for number, row in enumerate(rows):
        pieces, mine = [torch.tensor([BOS])], []
        for place, item in enumerate(row):
            generator = torch.Generator().manual_seed(1000 * state + 100 * number + place)
            if isinstance(item, Tensor):
                pieces.append(item)
            elif isinstance(item, int):
                pieces.append(torch.randint(FIRST_TEXT, VOCABULARY, (item,), generator=generator))
            else:
                tensors, tokens = _IMAGES[family](item, generator)
                mine.append(tensors)
                pieces.append(torch.tensor([START] + [IMAGE] * tokens + [END]))
        made.append(torch.cat(pieces))
        images.append(tuple(mine))
    longest = max(len(row) for row in made)
    ids = torch.full((len(made), longest), PAD)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(made):
        ids[number, longest - len(row) :], mask[number, longest - len(row) :] = row, 1
    return Prompt(family, ids, mask, (ids == IMAGE).long(), tuple(images), longest if prefix is None else prefix)


def turn_two(
    before: Prompt, rows: Sequence[Sequence[Item]], answer: Tensor, more: Sequence[Item], state: int = 1
) -> Prompt:
    """The conversation of `rows`, the answers (b, t) to it, and one more turn of the user.

    Args:
        before: what `prompt` made of `rows`.
    """
    joined = [[*row, ids, *more] for row, ids in zip(rows, answer, strict=True)]
    return prompt(before.family, joined, state, before.ids.shape[1])


# Rows of unequal length, with one and two images; each is longer than the budgets of the tests.
ROWS: tuple[tuple[Item, ...], ...] = ((6, (2, 3), 9, (3, 2), 14), (12, (2, 2), 16), (9, (3, 3), (2, 3), 11))
# Random models would write placeholders of images, which no processor has made.
TEXT_ONLY = {"suppress_tokens": [BOS, IMAGE, VIDEO, START, END, PAD]}
