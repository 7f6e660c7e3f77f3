"""A class of the sweep against eager: what is compared, and the verdict."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import attngen.integrations.transformers.implementation as attngen_transformers
from attngen.errors import CallError, NoKernelError
from tests.integrations.transformers import tiny_configs
from tests.integrations.transformers.sweep_inputs import (
    UntestedError,
    accepted,
    configs,
    first_line,
    generated,
    outputs,
    padded_inputs,
    stepwise,
)

MAPPINGS = {
    "causal LM": "CAUSAL_LM",
    "masked LM": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "image classification": "IMAGE_CLASSIFICATION",
    "image and text": "IMAGE_TEXT_TO_TEXT",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "CTC": "CTC",
    "audio classification": "AUDIO_CLASSIFICATION",
}

#: Of the largest magnitude. A wrong mask is off by a percent or more.
TOLERANCE = 1e-4


def classes() -> dict[str, tuple[str, str]]:
    """The classes of the mappings, each with the first mapping that has it and its type of model."""
    by_name: dict[str, tuple[str, str]] = {}
    for mapping, name in MAPPINGS.items():
        for kind, value in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            for each in [value] if isinstance(value, str) else value:
                by_name.setdefault(each, (mapping, kind))
    return by_name


@dataclass
class Result:
    """The verdict on a class.

    ``right``: nothing that was compared differs from eager. ``refused``: a clear error at the first prompt. ``own``:
    the same as eager, but no layer calls attngen. ``untested``: nothing could be compared. ``wrong``: another result.
    ``ran`` has what was compared, ``skipped`` what was not and why, and ``worst`` the largest relative difference.
    """

    name: str
    mapping: str
    verdict: str = "untested"
    reason: str = ""
    ran: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    variants: list[str] = field(default_factory=list)
    worst: float = 0.0
    seconds: float = 0.0


class DifferentError(Exception):
    """An output that is not eager's."""


# --- one class ------------------------------------------------------------------------------------------------


def check(name: str, device: str = "cpu") -> Result:
    """Compare a class with eager, in this process."""
    mapping, kind = classes()[name]
    result = Result(name, mapping)
    start = time.monotonic()
    try:
        Comparison(name, kind, result, device).run()
    except DifferentError as error:
        result.verdict, result.reason = "wrong", str(error)
    except UntestedError as error:
        result.verdict, result.reason = "untested", str(error)
    except (CallError, NoKernelError) as error:
        result.verdict, result.reason = "refused", str(error).splitlines()[0]
    result.seconds = time.monotonic() - start
    return result


class Comparison:
    """Two models of a class with the same weights, one on eager and one on attngen, and what is compared of them."""

    def __init__(self, name: str, kind: str, result: Result, device: str) -> None:
        self.result, self.device, self.calls = result, device, 0
        self.modules: dict[torch.nn.Module, None] = {}
        self.variants: set[str] = set()
        try:
            self.cls = getattr(transformers, name)
            config_class = self.cls.config_class or transformers.CONFIG_MAPPING[kind]
            config = tiny_configs.tiny(config_class)
            if result.mapping == "causal LM" and hasattr(config, "is_decoder"):
                config.is_decoder = True
            self.eager = self._make(config, "eager")
        except Exception as error:
            raise UntestedError(f"not made tiny: {first_line(error)}") from error
        try:
            self.model = self._make(config, "attngen")
        except KeyError as error:
            if error.args == ("attngen",):
                raise CallError("looks its attention up among transformers' own: KeyError: 'attngen'") from None
            raise
        self.model.load_state_dict(self.eager.state_dict())

    def _make(self, config: Any, implementation: str) -> Any:
        """A model with an implementation of attention; both have the same weights."""
        config = copy.deepcopy(config)
        torch.manual_seed(0)
        model = self.cls._from_config(config, attn_implementation=implementation).eval()
        model.set_attn_implementation(implementation)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        torch.manual_seed(1)
        spread(model)
        return model.to(self.device)

    def run(self) -> None:
        given = accepted(self.eager)
        self.text = "input_ids" in given or "decoder_input_ids" in given
        with self._counted():
            self._prompts(given)
            if not self.calls:
                self.result.verdict = "own"
                return
            self._image_tokens(given)
            self._parts()
            self._gradients(given)
            self._decoding(given)
            self._generation(given)
        self.result.verdict = "right"

    # what is compared

    def _prompts(self, given: Mapping[str, Any]) -> None:
        self._same("prompt", outputs, given)
        if self.calls:
            self._tells(given)
        for side in ("left", "right"):
            padded = padded_inputs(given, side)
            if padded is not None:
                real = padded.pop("_real")
                self._same(f"{side} padding", outputs, padded, real)

    def _tells(self, given: Mapping[str, Any]) -> None:
        """Check that a wrong attention would be noticed: each column of its output in the place of the next."""
        attend = attngen_transformers.attend

        def rolled(candidates: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return torch.roll(attend(candidates, q, k, v, **options), 1, -1)

        attngen_transformers.attend = rolled
        try:
            with torch.no_grad():
                wanted, actual = outputs(self.eager, given), outputs(self.model, given)
        finally:
            attngen_transformers.attend = attend
        if max(map(distance, actual, wanted)) < 100 * TOLERANCE:
            raise UntestedError("attention changes too little of its output")

    def _image_tokens(self, given: Mapping[str, Any]) -> None:
        """Run a prompt in which some tokens are those of an image, which masks may treat differently."""
        takes = inspect.signature(self.eager.forward).parameters
        names = [name for name in ("token_type_ids", "mm_token_type_ids") if name in takes]
        if names and "input_ids" in given and len(configs(self.eager)) > 1:
            kinds = torch.zeros_like(given["input_ids"])
            kinds[0, 3:8] = kinds[1, 6:10] = 1
            marked = {**given, **dict.fromkeys(names, kinds)}
            self._same("image tokens", outputs, marked)

    def _parts(self) -> None:
        """Run the models inside a model whose layers made no call so far, such as vision towers."""
        names = {module: name for name, module in self.model.named_modules()}
        asking = {names.get(module, "") for module in self.modules}
        twins = dict(self.eager.named_modules())
        done: list[str] = []
        for name, part in self.model.named_modules():
            if not isinstance(part, transformers.PreTrainedModel) or part is self.model:
                continue
            inside = [each for each in asking if each.startswith(f"{name}.")]
            if inside or any(name.startswith(f"{each}.") for each in done):
                continue
            before, self.calls = self.calls, 0
            try:
                given = accepted(twins[name])
            except UntestedError as error:
                self.result.skipped[f"part {name}"] = str(error)
                self.calls += before
                continue
            self._same(f"part {name}", outputs, given, pair=(twins[name], part))
            done += [name] if self.calls else []
            self.calls += before

    def _gradients(self, given: Mapping[str, Any]) -> None:
        padded = padded_inputs(given, "left") or dict(given)
        real = padded.pop("_real", None)

        def gradients(model: Any) -> list[Tensor]:
            model.zero_grad(set_to_none=True)
            actual = outputs(model, padded, real, grad=True)[0]
            weights = torch.linspace(-1, 1, actual.numel(), device=actual.device).view_as(actual)
            (actual.float() * weights).sum().backward()
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

        self._same("gradients", gradients, grad=True)

    def _decoding(self, given: Mapping[str, Any]) -> None:
        masked = given.get("decoder_attention_mask", given.get("attention_mask"))
        ids = given.get("decoder_input_ids", given.get("input_ids"))
        if not self.eager.can_generate() or not self.text or (masked is not None and masked.shape[1] != ids.shape[1]):
            return
        for side in ("none", "left"):
            padded = dict(given) if side == "none" else padded_inputs(given, side)
            if padded is not None:
                real = padded.pop("_real", None)
                what = "cache" if side == "none" else f"cache, {side} padding"
                self._same(what, stepwise, padded, real)

    def _generation(self, given: Mapping[str, Any]) -> None:
        if not self.eager.can_generate() or not self.text:
            return
        for implementation in (None, "static"):
            padded = padded_inputs(given, "left") or dict(given)
            padded.pop("_real", None)
            more = {} if implementation is None else {"cache_implementation": implementation}
            what = "generate" if implementation is None else "static cache"
            self._same(what, generated, padded, **more)

    # how

    def _same(
        self,
        what: str,
        run: Callable[..., Sequence[Tensor]],
        *arguments: Any,
        grad: bool = False,
        pair: tuple[Any, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compare what ``run`` returns for a model with eager's, and note the result."""
        eager, model = pair or (self.eager, self.model)
        try:
            torch.manual_seed(5)
            with torch.set_grad_enabled(grad):
                wanted = run(eager, *arguments, **options)
        except Exception as error:
            if what == "prompt":
                raise UntestedError(f"eager fails: {first_line(error)}") from error
            self.result.skipped[what] = f"eager fails: {first_line(error)}"
            return
        if not all(bool(torch.isfinite(each).all()) for each in wanted):
            if what == "prompt":
                raise UntestedError("eager's output is not finite")
            self.result.skipped[what] = "eager's output is not finite"
            return
        try:
            torch.manual_seed(5)
            with torch.set_grad_enabled(grad):
                actual = run(model, *arguments, **options)
        except (CallError, NoKernelError) as error:
            if what == "prompt":
                raise
            self.result.skipped[what] = f"refused: {first_line(error)}"
            return
        except Exception as error:
            raise DifferentError(f"{what}: {first_line(error)}") from error
        if len(actual) != len(wanted) or any(a.shape != b.shape for a, b in zip(actual, wanted, strict=False)):
            raise DifferentError(f"{what}: other shapes than eager")
        largest = max(float(each.abs().max()) for each in wanted) if grad else 0.0
        worst = max(distance(a, b, largest) for a, b in zip(actual, wanted, strict=True))
        self.result.worst = max(self.result.worst, worst)
        if not worst <= (10 * TOLERANCE if grad else TOLERANCE):
            raise DifferentError(f"{what}: {worst:.2g} off eager")
        self.result.ran.append(what)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        asked = attngen_transformers.asked

        def noting(module: Any, *arguments: Any, **options: Any) -> Any:
            self.calls += 1
            self.modules[module] = None
            call = asked(module, *arguments, **options)
            self.variants.add(call.candidates[0].variant)
            return call

        attngen_transformers.asked = noting
        try:
            yield
        finally:
            attngen_transformers.asked = asked
            self.result.variants = sorted(self.variants)


def spread(model: Any) -> None:
    """Give a model weights with which attention is far from uniform, and every parameter has an effect."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() >= 2:
            fan_in = parameter.shape[1:].numel() if parameter.dim() > 3 else parameter.shape[-1]
            torch.nn.init.normal_(parameter, std=1.2 / max(fan_in, 1) ** 0.5)
        elif "sink" in name:
            torch.nn.init.normal_(parameter)
        elif bool((parameter == 0).all()):
            torch.nn.init.normal_(parameter, std=0.1)


def distance(actual: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    if wanted.numel() == 0:
        return 0.0
    if wanted.dtype == torch.long:
        return float((actual != wanted).any())
    limit = max(float(wanted.abs().max()), 1e-2 * scale, 1e-12)
    worst = float((actual.float() - wanted.float()).abs().max()) / limit
    return worst if worst == worst else float("inf")
