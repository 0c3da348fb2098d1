"""Errors that a user can cause. Each message names the rule and the value received."""

import difflib
from collections.abc import Iterable


class MharError(ValueError):
    """Base of every error that this library raises about its input."""


class ConfigurationError(MharError):
    """A configuration value, or a combination of values, that has no meaning."""


class InputError(MharError):
    """A tensor, file or argument that breaks a stated rule."""


class OrderError(MharError):
    """`read()` and `append()` called in an order that the routing sites do not allow."""


class CheckpointError(MharError):
    """A checkpoint that cannot be loaded or converted as asked."""


class BackendError(MharError):
    """A backend was asked for where it cannot run, or for something that it cannot compute."""


class DependencyError(MharError, ImportError):
    """An optional dependency is missing; the message names the extra that brings it."""


def nearest(name: object, options: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` when a valid name is close to `name`, and the list of valid names."""
    valid = sorted(options)
    close = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Valid: {', '.join(valid)}"


def unknown(kind: str, name: object, options: Iterable[str]) -> ConfigurationError:
    """The error for a name that does not exist: what was given, the nearest valid name, all valid names."""
    return ConfigurationError(f"unknown {kind} {name!r}{nearest(name, options)}")
