"""Every model of transformers' mappings against ``eager``: right, refused, or not tested and why.

    python -m tests.integrations.model_sweep --jobs 2 --write

makes each class from a tiny configuration (``tiny_configs``), runs it with the same random weights under
``attn_implementation="eager"`` and ``"attngen"``, and writes ``docs/models.md``. With names of classes it checks these
alone, and writes nothing. With ``--device cuda`` kernels are compiled on first use. Classes are checked in processes of
their own; a class that ends its process or takes too long is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto

import attngen
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


class UntestedError(Exception):
    """A model that cannot be compared: the message says why."""


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
            raise UntestedError(f"not made tiny: {_line(error)}") from error
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
        if names and "input_ids" in given and len(_configs(self.eager)) > 1:
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
                raise UntestedError(f"eager fails: {_line(error)}") from error
            self.result.skipped[what] = f"eager fails: {_line(error)}"
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
            self.result.skipped[what] = f"refused: {_line(error)}"
            return
        except Exception as error:
            raise DifferentError(f"{what}: {_line(error)}") from error
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


def _line(error: BaseException) -> str:
    """The first line of an exception, without paths and addresses, which differ by machine."""
    text = str(error).strip()
    missing = re.search(r"requires the (\w+) library|No module named '(\w+)'", text)
    if isinstance(error, ImportError) and missing:
        return f"needs {missing[1] or missing[2]}, which is not installed"
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if lines[0].endswith(":") and len(lines) > 1:
        lines[0] = lines[1]
    return f"{type(error).__name__}: {lines[0]}"[:200]


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


# --- inputs and outputs ---------------------------------------------------------------------------------------


#: How many features a frame of sound has, by the name of the field.
_FEATURES = (
    "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "n_mel_bins", "feature_size", "input_dim",
)  # fmt: skip
FRAMES = 40


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Inputs that a model may take, text alone first."""
    takes = inspect.signature(model.forward).parameters
    ids = torch.ones(2, 16, dtype=torch.long, device="meta")
    if "input_ids" in takes:
        text = {name: ids for name in takes if re.fullmatch(r"(decoder_)?(input_ids|attention_mask)", name)}
        text |= {name: ids for name in ("qformer_input_ids",) if name in takes}
        if model.config.model_type == "diffusion_gemma":  # the decoder's keys are those of the encoder and its own
            text["decoder_attention_mask"] = torch.ones(len(LENGTHS), 2 * LENGTHS[0], dtype=torch.long)
        if "bbox" in takes:
            text["bbox"] = torch.zeros(len(LENGTHS), LENGTHS[0], 4)
        yield text
        size = next((each for each in map(_image_size, _configs(model)) if each), 32)
        pixels = torch.empty(len(LENGTHS), 3, size, size, device="meta")
        yield {**text, "pixel_values": pixels}
        yield {**text, "pixel_values": pixels[:, None]}
        streams = getattr(model.config, "num_codebooks", None)
        if streams:
            yield {**text, "input_ids": torch.randint(3, 30, (len(LENGTHS), LENGTHS[0], streams + 1))}
    known = inputs_of(model)
    if not isinstance(known, str):
        yield known
    main = model.main_input_name
    rest = {name: ids for name in ("decoder_input_ids", "decoder_attention_mask") if name in takes}
    if main in ("input_features", "input_values", "inputs", "audio_features"):
        yield {main: torch.empty(len(LENGTHS), 16000, device="meta"), **rest}
        yield {main: torch.empty(len(LENGTHS), 1, 16000, device="meta"), **rest}
        for config in _configs(model):
            for name in _FEATURES:
                width = getattr(config, name, None)
                if isinstance(width, int):
                    length = getattr(config, "max_length", None) or FRAMES
                    for shape in (
                        (length, width),
                        (width, length),
                        (2 * getattr(config, "max_source_positions", 0), width),
                    ):
                        yield {main: torch.empty(len(LENGTHS), *shape, device="meta"), **rest}
        for width in (16, 32):
            yield {main: torch.empty(len(LENGTHS), FRAMES, width, device="meta"), **rest}
    if main == "pixel_values" and "input_ids" not in takes:
        for size in (32, 64, 224):
            shape = (len(LENGTHS), getattr(model.config, "num_channels", 3), size, size)
            yield {main: torch.empty(shape, device="meta"), **rest}
        if "spatial_shapes" in takes:
            patches = torch.randn(len(LENGTHS), 16, 3 * tiny_configs.PATCH**2)
            yield {
                main: patches, "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long),
                "spatial_shapes": torch.tensor([[4, 4]] * len(LENGTHS)),
            }  # fmt: skip
    if main == "flattened_patches":
        patches = torch.randn(len(LENGTHS), 16, 770)
        patches[..., :2] = torch.arange(1, 17)[:, None]
        yield {main: patches, **rest}


def _configs(model: Any) -> list[Any]:
    return [model.config, *(getattr(model.config, name) for name in getattr(model.config, "sub_configs", ()))]


def _image_size(config: Any) -> int | None:
    size = getattr(config, "image_size", None)
    return size if isinstance(size, int) else None


def accepted(eager: Any) -> dict[str, Any]:
    """The first inputs with which a model runs."""
    reason = "no inputs of its kind are known here"
    for each in candidates(eager):
        given = filled(each, eager)
        try:
            with torch.no_grad():
                outputs(eager, given)
        except TimeoutError:
            raise
        except Exception as error:
            if not reason.startswith("eager"):
                reason = f"eager fails with the inputs that are known here: {_line(error)}"
        else:
            return given
    raise UntestedError(reason)


def filled(given: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Inputs of the shapes of others, which have no data."""
    torch.manual_seed(3)
    device = next(model.parameters()).device
    values: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Tensor) and value.is_meta:
            if value.is_floating_point():
                value = torch.randn(value.shape, dtype=value.dtype)
            elif name.endswith("attention_mask"):
                value = torch.ones(len(LENGTHS), LENGTHS[0], dtype=torch.long)
            else:
                value = torch.randint(3, 40, (len(LENGTHS), LENGTHS[0]))
        values[name] = value.to(device) if isinstance(value, Tensor) else value
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape[0] == 2:
            values[name] = (
                torch.randn(len(LENGTHS), *value.shape[1:], dtype=value.dtype, device=device)
                if any("ids" in each for each in values)
                else value
            )
    return values


def padded_inputs(given: Mapping[str, Any], side: str) -> dict[str, Any] | None:
    """The inputs with shorter sequences, padded; ``_real`` are the tokens of the output that count."""
    actual = dict(given)
    padded = False
    for ids, mask in (("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")):
        if ids not in given or mask not in given:
            continue
        if given[mask].shape[-1] > given[ids].shape[1]:
            actual[mask] = torch.cat([actual["attention_mask"], torch.ones_like(given[ids])], 1)
            actual["_real"] = torch.ones_like(given[ids], dtype=torch.bool)
            continue
        real = torch.ones_like(given[mask], dtype=torch.bool)
        for row, length in enumerate(LENGTHS):
            missing = LENGTHS[0] - length
            if missing:
                real[row, slice(None, missing) if side == "left" else slice(length, None)] = False
        actual[ids] = given[ids].masked_fill(~(real if given[ids].dim() == 2 else real[..., None]), 0)
        actual[mask] = real.long()
        padded = True
        if ids == "decoder_input_ids" or "decoder_input_ids" not in given:
            actual["_real"] = real
    return actual if padded else None


def outputs(model: Any, given: Mapping[str, Any], real: Tensor | None = None, grad: bool = False) -> list[Tensor]:
    """The tensors of floats of an output that count: logits where there are any."""
    actual = model(**given)
    for name in ("logits", "last_hidden_state", "prediction_logits", "reconstruction"):
        first = getattr(actual, name, None)
        if isinstance(first, Tensor):
            break
    else:
        values = actual if isinstance(actual, tuple) else tuple(actual.values())
        first = next(each for each in values if isinstance(each, Tensor) and each.is_floating_point())
    if real is not None:  # of an output for each sequence, the last token may be padding: only the longest counts
        first = first[real] if first.shape[:2] == real.shape else first[real.all(1)]
    return [first]


def stepwise(model: Any, given: Mapping[str, Any], real: Tensor | None) -> list[Tensor]:
    """The logits of a prompt, of two tokens after it one at a time, and of the rest at once, against a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    mask = "decoder_attention_mask" if name.startswith("decoder") else "attention_mask"
    ids = given[name]
    takes = cache_name(model.forward)
    cache, actual = None, []
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
        actual.append(logits.reshape(-1, logits.shape[-1]))
    return [torch.cat(actual)]


def generated(model: Any, given: Mapping[str, Any], **more: Any) -> list[Tensor]:
    inputs = {name: value for name, value in given.items() if not name.startswith("decoder")}
    actual = model.generate(
        **inputs, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, num_beams=1, output_logits=True,
        return_dict_in_generate=True, disable_compile=True, **more,
    )  # fmt: skip
    return [actual.sequences, torch.stack(actual.logits)]


# --- all of them ----------------------------------------------------------------------------------------------

LIMIT_S, LIMIT_BYTES = 120, 8 << 30


def _work(device: str) -> None:
    """Check classes whose names come on standard input; print a line of JSON for each."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # else convolutions make differences of rounding larger
    if device == "cpu":
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    attngen_transformers.register()

    def late(*_: Any) -> None:
        raise TimeoutError("took too long")

    signal.signal(signal.SIGALRM, late)
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        signal.alarm(LIMIT_S if device == "cpu" else 3 * LIMIT_S)  # kernels are compiled, too
        name = line.strip()
        if name == os.environ.get("ATTNGEN_TEST_ABORT"):
            os.abort()
        try:
            with nullcontext() if device == "cpu" else attngen.jit(fast_math=False):
                result = check(name, device)
        except BaseException as error:
            result = Result(name, classes()[name][0], "untested", _line(error))
        signal.alarm(0)
        print(json.dumps(asdict(result)), file=answers, flush=True)


def sweep(names: Sequence[str], jobs: int, device: str, say: Callable[[Result], None]) -> dict[str, Result]:
    """Check classes in as many processes; a class that ends its process is reported like that."""
    todo, results = iter(names), {}
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
                results[name] = result
                say(result)
        if process is not None:
            process.communicate()

    threads = [threading.Thread(target=serve) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: results[name] for name in names}


# --- the page of the docs -------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_WORDS = {"right": "right", "refused": "refused", "own": "its own", "untested": "not tested", "wrong": "**wrong**"}
_NAMED = {
    "left padding": "padding", "right padding": "padding", "cache, left padding": "cache", "generate": "generate",
}  # fmt: skip

_HEAD = """# Models of transformers

Every class of transformers' mappings for the tasks below, in transformers {version}, with
`attn_implementation="attngen"` against `"eager"`: tiny models with random weights, on the CPU. `python -m
tests.integrations.model_sweep --write` runs them and writes this page. How to use it is in
[integrations](integrations.md#transformers).

| | classes | |
|---|---|---|
| right | {right} | outputs are eager's within 1e-4 of the largest one, gradients within 1e-3 |
| refused | {refused} | an error, from attngen, or from a model that takes only the implementations of transformers |
| its own | {own} | the class computes its attention itself, or has none: nothing changes, and nothing is faster |
| not tested | {untested} | no tiny model could be made or run with `"eager"`: nothing is known |

Compared are a prompt; the prompt with padding on the left and on the right; gradients of all parameters; a prompt, two
single tokens and a chunk against a growing cache; `generate`, and `generate` with a static cache; a prompt that marks
tokens of an image; and each model inside a model, such as a vision tower, that the prompt does not run. The last column
has what was left out, as eager fails in it, or as attngen refuses it.
"""


def page(results: Mapping[str, Result]) -> str:
    """The text of ``docs/models.md``."""
    counts = {word: sum(each.verdict == word for each in results.values()) for word in _WORDS}
    lines = [_HEAD.format(version=transformers.__version__, **counts)]
    for mapping in MAPPINGS:
        lines += [
            f"## {mapping[0].upper()}{mapping[1:]}",
            "",
            "| class | | compared | variants | |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(each) for each in results.values() if each.mapping == mapping]
        lines.append("")
    return "\n".join(lines)


def _row(result: Result) -> str:
    ran = list(dict.fromkeys("parts" if each.startswith("part ") else _NAMED.get(each, each) for each in result.ran))
    variants = [f"`{each}`" for each in result.variants] if result.verdict in ("right", "wrong") else []
    notes = [result.reason] if result.reason else []
    notes += [f"{what}: {why}" for what, why in result.skipped.items()]
    cells = (f"`{result.name}`", _WORDS[result.verdict], ", ".join(ran), ", ".join(variants), "; ".join(notes))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare every model of transformers' mappings with eager.")
    parser.add_argument("names", nargs="*", help="classes; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path, help="where all results are written")
    parser.add_argument("--write", action="store_true", help="write docs/models.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.device)
        return
    unknown = set(options.names) - set(classes())
    if unknown:
        parser.error(f"no classes of the mappings: {', '.join(sorted(unknown))}")
    if options.write and (options.names or options.device != "cpu"):
        parser.error("--write takes all classes, on the CPU")

    def say(result: Result) -> None:
        print(
            f"{result.verdict:9}{result.name}  {result.seconds:.1f} s  {result.worst:.0e}  {result.reason}", flush=True
        )

    results = sweep(options.names or list(classes()), options.jobs, options.device, say)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results.values()], indent=1))
    if options.write:
        PAGE.write_text(page(results))
    counts = {word: sum(each.verdict == word for each in results.values()) for word in _WORDS}
    print(", ".join(f"{number} {word}" for word, number in counts.items()))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
