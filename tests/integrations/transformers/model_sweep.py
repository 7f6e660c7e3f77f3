"""Every model of transformers' mappings against ``eager``: right, refused, or not tested and why.

    python -m tests.integrations.transformers.model_sweep --jobs 2 --write

makes each class from a tiny configuration (``tiny_configs``), runs it with the same random weights under
``attn_implementation="eager"`` and ``"attngen"``, and writes ``docs/models.md``. With names of classes it checks these
alone, and writes nothing. With ``--device cuda`` kernels are compiled on first use. Classes are checked in processes of
their own; a class that ends its process or takes too long is reported, and the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import attngen
import attngen.integrations.transformers as attngen_transformers
from tests.integrations.transformers.sweep_checks import MAPPINGS, Result, check, classes
from tests.integrations.transformers.sweep_inputs import first_line

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
            result = Result(name, classes()[name][0], "untested", first_line(error))
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

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
_WORDS = {"right": "right", "refused": "refused", "own": "its own", "untested": "not tested", "wrong": "**wrong**"}
_NAMED = {
    "left padding": "padding", "right padding": "padding", "cache, left padding": "cache", "generate": "generate",
}  # fmt: skip

_HEAD = """# Models of transformers

Which models of transformers run on attngen, and with which kernels?

Every class of transformers' mappings for the tasks below, in transformers {version}, with
`attn_implementation="attngen"` against `"eager"`: tiny models with random weights, on the CPU.

| | classes | |
|---|---|---|
| right | {right} | outputs are eager's within 1e-4 of the largest one, gradients within 1e-3 |
| refused | {refused} | an error, from attngen or from a model that takes only transformers' own: keep `"eager"` |
| its own | {own} | the class computes its attention itself, or has none: nothing changes, and nothing is faster |
| not tested | {untested} | no tiny model could be made or run with `"eager"`: compare a batch yourself |

Speed is that of the [variants](terms.md#the-pipeline), the masks and scores that a model asks for:
[masks](performance/masks.md#masks-and-scores-of-models). The kernels of one model, and no others ([how to call
them](integrations.md#transformers)):

```bash
attngen spec --model config.json -o model.yaml
attngen build model.yaml
```

Compared are

- a prompt, also with padding on the left and on the right, and the gradients of all parameters;
- a prompt, two single tokens and a chunk against a growing cache, `generate`, and `generate` with a static cache;
- a prompt that marks tokens of an image, and each part, such as a vision tower, that a prompt does not run.

The last column has what was left out, as eager fails in it, or as attngen refuses it. `python -m
tests.integrations.transformers.model_sweep --write` runs all of them and writes this page; with names of classes it
compares these alone.
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
