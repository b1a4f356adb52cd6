"""Which families of transformers' models can be served, and an error for the others.

A family is served if its code fetches its attention from transformers' attention interface. Others
take the name "clearhead" when they are built and then compute with code of their own, or break at a
distance from the cause.
"""

import functools
import inspect
import sys
from typing import Any

NAME = "clearhead"

INTERFACE = "ALL_ATTENTION_FUNCTIONS.get_interface("

# Families that use the interface in one part and, in another, add the mask that is made for it to
# scores of their own: a boolean mask would be taken for numbers.
MIXED = {
    "bigbird_pegasus": "its encoder",
    "git": "its text decoder",
    "informer": "its sparse attention",
}


def check(model: Any) -> None:
    """Raise unless every part of a model takes its attention from transformers' interface.

    `attn_implementation="clearhead"` and `use` ask the same of each model that they meet. Call this
    for a model that was built before `register`.

    Args:
        model: a PreTrainedModel, or a module that holds some.

    Raises:
        NotImplementedError: naming the first part that cannot be served, and what to do.
    """
    from transformers import PreTrainedModel

    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            check_class(type(part))


def check_class(cls: type) -> None:
    """Raise NotImplementedError if a class of models has attention that cannot be served."""
    instead = 'load it with attn_implementation="eager"'
    family = cls.__module__.rpartition(".modeling_")[2]
    if cls.__module__.startswith("transformers.") and family in MIXED:
        raise NotImplementedError(
            f"{cls.__name__} reads the mask in code of its own ({MIXED[family]}), which does not "
            f'know the masks of attn_implementation="{NAME}"; {instead}'
        )
    if not cls._can_set_attn_implementation() and _source(cls.__module__):  # type: ignore[attr-defined]
        raise NotImplementedError(
            f"{cls.__name__} computes attention in code of its own and not through transformers' "
            f'attention interface, so attn_implementation="{NAME}" would have no effect; {instead}'
        )


@functools.cache
def _source(module: str) -> str:
    """The code of a module; "" where there is none to read, as in an interactive session."""
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return ""


def refuse_when_built(cls: Any) -> None:
    """Let transformers' base class ask check_class about every model that is given the name.

    transformers itself takes any registered name for any family. In version 5.24, 92 modeling files
    have attention and not the interface; 50 of these never ask for a mask either, so that nothing
    but this would notice.
    """
    plain = cls.get_correct_attn_implementation
    if getattr(plain, "refuses", False):
        return

    @functools.wraps(plain)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            check_class(type(self))
        return plain(self, requested_attention, *args, **kwargs)

    checked.refuses = True  # type: ignore[attr-defined]
    cls.get_correct_attn_implementation = checked


def missing_extra(error: ImportError) -> ValueError:
    """What to say where a package that reading models needs is not installed."""
    return ValueError(
        f"reading models needs {error.name or 'transformers'}, which is not installed; "
        'pip install "clearhead[models]" brings it'
    )
