"""Lengths of captions in tokens, by the tokenizer in a model's folder: no encoder is loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)


def count_tokens(folder: Path, texts: Sequence[str]) -> list[int]:
    """Length of each text in tokens, by the tokenizer in a model's folder."""
    return [len(ids) for ids in load_tokenizer(folder)(list(texts))["input_ids"]]


def count_chat_tokens(folder: Path, captions: Sequence[str], *, enable_thinking: bool) -> list[int]:
    """Length of each caption as a user's message in the chat template of a model's tokenizer."""
    tokenizer = load_tokenizer(folder)
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": enable_thinking}
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": caption}], **options)
        for caption in captions
    ]
    return [len(ids) for ids in tokenizer(chats)["input_ids"]]
