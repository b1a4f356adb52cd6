"""What a call can return beside its output."""

from dataclasses import dataclass

from torch import Tensor

LATER = ("max_logit", "entropy", "top_k", "key_mass", "first_mass", "previous_mass", "self_mass",
         "distance")  # fmt: skip


@dataclass(frozen=True)
class AuxRequest:
    """What to return beside the output.

    Args:
        lse: log of the sum of exp(score) over the keys a row may see (and its sink), (B, H, L),
            natural log, float32 (float64 for float64), differentiable; -inf for an empty row.
        weights: the attention weights, (B, H, L, S), float32 or float64, differentiable, from
            before dropout and before head_mask; rows sum to 1, to less with a sink, and are 0
            where empty. This one needs memory for all L * S numbers.
        max_logit, entropy, top_k, key_mass, first_mass, previous_mass, self_mass, distance: names
            that are reserved; asking for one raises NotImplementedError in this version.

    >>> AuxRequest(lse=True)
    AuxRequest(lse=True)
    """

    lse: bool = False
    max_logit: bool = False
    entropy: bool = False
    top_k: int = 0
    key_mass: bool = False
    first_mass: bool = False
    previous_mass: bool = False
    self_mass: bool = False
    distance: bool = False
    weights: bool = False

    def __repr__(self) -> str:
        asked = [f"{name}={value}" for name, value in vars(self).items() if value]
        return f"AuxRequest({', '.join(asked)})"


@dataclass
class Aux:
    """What an AuxRequest asked for; a field that was not asked for is None."""

    lse: Tensor | None = None
    weights: Tensor | None = None


def checked(request: AuxRequest | None) -> AuxRequest:
    """The request, or an empty one for None; raises for what this version cannot return."""
    if request is None:
        return AuxRequest()
    if not isinstance(request, AuxRequest):
        raise TypeError(
            f"attention: return_aux is a {type(request).__name__}; it must be an AuxRequest, such "
            "as AuxRequest(lse=True)"
        )
    later = [name for name in LATER if getattr(request, name)]
    if later:
        raise NotImplementedError(
            f"attention: {', '.join(later)} will come with a later version; this one returns lse "
            "and weights, and the others can be computed from the weights"
        )
    return request
