"""A small byte-level tokenizer: digits stand alone, the task's fixed wording is one token, any other text is bytes.

Short sequences make the quickstart fast, and single digits let a small model learn to add. Every text can be encoded
(GSM8K too), because all 256 bytes are in the vocabulary.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
ANSWER_TAGS = ("<answer>", "</answer>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(questions: list[str], max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with byte-pair merges learnt from `questions`, padded to a vocabulary divisible by 8."""
    tokenizer = Tokenizer(models.BPE())
    # No word splitting: whole phrases between digits may merge into one token.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=len(questions) // 20,
        special_tokens=[PAD, BOS, EOS, *ROLES],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(questions, trainer)
    # Ordinary tokens, not special ones: they stay in decoded text, where rewards look for them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ANSWER_TAGS])
    missing = -tokenizer.get_vocab_size() % 8
    tokenizer.add_special_tokens([AddedToken(f"<|unused-{i}|>", special=True) for i in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
