"""compile_decode: steps as in eager mode, at every position, by one program; kept on disk; and what is refused."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hop
from hop import Quantizer, presets
from tests.integrations.models import NEEDED, QUIET, ROOT
from tests.integrations.test_cache import IDS, INT4_16, WINDOW, model

for package in NEEDED:
    pytest.importorskip(package, reason=f"{package} is not installed")
transformers: Any = pytest.importorskip("transformers")

from hop.compat import packages  # noqa: E402
from hop.integrations import HopCache, decode_pieces, decoding, kept_programs  # noqa: E402
from hop.kernels.cpu import native  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(*QUIET),
    pytest.mark.skipif(native.library().file is None, reason="the native library was not built"),
]
MODELS = ("llama", "gemma")
LENGTH, PROMPT = 24, 9
MASK = torch.ones(2, LENGTH, dtype=torch.int64)
MASK[0, :4] = 0
# Of the largest logit. Fused loops sum norms in another order: a last bit of float32, seldom a code.
ALLOWED = 1e-3
GREEDY: Any = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def quantized(name: str, scheme: str = "int8") -> Any:
    return hop.quantize_(model(name, implementation="hop"), scheme)


@torch.no_grad()
def eager(m: Any, cache: Any, start: int, stop: int) -> Tensor:
    """The last logits of tokens of both sequences, the first padded on the left."""
    positions = (MASK.cumsum(1) - 1).clamp(min=0)[:, start:stop]
    given = {"attention_mask": MASK[:, :stop], "position_ids": positions, "past_key_values": cache}
    return m(IDS[:, start:stop], **given).logits[:, -1]


def agree(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and float((got - want).abs().max()) <= ALLOWED * float(want.abs().max())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, folder: Path) -> tuple[Any, Any]:
    """A model, and its decoder: Llama's as one program, Gemma's as a program per kind of layer."""
    m = quantized(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_pieces, "LEAST", 2 if request.param == "gemma" else 9)
        decoder = hop.compile_decode(m, LENGTH, batch_size=2, folder=folder)
    assert len(decoder._program.layers) == (3 if request.param == "gemma" else 0)
    return m, decoder


@pytest.mark.full
def test_steps_as_in_eager_mode(made: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded on the left, over the end of the window, to the last place of the cache, by the program that is there:
    nothing is compiled, and no module runs."""
    m, decoder = made
    assert decoder.length <= LENGTH and (decoder.batch_size, decoder.max_cache_len) == (2, LENGTH)
    cache, ids = HopCache(m, LENGTH), torch.cat([IDS, IDS[:, : LENGTH - 20]], 1)
    assert torch.equal(decoder.prefill(ids[:, :PROMPT], MASK[:, :PROMPT]), eager(m, cache, 0, PROMPT))
    torch._dynamo.utils.counters.clear()
    got = []
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", None)
        for at in range(PROMPT, 20):
            assert decoder.length == at
            got.append(decoder(ids[:, at] if at % 2 else ids[:, at : at + 1]))
    assert not torch._dynamo.utils.counters["stats"] and not torch._dynamo.utils.counters["inductor"]
    for at, logits in enumerate(got, PROMPT):
        agree(logits, eager(m, cache, at, at + 1))
    for mine, theirs in zip(decoder.cache.layers, cache.layers, strict=True):
        held = min(20, mine.length, theirs.length)
        assert torch.equal(mine.cache.length, theirs.cache.length)
        off = mine.cache.key_codes[:, :, :held] != theirs.cache.key_codes[:, :, :held]
        assert float(off.double().mean()) < 0.01
    for at in range(20, LENGTH):
        decoder(ids[:, at])
    with pytest.raises(ValueError, match=f"the cache is full with {LENGTH} tokens"):
        decoder(ids[:, 0])


@pytest.mark.full
def test_from_nothing(made: tuple[Any, Any]) -> None:
    """The first token of all; and again, after a reset."""
    m, decoder = made
    cache, mask = HopCache(m, LENGTH), torch.ones(2, LENGTH, dtype=torch.int64)
    with torch.inference_mode():
        given = [{"input_ids": IDS[:, i : i + 1], "attention_mask": mask[:, : i + 1]} for i in (0, 1)]
        want = [m(**inputs, past_key_values=cache).logits[:, -1] for inputs in given]
    for _ in range(2):
        decoder.reset()
        assert decoder.length == 0
        for i in (0, 1):
            agree(decoder(IDS[:, i]), want[i])


@pytest.mark.full
@pytest.mark.parametrize("beams", [1, 2])
def test_generate(made: tuple[Any, Any], beams: int) -> None:
    """Greedily, of a batch with padding, and by beams, which reorder the cache; by the program, whatever the model
    says in steps of one token."""
    m, decoder = made
    ids, mask = (t[: 2 // beams, :PROMPT] for t in (IDS, MASK))
    want = m.generate(ids, attention_mask=mask, past_key_values=HopCache(m, LENGTH), num_beams=beams, **GREEDY)
    seen: list[int] = []
    hook = m.register_forward_hook(lambda module, args, kwargs, out: seen.append(out.logits.shape[0]), with_kwargs=True)
    got = decoder.generate(ids, mask, num_beams=beams, **GREEDY)
    hook.remove()
    assert torch.equal(got, want) and decoder.length == PROMPT + 9 and len(seen) == 10
    assert "forward" not in m.__dict__


@pytest.mark.full
def test_weights_are_those_of_the_model(made: tuple[Any, Any]) -> None:
    """Nothing is copied: what changes in place, changes what is said."""
    m, decoder = made
    before = decoder.prefill(IDS[:, :PROMPT]).clone(), decoder(IDS[:, PROMPT]).clone()
    tensors = {t.data_ptr() for t in decoder._program.tensors}
    inner = m.model.layers[0].self_attn.q_proj.weight
    assert {t.data_ptr() for t in (inner.codes, decoder.cache.layers[0].cache.key_codes)} <= tensors
    with torch.no_grad():
        m.model.norm.weight.add_(1)
    try:
        decoder.prefill(IDS[:, :PROMPT])
        assert not torch.allclose(decoder(IDS[:, PROMPT]), before[1])
    finally:
        with torch.no_grad():
            m.model.norm.weight.sub_(1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("scheme", "rule", "attention"),
    [("int4", presets.INT8_ROW, "hop"), (None, INT4_16, "hop"), ("int8", presets.INT8_ROW, "hop_rotated")],
    ids=["int4", "floats", "rotated"],
)
def test_other_schemes_and_caches(scheme: str | None, rule: Quantizer, attention: str, folder: Path) -> None:
    """Weights in groups of int4; a model in floats, with keys and values in groups of int4; rotated keys."""
    m = model("gemma", implementation=attention)
    m = m if scheme is None else hop.quantize_(m, scheme)
    cache = HopCache(m, LENGTH, rule)
    decoder = hop.compile_decode(m, LENGTH, batch_size=2, quantizer=rule, folder=folder)
    eager(m, cache, 0, PROMPT)
    decoder.prefill(IDS[:, :PROMPT], MASK[:, :PROMPT])
    for at in range(PROMPT, PROMPT + WINDOW):
        agree(decoder(IDS[:, at]), eager(m, cache, at, at + 1))


@pytest.mark.full
def test_layers_that_compute_with_their_numbers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share no program."""
    m = quantized("llama")

    class Numbered(type(m.model.layers[0])):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * (1 + self.self_attn.layer_idx)

    for layer in m.model.layers:
        layer.__class__ = Numbered
    monkeypatch.setattr(decode_pieces, "LEAST", 2)
    decoder, cache = hop.compile_decode(m, LENGTH, batch_size=2, folder=folder), HopCache(m, LENGTH)
    assert not decoder._program.layers
    eager(m, cache, 0, PROMPT)
    decoder.prefill(IDS[:, :PROMPT], MASK[:, :PROMPT])
    agree(decoder(IDS[:, PROMPT]), eager(m, cache, PROMPT, PROMPT + 1))
    assert [layer.self_attn.layer_idx for layer in m.model.layers] == [0, 1, 2]


PROGRAM = """
import sys, torch, hop
from hop.integrations import step_program
from tests.integrations.test_decoding import quantized, IDS, LENGTH

step_program._exported = None  # which would trace and compile
decoder = hop.compile_decode(quantized("llama"), LENGTH, batch_size=2, folder=sys.argv[1])
decoder.prefill(IDS[:, :9])
torch.save(decoder(IDS[:, 9]), sys.argv[2])
"""


@pytest.mark.full
def test_another_process_finds_it(folder: Path, tmp_path: Path) -> None:
    """And says the same bits, without tracing."""
    m = quantized("llama")
    decoder = hop.compile_decode(m, LENGTH, batch_size=2, folder=folder)
    decoder.prefill(IDS[:, :9])
    want = decoder(IDS[:, 9])
    before = sorted(folder.iterdir())
    told = {**os.environ, "PYTHONPATH": str(ROOT), "HOP_NATIVE": native.library().path}
    subprocess.run([sys.executable, "-c", PROGRAM, folder, tmp_path / "y.pt"], check=True, cwd=ROOT, env=told)
    assert torch.equal(torch.load(tmp_path / "y.pt", weights_only=True), want) and sorted(folder.iterdir()) == before


# ---- names of programs


def name(m: Any, rest: Any = (1, LENGTH)) -> str | None:
    return kept_programs.digest(m, rest)


def test_names_say_what_programs_depend_on() -> None:
    m = quantized("llama")
    own = name(m)
    assert own == name(quantized("llama")) and own != name(m, (2, LENGTH)) and own != name(quantized("llama", "int4"))
    with torch.no_grad():
        m.model.norm.weight.add_(1)
    assert name(m) == own
    m.config.rms_norm_eps = 0.5
    assert name(m) != own
    m = quantized("llama")
    m.model.layers[0].self_attn.scaling = 0.125
    assert name(m) != own
    other = quantized("llama")
    other.model.norm.register_forward_hook(lambda *_: None)
    assert name(other) is None
    m.model.norm.forward = m.model.norm.forward
    assert name(m) is None


OF_A_NOTEBOOK = """
from dataclasses import dataclass
from hop.numerics.schemes import Scheme

@dataclass(frozen=True)
class Own(Scheme):
    pass
"""


def test_names_say_which_classes_of_others_a_program_uses() -> None:
    """Classes that a process defines and does not use change no name; those without a file are new each time."""
    own, found = name(quantized("llama")), []
    for _ in range(2):
        notebook: dict[str, Any] = {"__name__": "notebook"}
        exec(OF_A_NOTEBOOK, notebook)
        m = quantized("llama")
        assert name(m) == own
        m.model.norm.setting = notebook["Own"](presets.INT8_ROW, presets.INT8_ROW)
        found.append(name(m))
        assert name(m) == found[-1] and not kept_programs.is_lasting(m)
    for _ in range(2):
        m = quantized("llama")
        m.model.norm.__class__ = type("Norm", (type(m.model.norm),), {"__module__": "notebook"})
        found.append(name(m))
        assert not kept_programs.is_lasting(m)
    assert len({own, *found}) == 5 and kept_programs.is_lasting(quantized("llama"))


def test_a_folder_that_others_write(tmp_path: Path) -> None:
    assert kept_programs.folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    (tmp_path / "a" / "b").chmod(0o777)
    with pytest.raises(PermissionError, match="no one else may write to it"):
        kept_programs.folder(tmp_path / "a" / "b")


def test_where_programs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert kept_programs.folder(None) == packages.cache_folder() / "hop_decode"


# ---- what is refused


class Fake:
    """Instead of a package: what a program is given."""

    def __call__(self, tokens: Tensor, *args: Any) -> Tensor:
        return torch.zeros(len(tokens), 128)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A decoder without a program."""
    monkeypatch.setattr(decoding, "step_program", lambda *_: Fake())
    return hop.compile_decode(quantized("gemma"), 8, batch_size=2)


def test_models_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    m = quantized("llama")
    with pytest.raises(TypeError, match="model must be one of transformers, got Linear"):
        hop.compile_decode(nn.Linear(2, 2), 8)
    for given, error in ((1, ValueError), (8.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match="max_cache_len must be"):
            hop.compile_decode(m, given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        hop.compile_decode(m, 8, batch_size=0)
    with pytest.raises(ValueError, match="each token by itself"):
        hop.compile_decode(m, 8, quantizer=presets.INT8_TENSOR)
    with pytest.raises(ValueError, match=r"is in training mode; call model\.eval"):
        hop.compile_decode(m.train(), 8)
    m.eval().set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention is 'sdpa', which would compute with floats"):
        hop.compile_decode(m, 8)
    m.set_attn_implementation("hop")
    monkeypatch.setattr(native.library(), "file", None)
    monkeypatch.setattr(native.library(), "missing", "nobody built it")
    with pytest.raises(RuntimeError, match="nobody built it"):
        hop.compile_decode(m, 8)


def test_a_model_that_asks_for_the_length() -> None:
    """It computes positions itself: no program for all of them."""
    m = quantized("llama")
    inner = m.model.forward
    m.model.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, "position_ids": None})
    with pytest.raises(ValueError, match=r"cannot be traced as one program for all positions: .*asks for the length"):
        hop.compile_decode(m, 8)


def test_calls_that_are_refused(plain: Any) -> None:
    with pytest.raises(TypeError, match="tokens must be an int64 tensor"):
        plain([1, 2])
    with pytest.raises(TypeError, match="input_ids must be an int64 tensor"):
        plain.prefill(IDS.float())
    for given in (IDS[0, :3], IDS[:1, :1], IDS[:, :2]):
        with pytest.raises(ValueError, match="tokens must be one for each of 2 sequences"):
            plain(given)
    for given in (IDS[:1], IDS[:, :0], IDS[0]):
        with pytest.raises(ValueError, match="the program is for 2 sequences"):
            plain.prefill(given)
    with pytest.raises(ValueError, match="9 tokens do not fit into a cache of 8"):
        plain.prefill(IDS[:, :9])
    with pytest.raises(ValueError, match=r"attention_mask must have the shape of input_ids, \(2, 8\), got \(2, 7\)"):
        plain.prefill(IDS[:, :8], MASK[:, :7])
    with pytest.raises(ValueError, match=r"\['past_key_values'\] are set by the decoder"):
        plain.generate(IDS[:, :8], past_key_values=None)
    with torch.inference_mode():
        plain.prefill(IDS[:, :7])
    assert tuple(plain(IDS[:, 7]).shape) == (2, 128) and plain.length == 8
    with pytest.raises(ValueError, match="the cache is full with 8 tokens"):
        plain(IDS[:, 8])
    plain.reset()
    plain.cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="the cache now has 4 sequences"):
        plain(IDS[:, 0])
