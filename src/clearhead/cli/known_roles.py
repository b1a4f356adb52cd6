"""The roles of a model's heads, measured once and kept as JSON in the user's cache folder."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from clearhead.inspection import sentences
from clearhead.inspection.roles import VERSION, OnProgress, RoleTable, roles


def known_roles(model: Any, tokenizer: Any, refresh: bool, progress: OnProgress) -> RoleTable:
    """The table of roles: read where it was kept for just this model, else measured and kept.

    A file that is broken counts as none, and a folder that cannot be written keeps nothing.

    Args:
        refresh: measure anyway.
    """
    file = folder() / f"{key(model, tokenizer)}.json"
    if not refresh:
        with contextlib.suppress(OSError, ValueError):
            return RoleTable.from_dict(json.loads(file.read_text(encoding="utf-8")))
    table = roles(model, tokenizer, progress=progress)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when it is whole, so that no run ever reads half a table.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=file.parent, suffix=".new", delete=False
        ) as new:
            json.dump(table.to_dict(), new)
        os.replace(new.name, file)
    return table


def folder() -> Path:
    """Where tables are kept: below CLEARHEAD_CACHE, or else the user's cache folder."""
    import platformdirs

    cache = os.environ.get("CLEARHEAD_CACHE") or platformdirs.user_cache_dir("clearhead")
    return Path(cache) / "roles"


def key(model: Any, tokenizer: Any) -> str:
    """A name for all that the roles depend on: weights, configuration, tokens, sentences, code."""
    told = hashlib.sha256(VERSION.encode())
    told.update(f"{type(model).__name__} {model.config.to_json_string()}".encode())
    for name, tensor in model.state_dict().items():  # 540 MB take 0.3 s (2026-11)
        told.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        told.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    for sentence in [*sentences.syntax(), *sentences.pronouns()]:
        told.update(f"{tokenizer(sentence.text)['input_ids']}".encode())
    return told.hexdigest()[:32]
