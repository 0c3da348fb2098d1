"""Which devices a model can run on here."""

import torch

from mhar.errors import ConfigurationError


def check_device(name: str) -> str:
    """`name`, a device that holds numbers on this machine.

    Raises:
        ConfigurationError: a device that PyTorch does not know, that this machine lacks, or that computes nothing
            ("meta").
    """
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigurationError(f"device {name!r} cannot be used here: {reason}") from error
    return name
