"""The model card of a converted checkpoint: where it comes from, under which licence, and how to use it."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mhar.conversion.checkpoint import Checkpoint
from mhar.errors import CheckpointError
from mhar.models import MharConfig
from mhar.routing import RoutingConfig

CARD = "README.md"
INHERITED = ("license", "license_name", "license_link", "language")

TAGS = ["mhar", "attention-residuals", "depth-routing"]

TEXT = """\
# {title}

{base} with multi-head depth routing added by `mhar convert`. Nothing has been trained yet: the logits are those of the
base model (`conversion_report.json` holds the comparison), and `mhar revert` gives the base back.

- Base revision: {revision}
- Base licence: {licence}
- Routing: {routing}, {num_routing:,} parameters

```python
import mhar.models  # registers the model with transformers; or pass trust_remote_code=True
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}")
```

Method: Luo, Cai, Hu, *Multi-Head Attention Residuals*, arXiv 2607.27230.
"""


def base_metadata(folder: Path) -> dict[str, Any]:
    """Licence and language fields of the base's own card; empty when it has no card.

    Raises:
        CheckpointError: the base's card has a header that is not YAML.
    """
    path = folder / CARD
    if not path.is_file():
        return {}
    try:
        data = ModelCard.load(path, ignore_metadata_errors=True).data.to_dict()
    except ValueError as error:
        raise CheckpointError(f"{path} has a damaged header: {error}") from error
    return {field: data[field] for field in INHERITED if data.get(field)}


def model_card(base: Checkpoint, config: MharConfig, num_routing: int, title: str) -> str:
    """Text of the card, with the header that the hub reads."""
    inherited = base_metadata(base.folder)
    on_hub = "/" in base.name
    fields: dict[str, Any] = {"license": "unknown", **inherited, "base_model_revision": base.revision}
    if on_hub:
        fields |= {"base_model": base.name, "base_model_relation": "finetune"}
    header = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=TAGS, **fields)
    body = TEXT.format(
        title=title,
        base=f"[{base.name}](https://huggingface.co/{base.name})" if on_hub else base.name,
        revision=f"`{base.revision}`" if base.revision else "not recorded in the base folder",
        licence=licence_of(inherited),
        routing=routing_in_words(config.routing_config),
        num_routing=num_routing,
    )
    return f"---\n{header.to_yaml()}\n---\n\n{body}"


def routing_in_words(routing: RoutingConfig) -> str:
    """The routing in one phrase."""
    if routing.read == "none":
        return "none (the additive baseline)"
    sources = f", blocks of {routing.block_size} layers" if routing.sources == "block" else ""
    return f"variant `{routing.name}`, {routing.num_heads} heads{sources}, all gates zero"


def licence_of(metadata: dict[str, Any]) -> str:
    """The licence in words."""
    licence = metadata.get("license")
    if licence is None:
        return "not stated in the base folder (see its source)"
    return str(metadata.get("license_name", licence)) if licence == "other" else str(licence)
