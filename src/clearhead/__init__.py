"""Multi-head attention: plain as the textbook, fast as the machine, open to look inside."""

from typing import TYPE_CHECKING, Any

from .functional import Explanation, attention, explain, varlen_attention
from .inspection.roles import roles
from .module import MultiHeadAttention
from .results import Aux, AuxRequest, Summary, TopK
from .textbook import MultiHeadAttentionWrapper, SelfAttention, attention_by_definition

if TYPE_CHECKING:
    from .inspection.importance import head_importance
    from .inspection.record import Seen
    from .inspection.trace import trace
    from .inspection.watch import watch

__version__ = "0.1.0"
__all__ = [
    "Aux",
    "AuxRequest",
    "Explanation",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "Seen",
    "SelfAttention",
    "Summary",
    "TopK",
    "attention",
    "attention_by_definition",
    "explain",
    "head_importance",
    "roles",
    "trace",
    "varlen_attention",
    "watch",
]


def __getattr__(name: str) -> Any:
    """What looks into models is imported when it is first asked for."""
    if name in ("Seen", "head_importance", "trace", "watch"):
        from .inspection import importance, record, trace, watch

        return {
            "Seen": record.Seen,
            "head_importance": importance.head_importance,
            "trace": trace.trace,
            "watch": watch.watch,
        }[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
