"""Pre-tokenizers of byte-level BPE vocabularies: how text is split into words before merging, by `tokenizer.ggml.pre`.

The regular expressions are those of the models' published tokenizer files, in the syntax that these use (Oniguruma); the names
are those that llama.cpp's src/llama-vocab.cpp accepts.
"""

from __future__ import annotations

from ..data_classes import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3, _QWEN2 = _WORDS % "{1,3}", _WORDS % ""
_CASED = (  # words are capitals and then small letters: "camelCase" is two
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NOT_HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# Character classes as ranges of code points (written out, some would look alike or change when the text is normalised).
_CASED_LETTERS = (  # letters of scripts with two cases, as deepseek-llm lists them
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376 377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 "
    "1d79-1d9a 1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe "
    "1fc2-1fc4 1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 "
    "2126 2128 212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183 2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2 2cf3 "
    "a640-a66d a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a "
    "10400-1044f 104b0-104d3 104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943 "
)
_CJK = "4e00-9fa5 800-4e00 ac00-d7ff"
_KANA = "4e00-9fa5 3040-309f 30a0-30ff"
_PUNCTUATION = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"


def _any_of(blocks: str) -> str:
    """Ranges of code points such as '41-5a b5' -> the regular expression of their character class."""
    return "[" + "".join("-".join(rf"\x{{{code}}}" for code in block.split("-")) for block in blocks.split()) + "]"


@dataclass(frozen=True)
class PreTokenizer:
    """The splitting rules of a vocabulary.

    splits         regular expressions applied in order; each isolates its matches within the pieces that the one before left
    ignore_merges  a word that is a token is not merged from its bytes (as llama.cpp calls it)
    add_bos        whether text starts with BOS when tokenizer.ggml.add_bos_token is absent
    thousands      the first expression groups digits in threes from the right, by a look ahead to the end of the number: its
                   time grows with the square of the number's length, so the tokenizer does this by itself
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    thousands: bool = False


_GPT2_WORDS = PreTokenizer((_GPT2,))
_LLAMA3_WORDS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = PreTokenizer((_LLAMA3,))
_QWEN2_WORDS = PreTokenizer((_QWEN2,))
_GPT4O_WORDS = PreTokenizer((_CASED % (_CONTRACTION, _CONTRACTION, "{1,3}"),))
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        _any_of(_KANA) + "+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

# Rules that several names share -> these names.
_SHARED: dict[PreTokenizer, str] = {
    _GPT2_WORDS: "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum modern-bert exaone4 "
    "jina-es jina-de jina-v2-es jina-v2-de",
    _LLAMA3_WORDS: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    _LLAMA3_MERGED: "dbrx smaug-bpe glm4 chatglm-bpe",
    _QWEN2_WORDS: "qwen2 deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2 megrez kormo openpangu",
    _GPT4O_WORDS: "gpt-4o llama4 kanana2 minimax-m2",
    _DEEPSEEK3: "deepseek-v3 hunyuan-dense joyai-llm",
    _DIGITS_THEN_GPT2: "starcoder refact command-r cohere2_moe smollm codeshell exaone minerva-7b mellum2",
    PreTokenizer((_BLOOM,)): "bloom poro-chat gpt3-finnish",
    PreTokenizer((_BAILING,)): "bailingmoe bailingmoe2 llada-moe",
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **{name: rule for rule, names in _SHARED.items() for name in names.split()},
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "qwen35": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((_CASED % ("", "", ""),), ignore_merges=True, add_bos=True),
    "tiny_aya": PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _CASED % (_CONTRACTION, _CONTRACTION, "{1,3}")), thousands=True),
    "kimi-k2": PreTokenizer(
        (
            r"[\p{Han}]+"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}*{_NOT_HAN[1]}+{_CONTRACTION}"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_NOT_HAN[0]}+{_NOT_HAN[1]}*{_CONTRACTION}"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?{_any_of(_CASED_LETTERS)}+",
            rf"\s?{_any_of(_PUNCTUATION)}+",
            r"\s+$",
            _any_of(_CJK) + "+",
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _any_of(_CJK) + "+", r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    "exaone-moe": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "jais-2": PreTokenizer(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
}
