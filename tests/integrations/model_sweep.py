"""Every model of transformers' mappings against ``eager``: right, refused, or not tested and why.

    python -m tests.integrations.model_sweep --jobs 2 --write

makes each class from a tiny configuration (``tiny_configs``), runs it twice with the same random weights, once with
``attn_implementation="eager"`` and once with ``"attngen"``, and writes ``docs/models.md``.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import attngen.integrations.transformers as attngen_transformers
from attngen.errors import CallError, NoKernelError
from attngen.integrations.model_inputs import inputs_of
from attngen.integrations.transformers_versions import cache_name, cache_of
from tests.integrations import tiny_configs

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
LENGTHS = (14, 11, 8)
STEPS = 4


def classes() -> dict[str, tuple[str, str]]:
    """The classes of the mappings, each with the first mapping that has it and its type of model."""
    found: dict[str, tuple[str, str]] = {}
    for mapping, name in MAPPINGS.items():
        for kind, value in getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES").items():
            for each in [value] if isinstance(value, str) else value:
                found.setdefault(each, (mapping, kind))
    return found


@dataclass
class Result:
    """What the sweep says of a class. ``ran``: what was compared; ``skipped``: what was not, and why."""

    name: str
    mapping: str
    verdict: str = "untested"
    reason: str = ""
    ran: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    worst: float = 0.0
    seconds: float = 0.0


class Different(Exception):
    """An output that is not eager's."""


class CannotTell(Exception):
    """A model that cannot be compared: the message says why."""


# --- one class ------------------------------------------------------------------------------------------------


def check(name: str, device: str = "cpu") -> Result:
    mapping, kind = classes()[name]
    result = Result(name, mapping)
    start = time.monotonic()
    try:
        Comparison(name, kind, result, device).run()
    except Different as error:
        result.verdict, result.reason = "wrong", str(error)
    except CannotTell as error:
        result.verdict, result.reason = "untested", str(error)
    except (CallError, NoKernelError) as error:
        result.verdict, result.reason = "refused", str(error).splitlines()[0]
    result.seconds = time.monotonic() - start
    return result


class Comparison:
    def __init__(self, name: str, kind: str, result: Result, device: str) -> None:
        self.result, self.device, self.calls = result, device, 0
        try:
            self.cls = getattr(transformers, name)
            config_class = self.cls.config_class or transformers.CONFIG_MAPPING[kind]
            config = tiny_configs.tiny(config_class)
            self.eager = self._make(config, "eager")
        except Exception as error:
            raise CannotTell(f"not made tiny: {_line(error)}") from error
        try:
            self.model = self._make(config, "attngen")
        except KeyError as error:
            if error.args == ("attngen",):
                raise CannotTell("takes no attn_implementation of others") from None
            raise
        self.model.load_state_dict(self.eager.state_dict())

    def _make(self, config: Any, implementation: str) -> Any:
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
        given = inputs_of(self.eager)
        if isinstance(given, str):
            raise CannotTell(given)
        given = filled(given, self.eager)
        self.text = "input_ids" in given or "decoder_input_ids" in given
        with self._counted():
            self._prompts(given)
            if not self.calls:
                self.result.verdict = "own"
                return
            self._parts()
            self._gradients(given)
            self._decoding(given)
            self._generation(given)
        self.result.verdict = "right"

    # what is compared

    def _prompts(self, given: Mapping[str, Any]) -> None:
        self._same("prompt", lambda model: outputs(model, given))
        if self.calls:
            self._tells(given)
        for side in ("left", "right"):
            padded = padded_inputs(given, side)
            if padded is not None:
                real = padded.pop("_real")
                self._same(f"{side} padding", lambda model: outputs(model, padded, real))

    def _tells(self, given: Mapping[str, Any]) -> None:
        """Check that uniform attention would be noticed."""
        attend = attngen_transformers.attend

        def uniform(candidates: Any, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            return torch.roll(attend(candidates, q, k, v, **options), 1, -1)

        attngen_transformers.attend = uniform
        try:
            with torch.no_grad():
                wanted, found = outputs(self.eager, given), outputs(self.model, given)
        finally:
            attngen_transformers.attend = attend
        if max(map(distance, found, wanted)) < 100 * TOLERANCE:
            raise CannotTell("attention changes too little of its output")

    def _parts(self) -> None:
        """Run the models inside a model that made no call so far, such as vision towers."""

    def _gradients(self, given: Mapping[str, Any]) -> None:
        padded = padded_inputs(given, "left") or dict(given)
        real = padded.pop("_real", None)

        def gradients(model: Any) -> list[Tensor]:
            model.zero_grad(set_to_none=True)
            found = outputs(model, padded, real, grad=True)[0]
            weights = torch.linspace(-1, 1, found.numel(), device=found.device).view_as(found)
            (found.float() * weights).sum().backward()
            return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

        self._same("gradients", gradients, grad=True)

    def _decoding(self, given: Mapping[str, Any]) -> None:
        if not self.eager.can_generate() or not self.text:
            return
        for side in ("none", "left"):
            padded = dict(given) if side == "none" else padded_inputs(given, side)
            if padded is not None:
                real = padded.pop("_real", None)
                self._same(f"cache, {side}", lambda model: stepwise(model, padded, real))

    def _generation(self, given: Mapping[str, Any]) -> None:
        if not self.eager.can_generate() or not self.text:
            return
        for implementation in (None, "static"):
            padded = padded_inputs(given, "left") or dict(given)
            padded.pop("_real", None)
            more = {} if implementation is None else {"cache_implementation": implementation}
            self._same(f"generate, {implementation or 'default'}", lambda model: generated(model, padded, **more))

    # how

    def _same(self, what: str, run: Callable[[Any], Sequence[Tensor]], grad: bool = False) -> None:
        try:
            torch.manual_seed(5)
            with torch.set_grad_enabled(grad):
                wanted = run(self.eager)
        except Exception as error:
            if what == "prompt":
                raise CannotTell(f"eager fails: {_line(error)}") from error
            self.result.skipped[what] = f"eager fails: {_line(error)}"
            return
        if not all(bool(torch.isfinite(each).all()) for each in wanted):
            if what == "prompt":
                raise CannotTell("eager's output is not finite")
            self.result.skipped[what] = "eager's output is not finite"
            return
        try:
            torch.manual_seed(5)
            with torch.set_grad_enabled(grad):
                found = run(self.model)
        except (CallError, NoKernelError) as error:
            if what == "prompt":
                raise
            raise type(error)(f"{what}: {error}") from error
        except Exception as error:
            raise Different(f"{what}: {_line(error)}") from error
        if len(found) != len(wanted) or any(a.shape != b.shape for a, b in zip(found, wanted)):
            raise Different(f"{what}: other shapes than eager")
        largest = max(float(each.abs().max()) for each in wanted) if grad else 0.0
        worst = max(distance(a, b, largest) for a, b in zip(found, wanted, strict=True))
        self.result.worst = max(self.result.worst, worst)
        if not worst <= TOLERANCE:
            raise Different(f"{what}: {worst:.2g} off eager")
        self.result.ran.append(what)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        attend = attngen_transformers.attend

        def noting(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            return attend(*arguments, **options)

        attngen_transformers.attend = noting
        try:
            yield
        finally:
            attngen_transformers.attend = attend


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def spread(model: Any) -> None:
    """Give a model weights with which attention is far from uniform, and every parameter has an effect."""
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        if parameter.dim() >= 2:
            torch.nn.init.normal_(parameter, std=1.2 / (parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]) ** 0.5)
        elif "sink" in name:
            torch.nn.init.normal_(parameter)
        elif bool((parameter == 0).all()):
            torch.nn.init.normal_(parameter, std=0.1)


def distance(found: Tensor, wanted: Tensor, scale: float = 0.0) -> float:
    if wanted.numel() == 0:
        return 0.0
    if wanted.dtype == torch.long:
        return float((found != wanted).any())
    limit = max(float(wanted.abs().max()), 1e-2 * scale, 1e-12)
    worst = float((found.float() - wanted.float()).abs().max()) / limit
    return worst if worst == worst else float("inf")


# --- inputs and outputs ---------------------------------------------------------------------------------------


def filled(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Inputs of the shapes of others, which have no data."""
    torch.manual_seed(3)
    device = next(model.parameters()).device
    found: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_meta:
            if value.is_floating_point():
                value = torch.randn(value.shape, dtype=value.dtype)
            elif name.endswith("attention_mask"):
                value = torch.ones(len(LENGTHS), LENGTHS[0], dtype=torch.long)
            else:
                value = torch.randint(3, 40, (len(LENGTHS), LENGTHS[0]))
        found[name] = value.to(device) if isinstance(value, Tensor) else value
    for name, value in found.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[0] == 2:
            found[name] = torch.randn(len(LENGTHS), *value.shape[1:], dtype=value.dtype, device=device) if any(
                "ids" in each for each in found
            ) else value
    return found


def padded_inputs(given: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """The inputs with shorter sequences, padded; ``_real`` are the tokens of the output that count."""
    found = dict(given)
    padded = False
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids not in given or mask not in given:
            continue
        real = torch.ones_like(given[mask], dtype=torch.bool)
        for row, length in enumerate(LENGTHS):
            missing = LENGTHS[0] - length
            if missing:
                real[row, slice(None, missing) if side == "left" else slice(length, None)] = False
        found[ids] = given[ids].masked_fill(~real, 0)
        found[mask] = real.long()
        padded = True
        if ids == "decoder_input_ids" or "decoder_input_ids" not in given:
            found["_real"] = real
    return found if padded else None


def outputs(model: Any, given: Mapping[str, Any], real: Tensor | None = None, grad: bool = False) -> list[Tensor]:
    """The tensors of floats of an output that count: logits where there are any."""
    found = model(**given)
    for name in ("logits", "last_hidden_state", "prediction_logits", "reconstruction"):
        first = getattr(found, name, None)
        if isinstance(first, Tensor):
            break
    else:
        values = found if isinstance(found, tuple) else tuple(found.values())
        first = next(each for each in values if isinstance(each, Tensor) and each.is_floating_point())
    if real is not None and first.shape[:2] == real.shape:
        first = first[real]
    return [first]


def stepwise(model: Any, given: Mapping[str, Any], real: Tensor | None) -> list[Tensor]:
    """The logits of a prompt, of two tokens after it one at a time, and of the rest at once, against a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
    ids = given[name]
    takes = cache_name(model.forward)
    cache, found = None, []
    for start, stop in ((0, 8), (8, 9), (9, 10), (10, 14)):
        inputs = {**given, name: ids[:, start:stop], "use_cache": True, takes: cache}
        if mask in given:
            inputs[mask] = given[mask][:, :stop]
        step = model(**inputs)
        cache = cache_of(step)
        if cache is None:
            raise ValueError("returns no cache")
        logits = step.logits
        if real is not None:
            logits = logits[real[:, start:stop]]
        found.append(logits.reshape(-1, logits.shape[-1]))
    return [torch.cat(found)]


def generated(model: Any, given: Mapping[str, Any], **more: Any) -> list[Tensor]:
    inputs = {name: value for name, value in given.items() if not name.startswith("decoder")}
    found = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, output_logits=True,
        return_dict_in_generate=True, **more,
    )  # fmt: skip
    return [found.sequences, torch.stack(found.logits)]


# --- all of them ----------------------------------------------------------------------------------------------

LIMIT_S, LIMIT_BYTES = 120, 8 << 30


def _work(device: str) -> None:
    """Check classes whose names come on standard input; print a line of JSON for each."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    attngen_transformers.register()

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        signal.alarm(LIMIT_S)
        name = line.strip()
        try:
            result = check(name, device)
        except BaseException as error:
            result = Result(name, classes()[name][0], "untested", _line(error))
        signal.alarm(0)
        print(json.dumps(asdict(result)), file=answers, flush=True)


def sweep(names: Sequence[str], jobs: int, device: str, say: Callable[[Result], None]) -> dict[str, Result]:
    """Check classes in as many processes; a class that ends its process is reported like that."""
    todo, found = iter(names), {}
    lock = threading.Lock()

    def serve() -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            with lock:
                name = next(todo, None)
            if name is None:
                break
            if process is None:
                process = subprocess.Popen(
                    [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--worker", "--device", device],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                )  # fmt: skip
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(name + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if line:
                result = Result(**json.loads(line))
            else:
                result = Result(name, classes()[name][0], "untested", f"ended its process: {process.wait()}")
                process = None
            with lock:
                found[name] = result
                say(result)
        if process is not None:
            process.communicate()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        _work(options.device)
        return
    say = lambda r: print(f"{r.verdict:9}{r.name} {r.seconds:.1f}s {r.worst:.1g} {r.reason} ran={len(r.ran)} {r.skipped}", flush=True)
    results = sweep(options.names or list(classes()), options.jobs, options.device, say)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results.values()], indent=1))


if __name__ == "__main__":
    main()
