"""Make small tokenizers with chat templates, of the kinds that models have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

if TYPE_CHECKING:
    from flexcache.router.tokens import Tokenizers

_CORPUS = [
    f"block {i} of a prompt that a cache has seen before, tier {i % 3}\n  return x ** {i}"
    for i in range(300)
]

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

HEADERS = """{{- bos_token }}
{%- set loop_messages = messages %}
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "<|eot_id|>" }}
{%- for message in loop_messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] | trim }}
    {%- else %}
        {%- for content in message['content'] %}
            {%- if content['type'] == 'image' %}
                {{- '<|image|>' }}
            {%- elif content['type'] == 'text' %}
                {{- content['text'] | trim }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

INST = """{{ bos_token }}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{{ ' ' + message['content'] + eos_token }}
{%- else -%}
{{ raise_exception('Only user and assistant roles are supported!') }}
{%- endif -%}
{%- endfor -%}"""


def _byte_level(specials: list[str], *, add_prefix_space: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,  # with the added ones below 512, as in `make_models`
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer


def _chatml() -> tuple[Tokenizer, dict[str, Any]]:
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>x", "<|im", "|>user"]
    tokenizer = _byte_level(specials)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    return tokenizer, {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }


def _headers() -> tuple[Tokenizer, dict[str, Any]]:
    bos = "<|begin_of_text|>"
    specials = [bos, "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|image|>"]
    tokenizer = _byte_level(specials)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos}:1 $B:1",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            ),
        ]
    )
    return tokenizer, {"bos_token": bos, "eos_token": "<|eot_id|>", "chat_template": HEADERS}


def _sentencepiece(prepend: str) -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if prepend == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=True)
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    # Such take the white space around them, or are found in normalised text only.
    tokenizer.add_tokens([AddedToken("<r>", rstrip=True, lstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("ﬁne", normalized=True), AddedToken("<w>", single_word=True)])
    return tokenizer, {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "unk_token": "<unk>",
        "chat_template": INST,
    }


_MAKERS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "chatml": _chatml,
    "headers": _headers,
    "metaspace_first": lambda: _sentencepiece("first"),
    "metaspace_always": lambda: _sentencepiece("always"),
    "prepend": lambda: _sentencepiece("normalizer"),
}
TOKENIZERS = tuple(_MAKERS)


def make_tokenizer(directory: Path, name: str) -> Path:
    """Make one tokenizer; returns its directory."""
    target = directory / name
    target.mkdir(parents=True, exist_ok=True)
    tokenizer, config = _MAKERS[name]()
    tokenizer.save(str(target / "tokenizer.json"))
    defaults: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    config = defaults | config
    template = config.pop("chat_template")
    if name == "headers":  # newer models have it in a file of its own
        (target / "chat_template.jinja").write_text(template)
    else:
        config["chat_template"] = template
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


async def ask_for_models(readers: Tokenizers, *urls: str) -> None:
    """Have a router's tokenizers know what engines serve, as its probes tell it."""
    from flexcache.router.prober import read_models
    from flexcache.router.tokens.engines import open_session

    async with open_session({}) as session:
        for url in urls:
            cards = await read_models(session, url)
            assert cards is not None, f"{url} does not answer"
            readers.set_cards(url, cards)
    await readers.start()
