"""Reads API keys' hashes from a file next to the configuration, such as a Secret mounted into ingress pods."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from deployments.config.args import AccessSettings, AppArgs
from deployments.config.faults import first_fault
from engine.base.files import read_text

_MAX_BYTES = 2**26


def with_access_file(args: AppArgs) -> AppArgs:
    """Return `args` with the tenants and admin key of its `access_file`; without such a file, `args` itself.

    Raises ValueError when the file cannot be read or would leave the service open. The message contains no hash.
    """
    if args.access_file is None:
        return args
    access = _read(Path(args.access_file))
    if not access.tenants:
        raise ValueError(
            f"access_file: {args.access_file} names no tenant, so everybody could use the service; name one, or "
            "leave out access_file if that is what you want"
        )
    if args.protect_metrics and access.admin_key_hash is None:
        raise ValueError(
            f"access_file: {args.access_file} has no admin_key_hash, which protect_metrics needs; add one"
        )
    return args.model_copy(update={**dict(access), "access_file": None})


def _read(path: Path) -> AccessSettings:
    try:
        content = yaml.safe_load(read_text(path, _MAX_BYTES))
        return AccessSettings.model_validate({} if content is None else content)  # None: an empty file
    except OSError as error:
        raise ValueError(f"access_file: cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
        raise ValueError(
            f"access_file: {path} is not YAML; it should contain tenants and admin_key_hash"
        ) from None
    except ValidationError as error:
        raise ValueError(f"access_file: {path}: {first_fault(error)}") from None
