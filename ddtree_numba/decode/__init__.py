"""DDTree on a real language model, from prompt to text::

    from ddtree_numba.decode import decode

    print(decode("Count from 1 to 20.")[0].text)

Needs the extra ``decode``: gguf, jinja2, threadpoolctl, tokenizers.
"""

from ddtree_numba.decode.drafter import Drafter, PromptLookup
from ddtree_numba.decode.loop import Decoded, decode, load, logit_gap
from ddtree_numba.decode.model_file import ModelFileError, model_file

__all__ = ["Decoded", "Drafter", "ModelFileError", "PromptLookup", "decode", "load", "logit_gap", "model_file"]
