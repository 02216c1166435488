"""A small tokenizer as `transformers` writes it, chat templates, and conversations for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

WORDS = ["the ", "quick ", "brown ", "fox ", "says ", "yes", "no", "user", "assistant", "system", "Ünïcode", "\n\n"]
SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|/header|>", "<|turn|>"]

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    [[{{- message['content'] + '<|im_end|>' + '\\n' }}]]
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|header|>system<|/header|>\\n\\nBe brief.<|turn|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
    {{- '<|header|>' + message.role + '<|/header|>\\n\\n' }}
    [[{{- message.content | trim }}
    {%- if message.notes is defined %}
        {{- message.notes | tojson }}
    {%- endif %}
    {{- '<|turn|>' }}]]
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}
"""

MARKED = """{% set ns = namespace(count=0) %}
{{ bos_token }}
{% for message in messages %}
{% if message['role'] == 'assistant' %}
assistant:{{ ' ' }}
{%- generation -%}
{{ message['content'] }}{{ eos_token }}
{%- endgeneration %}

{% elif message['role'] == 'user' %}
{% set ns.count = ns.count + 1 %}
user {{ ns.count }}: {{ message['content'] }}
{% else %}
{% continue %}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}
"""
"""This one marks the assistant's text itself, without the line break after it, and leaves other roles out."""

_TURN = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_IN_BLOCKS = (
    "{%- if message['role'] == 'assistant' %}{%- generation %}\\1{%- endgeneration %}{%- else %}\\1{%- endif %}"
)
PLAIN = {name: _TURN.sub(r"\1", text) for name, text in (("chatml", CHATML), ("llama3", LLAMA3))}
"""Templates that do not mark what the assistant says."""

BLOCKS = {name: _TURN.sub(_IN_BLOCKS, text) for name, text in (("chatml", CHATML), ("llama3", LLAMA3))}
"""The same with marks, as `transformers` needs them."""

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "the quick fox"}, {"role": "assistant", "content": "says yes"}],
    [
        {"role": "system", "content": "  Ünïcode 漢字 <b>&amp;</b> "},
        {"role": "user", "content": "yes\n\nno"},
        {"role": "assistant", "content": " no, 😀 no \n"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "\n"},
    ],
    [
        {"role": "user", "content": "two answers"},
        {"role": "assistant", "content": "quick", "notes": {"why": ["<é>", 1, None]}},
        {"role": "assistant", "content": "brown <|im_end|> fox"},
        {"role": "user", "content": "and nothing after this"},
    ],
]


def write_tokenizer(directory: Path, template: str | None = None, **config: Any) -> Any:
    """Write a byte-level tokenizer as `transformers` does, and give it as it loads it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(WORDS * 5, trainer)
    library.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ends = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer = make(tokenizer_object=library, **{**ends, **config})
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory)


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> Path:
    """One record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
