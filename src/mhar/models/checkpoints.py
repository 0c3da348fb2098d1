"""Loading that leaves nothing unsaid: safetensors only, and every missing or unexpected key is an error."""

from pathlib import Path
from typing import Any, Self

from mhar.errors import CheckpointError

UNSAFE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class StrictLoading:
    """Mixin for `PreTrainedModel` subclasses."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, strict: bool = True, **kwargs: Any
    ) -> Self | tuple[Self, dict[str, Any]]:
        """transformers' `from_pretrained`, strict.

        Args:
            pretrained_model_name_or_path: a folder or a name, as in transformers; weights must be safetensors.
            strict: raise when the checkpoint lacks parameters of the model or brings others. False initialises the
                missing ones, which is how a pretrained base gets routing that has not been trained yet.
            args, kwargs: as in transformers.

        Raises:
            CheckpointError: no safetensors file, or (strict) missing or unexpected keys, all listed.
        """
        refuse_unsafe(pretrained_model_name_or_path)
        with_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(  # pyright: ignore[reportAttributeAccessIssue]
            pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True, "output_loading_info": True}
        )
        if strict:
            check_keys(
                pretrained_model_name_or_path, info, ignored_prefix=() if hasattr(model, "lm_head") else ("lm_head.",)
            )
        return (model, info) if with_info else model


def refuse_unsafe(folder: Any) -> None:
    """Raise CheckpointError for a local folder that holds weights, but none as safetensors."""
    path = Path(str(folder))
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return
    unsafe = sorted(file.name for pattern in UNSAFE_PATTERNS for file in path.glob(pattern))
    found = f"found {', '.join(unsafe)}" if unsafe else "found no weights"
    raise CheckpointError(
        f"a checkpoint must be in safetensors files (pickled weights can run code); {found} in {path}"
    )


def check_keys(source: Any, info: dict[str, Any], ignored_prefix: tuple[str, ...] = ()) -> None:
    """Raise CheckpointError that lists all missing and unexpected keys of transformers' loading info."""
    missing = sorted(info["missing_keys"])
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.startswith(ignored_prefix or ("\0",)))
    if not missing and not unexpected:
        return
    lines = [f"checkpoint {source} does not fit the model"]
    lines += [f"missing ({len(missing)}): {', '.join(missing)}"] if missing else []
    lines += [f"unexpected ({len(unexpected)}): {', '.join(unexpected)}"] if unexpected else []
    raise CheckpointError("; ".join(lines))
