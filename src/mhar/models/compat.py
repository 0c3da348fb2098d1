"""Every difference between the supported transformers versions (5.17 to 5.24), and nothing else.

Each is found by looking at the installed version, never by its number.
"""

import inspect
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.masking_utils import create_causal_mask

from mhar.errors import InputError

# 5.18 and later call the KV cache `cache` in attention, layers, mask builders, generate() and outputs; before, it was
# `past_key_values`. Modules swallow the wrong name in `**kwargs` and then silently decode without a cache.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def either_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache given under either name; raises InputError when two different ones are given."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise InputError("`cache` and `past_key_values` are two names of one argument, got two different caches")
    return past_key_values if cache is None else cache


def cache_argument(cache: Cache | None) -> dict[str, Any]:
    """The cache as a keyword argument (or output field) of the installed version's name."""
    return {CACHE_NAME: cache}


def register_expert_layout(model_type: str) -> None:
    """Let models of `model_type` read and write experts one by one, as checkpoints of sparse families store them.

    transformers keeps such layouts by model type; the names of dense families match none of its rules.
    """
    mapping: Any = get_checkpoint_conversion_mapping("qwen3_moe") or get_checkpoint_conversion_mapping("qwen2_moe")
    assert mapping is not None
    register_checkpoint_conversion_mapping(model_type, mapping, overwrite=True)


def keep_checkpointing(model: PreTrainedModel, base: PreTrainedModel) -> None:
    """Give `model` the gradient checkpointing of `base`, module by module: both call their modules alike.

    The switch and its property have other names in later versions; what they set on modules has not.
    """
    ours = dict(model.named_modules())
    for name, theirs in base.named_modules():
        if getattr(theirs, "gradient_checkpointing", False) and name in ours:
            for attribute in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                setattr(ours[name], attribute, getattr(theirs, attribute))
