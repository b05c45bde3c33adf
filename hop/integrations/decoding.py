"""compile_decode: compile the decode step of a language model to machine code; Decoder runs it.

The parts of the step are exported once, for all positions, and compiled by AOTInductor with the operators of the native
library: norms, rotary embeddings and activations become fused loops, and a step runs no module. Weights and cache are
shared with the model, not copied.
"""

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from hop.integrations.cache import HopCache
from hop.integrations.decode_program import FULL, WINDOW, Step
from hop.integrations.step_program import StepProgram, step_program
from hop.kernels.cpu import native
from hop.numerics import presets
from hop.numerics.quantizer import Quantizer
from hop.numerics.spelling import shown


class Decoder:
    """A model that decodes single tokens with a compiled program; returned by compile_decode.

    Prompts run in eager mode, with the same cache. In-place changes to the model's parameters take effect; replacing a
    parameter does not.

    Attributes:
        model: the model.
        cache: its keys and values, a HopCache.
        batch_size: the number of sequences.
        max_cache_len: the most tokens per sequence, including the prompt.
    """

    def __init__(self, step: Step, program: StepProgram, cache: HopCache, batch_size: int, max_cache_len: int) -> None:
        self.model, self.cache, self.batch_size, self.max_cache_len = step.model, cache, batch_size, max_cache_len
        self._step, self._program, self._kinds = step, program, tuple(step.sizes)
        self._lengths: list[Tensor] = [kv.length for kv in step.caches]  # type: ignore[misc]
        self._window = min(step.sizes.get(WINDOW, max_cache_len), max_cache_len)
        self._seen = torch.zeros(batch_size, max_cache_len, dtype=torch.bool)  # by position; False for padding
        self._positions = torch.zeros(batch_size, 1, dtype=torch.int64)  # of the next token of each sequence

    @property
    def length(self) -> int:
        """The number of tokens so far, including padding."""
        return int(self._lengths[0])

    def reset(self) -> None:
        """Forget all tokens."""
        self.cache.reset()
        self._seen.zero_()
        self._positions.zero_()

    @torch.no_grad()
    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Forget all tokens and run a prompt, in eager mode.

        Args:
            input_ids: int64 (batch_size, T).
            attention_mask: (batch_size, T), 0 or False for padding; None if there is none.

        Returns:
            The logits of the last position, (batch_size, vocabulary).

        Raises:
            TypeError: a tensor has the wrong dtype.
            ValueError: a shape does not fit, or T exceeds max_cache_len.
        """
        mask = self._begin(input_ids, attention_mask)
        # The logits of other positions are not used, and with a large vocabulary they dominate time and memory.
        last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(self.model.forward).parameters else {}
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=mask.to(torch.int64),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            past_key_values=self.cache,
            use_cache=True,
            **last,
        )
        return outputs.logits[:, -1]

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Process one more token per sequence with the compiled program.

        Args:
            tokens: int64 (batch_size,) or (batch_size, 1).

        Returns:
            The logits of the next tokens, (batch_size, vocabulary).

        Raises:
            TypeError: tokens is not an int64 tensor.
            ValueError: the shape does not fit, the cache is full, or the cache has another batch size.
        """
        _check_ids("tokens", tokens)
        if tokens.numel() != self.batch_size or tokens.dim() > 2 or tokens.shape[0] != self.batch_size:
            raise ValueError(
                f"Decoder: tokens must be one for each of {self.batch_size} sequences, of shape "
                f"({self.batch_size},) or ({self.batch_size}, 1), got {tuple(tokens.shape)}; a prompt goes to prefill"
            )
        at = self.length
        if at >= self.max_cache_len:
            raise ValueError(
                f"Decoder: the cache is full with {self.max_cache_len} tokens; compile with a larger max_cache_len"
            )
        if (batch_size := self.cache.layers[0].cache.shape[0]) != self.batch_size:  # type: ignore[attr-defined]
            raise ValueError(
                f"Decoder: the cache now has {batch_size} sequences, and the program is for "
                f"{self.batch_size}; compile for the batch size that beam search needs"
            )
        self._seen[:, at] = True
        slots = {FULL: at, WINDOW: at % self._window}
        logits = self._program(
            tokens.reshape(-1, 1).contiguous(),
            self._positions,
            [torch.tensor([slots[kind]]) for kind in self._kinds],
            [self._mask(kind, at) for kind in self._kinds],
        )
        self._positions += 1
        for length in self._lengths:
            length += 1
        return logits

    def _mask(self, kind: str, at: int) -> Tensor:
        """The visible slots of the token at position `at`: (batch_size, 1, 1, count)."""
        if kind == FULL or at < self._window:
            mask = self._seen[:, : max(at + 1, 2)]  # a dimension of size 1 would need another program
        else:
            first = at + 1 - self._window
            mask = self._seen[:, first : at + 1].roll(first % self._window, 1)
        return mask.contiguous()[:, None, None]

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> Any:
        """Run model.generate with compiled steps: sampling, beams, streamers and so on.

        Args:
            input_ids, attention_mask: as for prefill; `batch_size` must be that of input_ids times `num_beams`. Without
                a mask nothing is padding, whatever pad_token_id is.
            options: other arguments of model.generate.

        Raises:
            ValueError: as for prefill, or the options include a cache.
        """
        if given := {"past_key_values", "use_cache", "inputs_embeds"} & set(options):
            raise ValueError(f"Decoder.generate: {sorted(given)} are set by the decoder; leave them out")
        copies = max(int(options.get("num_beams") or 1), int(options.get("num_return_sequences") or 1))
        mask = self._begin(input_ids, attention_mask, copies)
        ids = {"input_ids": input_ids, "attention_mask": mask[::copies].to(torch.int64)}
        with self._forward():
            return self.model.generate(**ids, past_key_values=self.cache, **options)

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Make the model run single tokens with the program."""
        original = self.model.forward

        @functools.wraps(original)
        def forward(*args: object, **kwargs: object) -> Any:
            ids = kwargs.get("input_ids")
            ours = not args and kwargs.get("past_key_values") is self.cache
            if ours and isinstance(ids, Tensor) and ids.shape[1] == 1 and self.length:
                return CausalLMOutputWithPast(logits=self(ids)[:, None], past_key_values=self.cache)
            return original(*args, **kwargs)

        self.model.forward = forward
        try:
            yield
        finally:
            del self.model.forward

    def _begin(self, input_ids: Tensor, attention_mask: Tensor | None, copies: int = 1) -> Tensor:
        """Forget all tokens and register a prompt, each sequence `copies` times. Returns the mask, (batch, T)."""
        _check_ids("input_ids", input_ids)
        if input_ids.dim() != 2 or input_ids.shape[0] * copies != self.batch_size or not input_ids.shape[1]:
            each = f" times {copies} for each" if copies > 1 else ""
            raise ValueError(
                f"Decoder: the program is for {self.batch_size} sequences, but input_ids have shape "
                f"{tuple(input_ids.shape)}{each}, or are empty; compile with another batch_size"
            )
        count = input_ids.shape[1]
        if count > self.max_cache_len:
            raise ValueError(
                f"Decoder: {count} tokens do not fit into a cache of {self.max_cache_len}; compile with a larger "
                "max_cache_len"
            )
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"Decoder: attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got "
                f"{tuple(mask.shape)}"
            )
        mask = mask.repeat_interleave(copies, 0)
        self.reset()
        self._seen[:, :count] = mask
        self._positions.copy_(mask.sum(1, keepdim=True))  # in place: only this call may be in inference mode
        return mask


def compile_decode(
    model: Any,
    max_cache_len: int,
    *,
    batch_size: int = 1,
    quantizer: Quantizer = presets.INT8_ROW,
    value_quantizer: Quantizer | None = None,
    folder: str | Path | None = None,
) -> Decoder:
    """Compile the decode step of a transformers model, for all positions.

    Products, attention and their quantization are the native kernels of eager mode and give identical bits. Norms,
    rotary embeddings and activations become fused loops that sum in another order: their last bits differ, and
    occasionally a code at a rounding tie; for models of hop.quantize_(model, ..., exact=True) they agree too. A step
    reads only the keys and values of tokens so far, whatever max_cache_len is.

    In models of 24 layers and more that simply follow one another, layers that differ only in their weights share a
    program, so that compiling takes no longer for more of them. Programs are stored without the model's weights and
    reused by later processes. The file name is a digest of the model's classes and their source files, settings, tensor
    forms, versions and CPU. A model with hooks, or with instances that override forward, is always compiled.

    Args:
        model: in eval mode, on the CPU, with attention "hop" as HopCache requires; weights quantized or in floats.
        max_cache_len: the most tokens per sequence, including the prompt; at least 2.
        batch_size: the number of sequences per step; with beams, the number of prompts times beams.
        quantizer, value_quantizer: of keys and values, as for HopCache.
        folder: where to store programs. Default: `hop_decode` in Inductor's cache folder, TORCHINDUCTOR_CACHE_DIR.

    Raises:
        TypeError: model is not a transformers model, or a number is not an int.
        ValueError: the model is in training mode, is not on the CPU, is rejected by HopCache, or cannot be traced as
            one program for all positions.
        PermissionError: others may write to the folder.
        RuntimeError: the native library is missing, or Inductor finds no C++ compiler.
    """
    _check_count("max_cache_len", max_cache_len, 2)
    _check_count("batch_size", batch_size, 1)
    cache = HopCache(
        model, max_cache_len + 1, quantizer, value_quantizer
    )  # + 1 so that a view of the visible slots is never the whole buffer
    if model.training:
        raise ValueError(f"compile_decode: {type(model).__name__} is in training mode; call model.eval()")
    if others := sorted({str(t.device) for t in model.parameters() if t.device.type != "cpu"}):
        raise ValueError(f"compile_decode: the model must be on the CPU, and has parameters on {', '.join(others)}")
    if native.library().file is None:
        raise RuntimeError(f"compile_decode: {native.library().missing}")
    with torch.inference_mode(mode=False), torch.no_grad():
        model(input_ids=torch.zeros(batch_size, 1, dtype=torch.int64), past_key_values=cache, use_cache=True)
        cache.reset()
        step = Step(model, cache).eval()
        program = step_program(step, batch_size, max_cache_len, folder)
    return Decoder(step, program, cache, batch_size, max_cache_len)


def _check_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"compile_decode: {name} must be an int, got {shown(value)}")
    if value < least:
        raise ValueError(f"compile_decode: {name} must be at least {least}, got {value}")


def _check_ids(name: str, ids: object) -> None:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise TypeError(f"Decoder: {name} must be an int64 tensor, got {shown(ids)}")
