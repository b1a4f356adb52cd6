"""Models of Hugging Face transformers: attention through clearhead, weights layer by layer.

register()    makes attn_implementation="clearhead" known to transformers.
use()         switches a model that is there already.
check()       raises for a model whose family cannot be served.
load()        any model that transformers can load, or SmolLM2-135M from its package.
tokenize()    text to token numbers, each with its place in the text.
attentions()  one run of the model, which hands over one layer's weights at a time.

transformers is imported by the functions that need it: loading it takes seconds.
"""

from .families import NAME, check
from .interface import register, use
from .loading import DEFAULT_MODEL, load, reader
from .reading import OnLayer, Tokens, attentions, tokenize

__all__ = [
    "DEFAULT_MODEL",
    "NAME",
    "OnLayer",
    "Tokens",
    "attentions",
    "check",
    "load",
    "reader",
    "register",
    "tokenize",
    "use",
]
