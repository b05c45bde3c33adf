"""load_tokenizer: tokenizers of GGUF files against those that they were written from."""

from typing import Any

import pytest
from parameterized import parameterized

from tests.integrations.gguf_files import package
from tests.integrations.models import NEEDED, QUIET
from tests.support.files import InFolder

for name in NEEDED:
    pytest.importorskip(name, reason=f"{name} is not installed")
transformers: Any = pytest.importorskip("transformers")
tokenizers: Any = pytest.importorskip("tokenizers")

from hop.integrations import load_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(*QUIET)
TEXTS = ["The quick brown fox jumps over the lazy dog.", "a cat, a Cat; 2,048 cats  and\nmore", "thé über 猫"]
NORMAL, CONTROL = 1, 3


class TestTokenizer(InFolder):
    def written(self, architecture: str, kind: str, tokens: list[str], types: list[int], **keys: Any) -> Any:
        """The path of a file with nothing but a tokenizer."""
        writer = package().GGUFWriter(self.folder / "model.gguf", architecture, use_temp_file=False)
        writer.add_tokenizer_model(kind)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        for key, value in keys.items():
            getattr(writer, f"add_{key}")(value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return self.folder / "model.gguf"

    @parameterized.expand([("llama",), ("qwen3",), ("gptneox",)])
    def test_byte_level(self, architecture):
        own = tokenizers.ByteLevelBPETokenizer()
        own.train_from_iterator(TEXTS * 3, vocab_size=300, min_frequency=1, special_tokens=["<|end|>"])
        model = own.get_vocab()
        tokens = sorted(model, key=model.get)
        own.save_model(str(self.folder))
        merges = (self.folder / "merges.txt").read_text().splitlines()[1:]
        types = [CONTROL if token == "<|end|>" else NORMAL for token in tokens]
        path = self.written(
            architecture, "gpt2", tokens, types, token_merges=merges, eos_token_id=0, chat_template="{{ x }}"
        )
        found = load_tokenizer(path)
        for text in TEXTS:
            assert found(text)["input_ids"] == own.encode(text).ids
            assert found.decode(found(text)["input_ids"]) == text
        assert found("a<|end|>b")["input_ids"] == [*own.encode("a").ids, 0, *own.encode("b").ids]
        assert found.eos_token_id == 0 and found.chat_template == "{{ x }}"

    def test_sentencepiece(self):
        """As transformers reads it by itself."""
        letters = sorted({c for text in TEXTS for c in text.replace(" ", "\u2581")})
        pieces = ["\u2581a", "\u2581c", "at", "\u2581cat", "th", "he", "\u2581the"]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *letters]
        types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(letters))]
        scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
        ids = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
        path = self.written(
            "llama", "llama", tokens, types, token_scores=scores, vocab_size=len(tokens), block_count=1, **ids
        )
        found = load_tokenizer(path)
        want = transformers.AutoTokenizer.from_pretrained(self.folder, gguf_file="model.gguf")
        for text in TEXTS:
            assert found(text)["input_ids"] == want(text)["input_ids"] and found(text)["input_ids"][0] == 1
        assert tokens.index("\u2581cat") in found("a cat")["input_ids"]

    def test_word_piece(self):
        vocab = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            "the",
            "quick",
            "cat",
            "##s",
            "a",
            ",",
            ".",
            "##and",
            "2",
        ]
        stored = [
            token if token.startswith("[") else token[2:] if token.startswith("##") else "\u2581" + token
            for token in vocab
        ]
        ids = {"unk_token_id": 1, "sep_token_id": 3, "pad_token_id": 0, "mask_token_id": 4}
        found = load_tokenizer(self.written("bert", "bert", stored, [3] * 5 + [1] * 9, **ids))
        want = transformers.BertTokenizer(vocab={token: i for i, token in enumerate(vocab)}, do_lower_case=True)
        for text in [*TEXTS, "the cats [MASK] a catand."]:
            assert found(text)["input_ids"] == want(text)["input_ids"]
        assert found.special_tokens_map == want.special_tokens_map
        assert found("Cats")["input_ids"] == [2, 7, 8, 3]

    def test_raises(self):
        path = self.written("llama", "rwkv", ["a"], [1])
        with self.assertRaisesRegex(ValueError, "rwkv"):
            load_tokenizer(path)
        with self.assertRaisesRegex(TypeError, "load_tokenizer: path must be text"):
            load_tokenizer(3)
        with self.assertRaisesRegex(FileNotFoundError, "load_tokenizer: path must be an existing file"):
            load_tokenizer(self.folder / "other.gguf")
        writer = package().GGUFWriter(self.folder / "bare.gguf", "llama", use_temp_file=False)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with self.assertRaisesRegex(ValueError, r"has no tokenizer\.ggml\.tokens"):
            load_tokenizer(self.folder / "bare.gguf")
        path = self.written("bert", "bert", ["a", "b"], [1])
        with self.assertRaisesRegex(ValueError, r"model.gguf: .*token_type must have a number for each of 2 tokens"):
            load_tokenizer(path)
