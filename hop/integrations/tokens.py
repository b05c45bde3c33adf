"""load_tokenizer: the tokenizer that the metadata of a GGUF file describe, by transformers' converters.

WordPiece, of BERT's files, is written here, for transformers has no converter of it: a file holds pieces that begin a
word behind U+2581, and others as they are, where a vocabulary of BERT has "##" before these.
"""

from pathlib import Path
from typing import Any, cast

import transformers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from hop.interchange import open_gguf
from hop.interchange.files import checked_path
from hop.numerics.spelling import shown

_BEGINS, _CONTINUES = "\u2581", "##"
_CONTROL = 3  # the type of tokens such as [CLS]
_SPECIAL = {"unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding", "cls_token": "cls"}  # as spelled
_SPECIAL |= {"mask_token": "mask"}


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer of a model that `load_model` reads.

    Args:
        path: of a GGUF file, or of a folder with the tokenizer's own files.

    Returns:
        A tokenizer of transformers, with the special tokens and the chat template of the file.

    Raises:
        TypeError: path is no path.
        FileNotFoundError: there is no such file or folder.
        ValueError: the file is damaged, or has no tokenizer, or one of another kind than byte-level BPE (gpt2),
            sentencepiece (llama), unigram (t5) and WordPiece (bert).
    """
    place = checked_path("load_tokenizer", path, "model.gguf")
    if place.is_dir():
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    metadata = open_gguf(place).metadata
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"load_tokenizer: {place} has no tokenizer.ggml.tokens; take the tokenizer from elsewhere")
    if kind == "bert":
        return _word_piece(place, metadata)
    try:
        architecture, described, options = get_gguf_tokenizer(str(place))
        backend, _ = convert_gguf_tokenizer(architecture, described)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"load_tokenizer: {place}: no tokenizer of its metadata: {shown(error)}") from error
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _word_piece(place: Path, metadata: dict[str, Any]) -> Any:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Any = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(cast("list[Any]", kinds)) != len(tokens):
        raise ValueError(
            f"load_tokenizer: {place}: tokenizer.ggml.token_type must have a number for each of {len(tokens)} tokens, "
            f"got {shown(kinds)}; convert the model again"
        )
    pieces = [
        token
        if kind == _CONTROL or (token.startswith("[") and token.endswith("]"))
        else token.removeprefix(_BEGINS)
        if token.startswith(_BEGINS)
        else _CONTINUES + token
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    special: dict[str, Any] = {}
    for name, key in _SPECIAL.items():
        at = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(at, int) and 0 <= at < len(pieces):
            special[name] = pieces[at]
    # Texts are in lower case, as llama.cpp brings them to it for every such file.
    return transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, do_lower_case=True, **special)
