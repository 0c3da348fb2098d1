"""Which checkpoints can be converted, and what to do about the others."""

from collections.abc import Sequence
from typing import Any

from mhar.errors import CheckpointError, ConfigurationError, nearest
from mhar.models.families import FAMILIES
from mhar.routing import RoutingConfig

VISION_FIELDS = ("vision_config", "image_token_id", "image_token_index", "vision_tower", "audio_config")


def check_convertible(config: dict[str, Any]) -> None:
    """Raise CheckpointError unless `config` (contents of config.json) is that of a supported, unquantised decoder."""
    model_type = config.get("model_type")
    architectures: Sequence[str] = config.get("architectures") or ()
    named = f"{model_type!r}" + (f" ({', '.join(architectures)})" if architectures else "")
    if model_type == "mhar":
        raise CheckpointError(
            "this checkpoint is converted already: train it as it is, or take its closed routing off with `mhar revert`"
        )
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method", "unknown method")
        raise CheckpointError(
            f"this checkpoint is quantised ({method}): convert the unquantised checkpoint it was made from, or load"
            " it, call model.dequantize(), delete config.quantization_config and save it; quantise after conversion"
        )
    if any(config.get(field) is not None for field in VISION_FIELDS):
        raise CheckpointError(
            f"{named} is a multimodal model: only text decoders convert; save its language model alone first"
            f" (for Gemma 3: Gemma3ForCausalLM, model_type 'gemma3_text'). {supported_families()}"
        )
    if config.get("is_encoder_decoder") or is_encoder(architectures):
        raise CheckpointError(f"{named} has an encoder: only causal decoders convert. {supported_families()}")
    if model_type not in FAMILIES:
        raise CheckpointError(f"model family {named} is not supported{nearest(model_type, FAMILIES)}")
    expected = FAMILIES[model_type].causal_lm
    if architectures and expected not in architectures:
        raise CheckpointError(
            f"a checkpoint of family {model_type!r} must hold a {expected} (with its language-model head),"
            f" got {', '.join(architectures)}"
        )


def is_encoder(architectures: Sequence[str]) -> bool:
    """Whether the classes are bidirectional encoders or sequence-to-sequence models."""
    endings = ("ForMaskedLM", "ForPreTraining", "ForConditionalGeneration")
    return any(name.endswith(endings) or name.startswith(("Bert", "Roberta")) for name in architectures)


def check_starts_closed(routing: RoutingConfig) -> None:
    """Raise ConfigurationError unless `routing` leaves a pretrained model's function as it is at step 0."""
    if routing.read == "none" or (routing.read == "add" and routing.gate == "scalar"):
        return
    raise ConfigurationError(
        'a pretrained model converts with read "add" and gate "scalar" (variants delta_block_mhar and delta_mhar):'
        " zero gates leave its function unchanged;"
        f" got read {routing.read!r} and gate {routing.gate!r} (variant {routing.name!r}), which would change it"
    )


def supported_families() -> str:
    """One sentence that lists the families."""
    return f"Supported: {', '.join(FAMILIES)}."
