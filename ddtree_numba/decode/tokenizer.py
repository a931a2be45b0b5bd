"""Text to tokens and back, from what a GGUF file says of its tokenizer.

Byte-level BPE after GPT-2, with digits split one by one before it (llama.cpp calls this combination "smollm").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

CONTROL = 3  # GGUF's type of a token that stands for no text


class Tokenizer:
    """Made from a GGUF reader.

    Attributes
    ----------
    eos : int
        The token that ends a reply.

    Raises
    ------
    ValueError
        The file's tokenizer is of another kind.
    """

    def __init__(self, reader: Any) -> None:
        from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Library

        def field(name: str, default: Any = None) -> Any:
            found = reader.fields.get(f"tokenizer.{name}")
            return default if found is None else found.contents()

        kind = field("ggml.model"), field("ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"the file's tokenizer is {kind[0]}/{kind[1]}; only gpt2/smollm is known here")
        tokens = field("ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in field("ggml.merges")]
        library = Library(models.BPE({token: n for n, token in enumerate(tokens)}, merges))
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        library.decoder = decoders.ByteLevel()
        control = [token for token, type_ in zip(tokens, field("ggml.token_type"), strict=True) if type_ == CONTROL]
        library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        self._library = library
        self._template = field("chat_template")
        self.eos: int = field("ggml.eos_token_id")

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; no token is put before it."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; control tokens have none."""
        text: str = self._library.decode(list(ids), skip_special_tokens=True)
        return text

    def stream(self) -> Callable[[int], str]:
        """A function that takes one token after the other and gives the text that became whole: "" within a letter."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._library, token) or ""

    def chat(self, prompt: str) -> str:
        """A user's message in the model's own chat template, up to where the reply begins."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._template is None:
            return prompt
        template = ImmutableSandboxedEnvironment().from_string(self._template)
        return template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
