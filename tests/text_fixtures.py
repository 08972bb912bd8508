"""Small tokenizers, chat templates and texts, built in milliseconds; tests/oracle/text_oracle.py uses them too."""

import json
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

DATA = Path(__file__).parent / "data"
SPACE = "\u2581"

EMOJI = (DATA / "emoji.txt").read_text(encoding="utf-8").split()
MGSM_LINES = (DATA / "mgsm_lines.tsv").read_text(encoding="utf-8").splitlines()
TRICKY = [
    "",
    " ",
    "a  b   c",
    " leading",
    "trailing ",
    "\n\n x\t y\r\n",
    "don't WE'RE 's ?",
    "12345 6.7 ¹²",
    "naïve café Ĝ Ö\u0301",
    "\ufffd\u200d\u2060",
    "the ▁ character",
    "<0x41> is no byte",
    "def f(x):\n    return x ** 2\n",
]
TEXTS = TRICKY + MGSM_LINES + EMOJI

SPECIAL = ["<|bos|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "ilÖveyou", " two words"]


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "Ġ"), ("e", "r"), ("Ġ", "a"), ("ä", "½")]


def byte_level() -> Tokenizer:
    """256 byte symbols, a few merges, special and plain added tokens; adds no BOS."""
    vocab = {symbol: index for index, symbol in enumerate(byte_alphabet())}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return tokenizer


# Pieces with the scores that SentencePiece would have given them, best (0) first.
PIECES = [SPACE + "the", SPACE + "a", "in", "th", "er", "he", SPACE + "t", SPACE + SPACE, "the", "re"]
LETTERS = [SPACE, *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?'0123456789<>|/_x"]


def sentencepiece_vocab() -> tuple[list[str], list[float], list[int]]:
    """tokens, scores and GGUF token types of a Llama-2-like vocabulary without CJK, emoji or newline."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256
    scores = [0.0] * len(tokens)
    for piece in [*PIECES, *dict.fromkeys(LETTERS)]:
        scores.append(float(-len(tokens) + 259))
        tokens.append(piece)
        types.append(gguf.TokenType.NORMAL)
    tokens += ["<|user|>", "<think>"]
    scores += [0.0, 0.0]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    return tokens, scores, [int(type_) for type_ in types]


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """A Llama-2-like tokenizer.json: prefix space, byte fallback, adds BOS; `strip=False` is Gemma's decoder."""
    tokens, _, _ = sentencepiece_vocab()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [(p[:1], p[1:]) for p in PIECES if len(p) == 2] + [(SPACE, "the"), ("th", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        if strip
        else [normalizers.Replace(" ", SPACE)]
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if strip else []))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<|user|>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """A vocabulary whose decoder is Metaspace (T5-like), without bytes: other characters are <unk>."""
    vocab = {token: index for index, token in enumerate(["<unk>", *dict.fromkeys(LETTERS), *PIECES])}
    merges = [(p[:1], p[1:]) for p in PIECES if len(p) == 2] + [(SPACE, "the"), ("th", "e")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


BYTE_LEVEL_CONFIG = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|eot|>"}
SENTENCEPIECE_CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def save(
    folder: Path, backend: Tokenizer, tokenizer_config: dict[str, Any], **other_files: dict[str, Any]
) -> Path:
    """A model folder with tokenizer.json, tokenizer_config.json and `other_files` (name without .json)."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": tokenizer_config, **other_files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def byte_level_metadata(pre: str = "gpt-2", **keys: Any) -> dict[str, Any]:
    """The keys that a GGUF file of `byte_level()` would have; `keys` go behind "tokenizer.ggml."."""
    tokens = [*byte_alphabet(), *(left + right for left, right in MERGES), *SPECIAL, *ADDED]
    types = [gguf.TokenType.NORMAL] * (len(tokens) - len(SPECIAL) - len(ADDED))
    types += [gguf.TokenType.CONTROL] * len(SPECIAL) + [gguf.TokenType.USER_DEFINED] * len(ADDED)
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [int(type_) for type_ in types],
        "merges": [f"{left} {right}" for left, right in MERGES],
        "bos_token_id": tokens.index("<|bos|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def sentencepiece_metadata(**keys: Any) -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocab()
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    metadata |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | keys).items()}


def write_gguf(path: Path, metadata: dict[str, Any], chat_template: str | None = None) -> Path:
    """A vocabulary-only GGUF file."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# Written for these tests; each has what a family of published templates does.
TEMPLATES = {
    "chatml": """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "bos_and_date": """{{ bos_token }}
{%- if not date is defined %}{% set date = strftime_now("%d %b %Y") %}{% endif %}
{{- "<|im_start|>Today: " + date + "<|eot|>" }}
{% for message in messages %}
    {% generation %}
{{ message.role | upper }}: {{ message.content | trim }}<|eot|>
    {% endgeneration %}
{% endfor %}
{% if add_generation_prompt %}
ASSISTANT:
{%- endif %}""",
    "no_system": """{%- if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- bos_token if loop.first else '' }}{{ message.role }}: {{ message.content }}{{ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}""",
    "tools_and_thinking": """{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=none) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' and loop.last %}{% continue %}{% endif %}
{%- set content = message.content if message.content is defined else '' %}
{%- if '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson(indent=2) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}""",
    "parts": """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>{% endfor %}""",
}

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather in <city> & région",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Where is the inn?"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  the 你好 👩‍👩‍👧 \n"},
    ],
    "two_users": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "history": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello there.  "},
        {"role": "user", "content": "in the café?"},
    ],
    "calls": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "weather", "arguments": {"city": "Åbo"}}}
            ],
        },
        {"role": "tool", "content": "rain"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "end"}]}
    ],
    "last_assistant": [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "1, 2, "}],
}
