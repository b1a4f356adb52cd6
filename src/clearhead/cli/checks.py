"""What the command line checks in the numbers it is given, in one line each."""

from typing import Any


def within(name: str, value: int, least: int, most: int) -> None:
    """Raise ValueError where a number from the command line is out of bounds."""
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise ValueError(f"{name} is {value}; it must be {bound}")


def numbers(name: str, text: str, form: str, allow_none: bool = False) -> tuple[Any, ...]:
    """Whole numbers apart by commas, as many as `form` has; "none" is None where it is allowed."""
    parts = [part.strip() for part in text.split(",")]
    try:
        found = tuple(None if allow_none and p.lower() == "none" else int(p) for p in parts)
    except ValueError:
        found = ()
    if len(found) != form.count(",") + 1:
        kind = "whole numbers or none" if allow_none else "whole numbers"
        raise ValueError(f"{name} is {text!r}; it must be {kind} in the form {form}")
    return found
