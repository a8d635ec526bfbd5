"""A tokenizer of any size without training: bytes, the chat's own tokens, and made-up words for every other id.

Text is read byte by byte, so every text can be encoded. A model with random weights samples any id, so every id stands
for a text: ` aaab`, ` aaacx`, ` aaadxx` and so on, of 4 to 11 letters.
"""

from __future__ import annotations

import string

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jobs.tiny_model.tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, ROLES

LENGTHS = 8
"""Made-up words have so many different lengths, all equally often."""


def make_tokenizer(vocab: int, max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with exactly `vocab` ids, at least some 300."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), PAD, BOS, EOS, *ROLES]
    names += [_word(number) for number in range(vocab - len(names))]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in (PAD, BOS, EOS, *ROLES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _word(number: int) -> str:
    """Four letters that no other number has, then up to seven x, behind the byte-level sign for a space."""
    letters = []
    rest = number
    for _ in range(4):
        rest, letter = divmod(rest, 26)
        letters.append(string.ascii_lowercase[letter])
    return "\u0120" + "".join(reversed(letters)) + "x" * (number % LENGTHS)
