"""load_tokenizer: the tokenizer in the metadata of a GGUF file, through transformers' converters.

WordPiece, for BERT, is converted here because transformers has no converter for it: a file marks pieces that begin a
word with U+2581 and leaves others unmarked, where BERT's vocabulary has "##" before the latter.
"""

from pathlib import Path
from typing import Any

import transformers
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

from hop.interchange import open_gguf
from hop.interchange.files import checked_path
from hop.numerics.spelling import JsonObject, shown

_BEGINS, _CONTINUES = "\u2581", "##"
_CONTROL = 3  # the type of tokens such as [CLS]
_SPECIAL = {
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
    "cls_token": "cls",
}  # "seperator" is the key's spelling
_SPECIAL |= {"mask_token": "mask"}


def load_tokenizer(path: str | Path) -> Any:
    """Load the tokenizer of a model that `load_model` reads.

    Args:
        path: a GGUF file, or a folder with tokenizer files.

    Returns:
        A transformers tokenizer, with the special tokens and the chat template of the file.

    Raises:
        TypeError: path is not a path.
        FileNotFoundError: the file or folder does not exist.
        ValueError: the file is damaged, or has no tokenizer, or one other than byte-level BPE (gpt2), sentencepiece
            (llama), unigram (t5) and WordPiece (bert).
    """
    place = checked_path("load_tokenizer", path, "model.gguf")
    if place.is_dir():
        return transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    metadata = open_gguf(place).metadata
    kind, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError(f"load_tokenizer: {place} has no tokenizer.ggml.tokens; get the tokenizer from elsewhere")
    if kind == "bert":
        return _word_piece(place, metadata)
    try:
        architecture, described, options = get_gguf_tokenizer(str(place))
        backend, _ = convert_gguf_tokenizer(architecture, described)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"load_tokenizer: {place}: cannot create a tokenizer from its metadata: {shown(error)}"
        ) from error
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def _word_piece(place: Path, metadata: JsonObject) -> Any:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: Any = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
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
    special: JsonObject = {}
    for name, key in _SPECIAL.items():
        at = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(at, int) and 0 <= at < len(pieces):
            special[name] = pieces[at]
    # llama.cpp converts text to lower case for every such file.
    return transformers.BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, do_lower_case=True, **special)
