"""Multi-head attention: plain as the textbook, fast as the machine, open to look inside."""

from .functional import Explanation, attention, explain, varlen_attention
from .inspection.roles import roles
from .module import MultiHeadAttention
from .results import Aux, AuxRequest
from .textbook import MultiHeadAttentionWrapper, SelfAttention, attention_by_definition

__version__ = "0.1.0"
__all__ = [
    "Aux",
    "AuxRequest",
    "Explanation",
    "MultiHeadAttention",
    "MultiHeadAttentionWrapper",
    "SelfAttention",
    "attention",
    "attention_by_definition",
    "explain",
    "roles",
    "varlen_attention",
]
