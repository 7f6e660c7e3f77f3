"""``attngen spec --model``: the spec of a model holds what its layers ask for when it runs, and nothing else.

Models of the shipped classes of transformers are saved as a configuration, of which the command writes a spec. Beside
it the same model runs on the CPU with random weights, where each call says which variants it would take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import Result

import attngen.integrations.transformers as attngen_transformers
from attngen.commands.check import check_spec
from attngen.integrations.flash_attn import arguments as flash_arguments
from attngen.integrations.shared.choice import kernels_of
from attngen.integrations.transformers import implementation
from attngen.plan import plan
from attngen.runtime.arguments.checked import ATTENTION_DTYPES
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import KernelSpec, expand, load_spec
from tests.commands.test_build import attngen
from tests.integrations.transformers.families import batch
from tests.integrations.transformers.model_families import FAMILIES
from tests.integrations.transformers.serving import serve
from tests.sampling import few


@dataclass(frozen=True)
class Call:
    """Request of one call of attention: any of the variants, most specific first."""

    variants: tuple[str, ...]
    head_dim_qk: int
    head_dim_v: int
    dtype: str
    layout: str
    learns: bool


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> set[Call]:
    """Requests of the calls of a test."""
    seen: set[Call] = set()

    def noting(attend: Any) -> Any:
        def attends(candidates: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
            layout = "paged" if options.get("pages") else "varlen" if options.get("packing") else "dense"
            names = tuple(dict.fromkeys(each.variant for each in candidates))
            learns = torch.is_grad_enabled() and q.requires_grad
            seen.add(Call(names, q.shape[-1], v.shape[-1], ATTENTION_DTYPES[q.dtype], layout, learns))
            return attend(candidates, q, k, v, **options)

        return attends

    for module in (implementation, flash_arguments):
        monkeypatch.setattr(module, "attend", noting(module.attend))
    return seen


def written(config: Any, folder: Path, *options: str, dtype: str = "bfloat16") -> tuple[Path, Result]:
    """Save a configuration, and have its spec written."""
    config.dtype = dtype
    config.save_pretrained(folder)
    out = folder / "model.yaml"
    return out, attngen("spec", "--model", str(folder), *options, "-o", str(out))


def kernels_in(spec: Path) -> list[KernelSpec]:
    """Return the kernels of a spec, in which nothing is wrong."""
    report = check_spec(str(spec))
    assert not report.errors
    assert not report.warnings
    return list(expand(load_spec(spec)))


@contextmanager
def known(kernels: list[KernelSpec]) -> Iterator[None]:
    """Make kernels known as if they were built: manifests without machine code."""
    manifests = [{**plan(kernel).to_dict(), "resources": {"shared_memory": 0}} for kernel in kernels]
    registry.clear()
    registry.add(package_of_kernels([Kernel(manifest, bytes) for manifest in manifests], "tests"))
    yield
    registry.clear()


def missing(kernels: list[KernelSpec], calls: set[Call]) -> list[tuple[Call, str]]:
    """Return the calls that no kernel takes, with the direction that there is none of."""
    absent = []
    with known(kernels):
        for call in calls:
            form: dict[str, Any] = {
                "dtype": call.dtype, "head_dim_qk": call.head_dim_qk, "head_dim_v": call.head_dim_v,
                "layout": call.layout,
            }  # fmt: skip
            for direction in ("forward", "backward")[: 1 + call.learns]:
                if not any(kernels_of(name, direction=direction, **form) for name in call.variants):
                    absent.append((call, direction))
    return absent


def unused(kernels: list[KernelSpec], calls: set[Call]) -> list[KernelSpec]:
    """Return the kernels that no call takes."""
    return [
        kernel for kernel in kernels
        if not any(
            kernel.variant.name in call.variants
            and (kernel.head_dim_qk, kernel.head_dim_v) == (call.head_dim_qk, call.head_dim_v)
            and (kernel.dtype, kernel.layout) == (call.dtype, call.layout)
            and (call.learns or kernel.direction == "forward")
            for call in calls
        )
    ]  # fmt: skip


def made(family: str) -> Any:
    """Return a model of a family with random weights, in bf16."""
    attngen_transformers.register()
    cls, config = FAMILIES[family].make()
    config._attn_implementation = "attngen"
    torch.manual_seed(1)
    return cls._from_config(config, attn_implementation="attngen", dtype=torch.bfloat16).eval()


@few("family", FAMILIES, always=[*map([*FAMILIES].index, ("gpt_oss",))], often=range(0, 99, 3))
def test_a_spec_serves_its_model(family: str, tmp_path: Path, calls: set[Call]) -> None:
    spec, done = written(FAMILIES[family].make()[1], tmp_path)
    assert "warning" not in done.stderr
    kernels = kernels_in(spec)
    with torch.no_grad():
        FAMILIES[family].run(made(family))
    assert calls
    assert missing(kernels, calls) == []
    assert unused(kernels, calls) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this release has no Gemma 4")
def test_gemma_4_has_kernels_of_head_dim_512(tmp_path: Path, calls: set[Call]) -> None:
    spec, _ = written(FAMILIES["gemma4"].make()[1], tmp_path, "--backward")
    kernels = kernels_in(spec)
    model = made("gemma4")
    with torch.no_grad():
        FAMILIES["gemma4"].run(model)
    model.train()
    model(**batch("llama", "right").inputs).logits.sum().backward()
    assert missing(kernels, calls) == []
    wide = [(kernel.variant.name, kernel.direction) for kernel in kernels if kernel.head_dim_v == 512]
    assert sorted(wide) == [(name, passes) for name in ("causal", "span") for passes in ("backward", "forward")]


TRAINED = ("llama", "gpt2", "bert", "t5", "bart", "gemma2", "gpt_oss", "llama4", "vit", "deepseek_v3", "mistral")


@pytest.mark.exhaustive
@few("family", TRAINED, always=1, often=range(0, 99, 3))
def test_a_spec_for_training_has_what_its_steps_take(family: str, tmp_path: Path, calls: set[Call]) -> None:
    spec, _ = written(FAMILIES[family].make()[1], tmp_path, "--backward")
    kernels = kernels_in(spec)
    model = made(family)
    with torch.no_grad():
        FAMILIES[family].run(model)
    model.train()
    if family == "vit":
        model(pixel_values=torch.randn(2, 3, 32, 32, dtype=model.dtype)).last_hidden_state.sum().backward()
    else:
        kind = family if family == "t5" else "t5" if family == "bart" else "llama"
        for padding in ("none", "right"):
            model(**batch(kind, padding).inputs).logits.sum().backward()
    assert any(call.learns for call in calls)
    assert missing(kernels, calls) == []
    assert unused(kernels, calls) == []


@pytest.mark.exhaustive
@few("family", ["mistral", "gpt_oss", "llama", "gemma2", "gemma3", "qwen3"], often=(0,))
def test_a_spec_for_serving_has_what_continuous_batching_takes(family: str, tmp_path: Path, calls: set[Call]) -> None:
    pytest.importorskip("psutil", reason="transformers asks it how much memory a cache may take")
    spec, _ = written(FAMILIES[family].make()[1], tmp_path, "--serving")
    kernels = kernels_in(spec)
    model = made(family)
    with torch.no_grad():
        FAMILIES[family].run(model)
        serve(model)
    assert {call.layout for call in calls} >= {"dense", "varlen" if family == "mistral" else "paged"}
    assert missing(kernels, calls) == []
    assert unused(kernels, calls) == []
    # a step reads a cache by blocks that share its keys, whose rows are the heads of a KV head
    for kernel in kernels:
        if kernel.layout != "varlen":
            siblings = [each for each in kernels if each.variant == kernel.variant and each.layout == kernel.layout]
            assert {each.split_kv for each in siblings} == {False, True}
            assert any(each.pack_gqa for each in siblings)


@pytest.mark.exhaustive
def test_a_spec_for_serving_on_other_cards(tmp_path: Path) -> None:
    """All kernels, those over pages and those that share keys among them, are planned for a card without wgmma."""
    spec, done = written(FAMILIES["gemma3"].make()[1], tmp_path, "--serving", "--arch", "sm80")
    assert "left out" not in done.stderr
    kernels = kernels_in(spec)
    assert {kernel.arch for kernel in kernels} == {"sm80"}
    forms = {(kernel.layout, kernel.split_kv, plan(kernel).schedule) for kernel in kernels}
    assert {("paged", False, "mma_forward"), ("paged", True, "mma_decode")} <= forms


@pytest.mark.exhaustive
def test_the_text_is_short_and_the_same_each_time(tmp_path: Path) -> None:
    config = FAMILIES["gemma3"].make()[1]
    first, second = (written(config, tmp_path / name)[0].read_text() for name in ("first", "second"))
    assert first == second
    head, _, kernels = first.partition("kernels:\n")
    assert "causal:" not in head  # a preset is declared nowhere
    assert kernels == (
        "  # layers.*.self_attn (1 of 2)\n"
        "  - {variant: sliding_window, head_dim: 16, dtype: bf16}\n"
        "  # layers.*.self_attn (all 2); padded batches\n"
        "  - {variant: span, head_dim: 16, dtype: bf16}\n"
        "  # layers.*.self_attn (1 of 2)\n"
        "  - {variant: causal, head_dim: 16, dtype: bf16}\n"
    )


def test_the_file_may_be_named_and_the_text_printed(tmp_path: Path) -> None:
    spec, _ = written(FAMILIES["llama"].make()[1], tmp_path)
    done = attngen("spec", "--model", str(tmp_path / "config.json"))
    assert done.stdout == spec.read_text()


@pytest.mark.exhaustive
def test_dtypes_arches_and_the_name_are_those_asked_for(tmp_path: Path) -> None:
    options = ("--dtype", "bf16", "--dtype", "fp16", "--arch", "sm80", "--arch", "sm90a", "--name", "mine")
    spec, _ = written(FAMILIES["llama"].make()[1], tmp_path, *options)
    assert load_spec(spec).package == "mine"
    actual = [(kernel.variant.name, kernel.arch, kernel.dtype) for kernel in kernels_in(spec)]
    wanted = [(v, a, d) for v in ("causal", "span") for a in ("sm80", "sm90a") for d in ("bf16", "fp16")]
    assert sorted(actual) == sorted(wanted)


@pytest.mark.exhaustive
def test_the_dtype_is_that_of_the_configuration(tmp_path: Path) -> None:
    spec, _ = written(FAMILIES["llama"].make()[1], tmp_path, dtype="float32")
    assert {kernel.dtype for kernel in kernels_in(spec)} == {"fp32"}
    content = json.loads((tmp_path / "config.json").read_text())
    del content["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(content))
    done = attngen("spec", "--model", str(tmp_path))
    assert "names no dtype: the spec is for bf16" in done.stderr


# --- sizes ----------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_small_wheel_goes_without_what_others_serve(tmp_path: Path, calls: set[Call]) -> None:
    spec, done = written(FAMILIES["gemma3"].make()[1], tmp_path, "--max-size", "260 kB")
    assert done.stderr.count("the wheel would be too large") == 2
    assert "causal, head_dim 16, bf16; its calls run on span" in done.stderr
    kernels = kernels_in(spec)
    assert [kernel.variant.name for kernel in kernels] == ["span"]
    assert "# layers.*.self_attn (all 2)\n" in spec.read_text()  # in all batches now
    with torch.no_grad():
        FAMILIES["gemma3"].run(made("gemma3"))
    assert missing(kernels, calls) == []


def test_too_small_a_wheel_is_refused(tmp_path: Path) -> None:
    config = FAMILIES["gemma3"].make()[1]
    config.save_pretrained(tmp_path)
    done = attngen("spec", "--model", str(tmp_path), "--max-size", "0.2", code=1)
    assert "the wheel of this spec, by estimate, would take" in done.stderr
    assert "more than the 209,715 B that max-size allows" in done.stderr
    assert "span, head_dim 16, sm90a: 1 kernel" in done.stderr


# --- what is refused ------------------------------------------------------------------------------------------


def falcon() -> Any:
    return transformers.FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


def test_a_model_with_attention_of_its_own(tmp_path: Path) -> None:
    falcon().save_pretrained(tmp_path)
    done = attngen("spec", "--model", str(tmp_path), code=2)
    assert "FalconModel computes its attention itself" in done.stderr
    assert "attngen.integrations.sdpa() serves it" in done.stderr


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"model_type": "lama"}', "does not know 'lama'; did you mean 'llama'?"),
        ('{"model_type": "llama", "architectures": ["MyLlama"], "auto_map": {"AutoModel": "my.MyLlama"}}',
         "does not know 'MyLlama', and code next to it is not run"),
        ('{"hidden_size": 3}', "has no 'model_type'"),
        ("[1]", "has no 'model_type'"),
        ("{", "is not JSON"),
        ('{"model_type": "llama", "num_attention_heads": "many"}', "LlamaConfig refuses it"),
        ('{"model_type": "llama", "dtype": "float64"}', "dtype: found torch.float64 in the configuration"),
    ],
)  # fmt: skip
def test_what_is_no_configuration_of_a_model(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    done = attngen("spec", "--model", str(tmp_path), code=2)
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--model", "."), "config.json cannot be read"),
        (("--model", ".", "--from-flex", "a:b"), "give --from-flex or --model, and not both"),
        ((), "give --from-flex or --model, and not both"),
        (("--model", ".", "--head-dim", "64"), "--head-dim cannot be combined with --model"),
        (("--from-flex", "a:b", "--serving"), "--serving cannot be combined with --from-flex"),
        (("--model", ".", "--arch", "sm90"), "found 'sm90'; did you mean 'sm90a'?"),
        (("--model", ".", "--max-size", "big"), "big"),
        (("--model", ".", "--name", "torch"), "--name: 'torch' is a module that programs import"),
        (("--from-flex", "a:b", "--arch", "sm80", "--head-dim", "60"), "--head-dim: found 60; allowed: multiples of 8"),
    ],
)
def test_options_that_do_not_go_together(
    options: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in attngen("spec", *options, code=2).stderr


def test_servers_need_an_arch_and_a_dtype_that_have_kernels_for_caches(tmp_path: Path) -> None:
    config = FAMILIES["llama"].make()[1]
    config.save_pretrained(tmp_path)
    model = ("spec", "--model", str(tmp_path), "--serving")
    refused = attngen(*model, "--arch", "sm100a", code=2).stderr
    assert "are for sm80, sm86, sm89, sm90a, sm120a, ptx80, found --arch sm100a" in " ".join(refused.split())
    assert "are in bf16 and fp16, found fp32" in attngen(*model, "--dtype", "fp32", code=2).stderr


def test_a_layer_that_no_kernel_takes_is_named(tmp_path: Path) -> None:
    _, config = FAMILIES["llama"].make()
    config.head_dim = 520
    config.save_pretrained(tmp_path)
    refused = attngen("spec", "--model", str(tmp_path), code=2)
    assert "no kernel can be built: span, head_dim 520" in refused.stderr
