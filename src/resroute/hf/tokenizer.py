"""A corpus's tokenizer as a fast one of transformers, with the same ids."""

import json
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from resroute.data import END_OF_TEXT, CharTokenizer, SubwordTokenizer, Tokenizer

# not in the vocabulary: `tokenizers` raises an error that names it
_OUTSIDE = "a character outside the vocabulary"


def fast_tokenizer(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The same tokenizer for transformers: nothing is added to a text that it does not say.

    `<|endoftext|>` opens and ends documents and fills rows of a batch, on the left; a vocabulary
    without it has no token to fill with. Characters outside a vocabulary of characters are refused,
    left out or spelled as bytes, as ours does; bytes that are no UTF-8 decode to one replacement
    character each.

    Args:
        tokenizer: A corpus's.
        context: Most tokens that the model attends to.
    """
    backend: Any
    if isinstance(tokenizer, CharTokenizer):
        backend = _characters(tokenizer)
        has_end = tokenizer.end_of_text is not None
    else:
        assert isinstance(tokenizer, SubwordTokenizer)
        # what it would add to a text is for other models
        content = {**tokenizer.to_dict()["content"], "post_processor": None}
        content |= {"truncation": None, "padding": None}
        backend = Backend.from_str(json.dumps(content))
        added = content.get("added_tokens") or []
        has_end = any(token.get("content") == END_OF_TEXT for token in added)
    # as the backend has it: transformers would make another of a plain text
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    end = {f"{name}_token": known[END_OF_TEXT] for name in ("bos", "eos", "pad") if has_end}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **end,
    )


def _characters(tokenizer: CharTokenizer) -> Any:
    """A byte-pair model without pairs: one token a character."""
    by_bytes = tokenizer.unknown == "byte"
    words = list(tokenizer.characters)
    if by_bytes:
        words += [f"<0x{value:02X}>" for value in range(256)]
    if tokenizer.end_of_text is not None:
        words.append(END_OF_TEXT)
    model = models.BPE(
        vocab={word: place for place, word in enumerate(words)},
        merges=[],
        byte_fallback=by_bytes,
        unk_token=_OUTSIDE if tokenizer.unknown == "error" else None,
    )
    backend: Any = Backend(model)
    join = decoders.Fuse()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), join]) if by_bytes else join
    if tokenizer.end_of_text is not None:
        backend.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
    elif tokenizer.splits_at_ends:
        # a literal that the vocabulary cannot spell is left out as a whole
        backend.normalizer = normalizers.Replace(END_OF_TEXT, "")
    return backend
