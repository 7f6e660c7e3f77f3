"""A kernel for the Hugging Face Hub: its layout, its metadata, what it exports, and what loads it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from attngen.build.kernel_filter import KernelFilter
from attngen.errors import PackageError, SettingError
from attngen.packaging.hub import FUNCTIONS, HubKernel, hub_kernel
from attngen.packaging.project import Choices
from attngen.packaging.vendor import runtime_files
from tests.commands.test_build import attngen
from tests.packaging.support import FAKE_COMPILER, WITHOUT_ANYTHING, make, run, write_spec
from tests.runtime.support import FakeDriver
from tests.store import fakes

KERNEL = "{variant: causal, head_dim: 64, layout: [dense, varlen], backend: triton}"
SPEC = f"schema: 1\npackage: attngen_hub\narch: sm90a\nkernels: [{KERNEL}]\n"

#: Every file of a folder by its path in it, but for what Python writes when it imports.
Files = dict[str, bytes]


def files_of(folder: Path) -> Files:
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(paths)}


def metadata_of(folder: Path, build: str = "torch-cuda") -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "build" / build / "metadata.json").read_bytes())
    return read


def write(folder: Path, text: str = SPEC, **choices: Any) -> HubKernel:
    return hub_kernel(write_spec(folder.parent / "specs", text, "hub.yaml"), folder, Choices(**choices), jobs=1)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> HubKernel:
    """The kernel of ``SPEC``, which tests do not write to."""
    folder = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTNGEN_CACHE", str(folder / "cache"))
        fakes.compile_by(patch, FAKE_COMPILER)
        return write(folder / "kernel")


# --- the folder -----------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_a_kernel_holds_what_the_wheel_of_its_spec_holds(kernel: HubKernel, tmp_path: Path) -> None:
    from tests.packaging.support import install

    (wheel,) = make(write_spec(tmp_path, SPEC, "hub.yaml"), tmp_path / "dist").files
    package = files_of(install(tmp_path / "site", wheel) / "attngen_hub")
    made = files_of(kernel.folder)
    assert {name.partition("/")[0] for name in made} == {"README.md", "build"}
    cuda, cpu = (files_of(kernel.folder / "build" / build) for build in ("torch-cuda", "torch-cpu"))
    added = {f"_runtime/{name}" for name in runtime_files("integrations.flash_attn.hub")} - set(package)
    assert set(cuda) == {*package, *added, "metadata.json"}
    assert {name for name in package if cuda[name] != package[name]} == {"__init__.py", "__init__.pyi"}
    assert set(cuda) - set(cpu) == {name for name in package if name.endswith(".cubin")} != set()
    assert {name for name in cpu if cpu[name] != cuda[name]} == {"metadata.json"}
    for build_made in kernel.builds:
        files = files_of(build_made.folder)
        assert (build_made.files, build_made.bytes) == (len(files), sum(map(len, files.values())))


@pytest.mark.exhaustive
def test_metadata_names_the_kernel_and_has_a_digest_of_each_file(kernel: HubKernel) -> None:
    for build_made, backend in zip(kernel.builds, ("cuda", "cpu"), strict=True):
        read = metadata_of(kernel.folder, build_made.folder.name)
        files = files_of(build_made.folder)
        del files["metadata.json"]
        wanted = {name: b64encode(sha256(data).digest()).decode() for name, data in files.items()}
        assert read.pop("digest") == {"algorithm": "sha256", "files": wanted}
        identifier = read.pop("id")
        assert identifier == build_made.id
        assert identifier.isidentifier()
        assert identifier.startswith(f"_attngen_hub_{backend}_")
        archs = {"archs": ["9.0a"]} if backend == "cuda" else {}
        assert read == {
            "name": "attngen-hub", "version": 0, "license": "apache-2.0", "python-depends": [],
            "backend": {"type": backend, **archs},
        }  # fmt: skip
    assert (kernel.name, kernel.version, kernel.drivers) == ("attngen-hub", 0, {"sm90a": 13000})
    card = (kernel.folder / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert 'get_kernel("<owner>/attngen-hub", version=0, trust_remote_code=True)' in card


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_version_arch_and_licence(tmp_path: Path) -> None:
    (tmp_path / "LIC").write_text("All rights reserved.\n")
    text = SPEC.replace("arch: sm90a", "arch: [sm90a, sm80, ptx80]")
    made = write(
        tmp_path / "one", text, version="2.1", licence=tmp_path / "LIC", only=KernelFilter(arch=("sm80", "ptx80"))
    )
    read = metadata_of(made.folder)
    assert (read["version"], read["license"], read["backend"]["archs"]) == (2, "other", ["8.0", "8.0+PTX"])
    for build_made in made.builds:
        assert (build_made.folder / "LICENSE").read_text() == "All rights reserved.\n"
    assert b'__version__ = "2.1"' in (made.folder / "build/torch-cuda/__init__.py").read_bytes()
    other = write(tmp_path / "two", text, version="2.1", only=KernelFilter(arch=("sm80",)))
    assert metadata_of(other.folder)["id"] != read["id"]
    with pytest.raises(SettingError, match="version 'new' is not one that pip understands"):
        write(tmp_path / "three", version="new")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fake_compiler")
def test_the_same_spec_gives_the_same_bytes_also_in_place_of_an_earlier_kernel(
    kernel: HubKernel, tmp_path: Path
) -> None:
    folder = tmp_path / "another place" / "kernel"
    write(folder, SPEC.replace("causal", "full"))
    (folder / ".gitattributes").write_text("*.cubin filter=lfs\n")
    (folder / "build/torch-cuda/left_over.py").write_text("")
    before = files_of(folder)
    write(folder)
    made = files_of(folder)
    assert made.pop(".gitattributes") == before[".gitattributes"]
    assert made.pop("README.md") == before["README.md"]  # which its owner may have written
    assert made == {name: data for name, data in files_of(kernel.folder).items() if name != "README.md"}
    assert sorted(os.listdir(folder)) == [".gitattributes", "README.md", "build"]
    for name, data in made.items():
        assert os.fsencode(tmp_path) not in data, name


@pytest.mark.exhaustive
def test_a_folder_that_holds_something_else_is_refused(kernel: HubKernel, tmp_path: Path) -> None:
    """Nothing is compiled first, and nothing written."""
    remedy = "name a new folder, an empty one, or one that this command wrote for the same package"
    for name, wanted in (
        ("notes.txt", f"holds something else: notes.txt; {remedy}"),
        ("build/torch213-cxx11-cu130-x86_64-linux/__init__.py",
         "holds build/torch213-cxx11-cu130-x86_64-linux, which 'kernels' might load instead; allowed there: "
         "torch-cuda, torch-cpu. Remove it"),
        ("build/torch-cuda/__init__.py", "build/torch-cuda is no kernel, not 'attngen-hub'"),
        ("build/torch-cpu/metadata.json", "build/torch-cpu is the kernel 'other', not 'attngen-hub'"),
    ):  # fmt: skip
        folder = tmp_path / name.replace("/", "_")
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text('{"name": "other"}')
        with pytest.raises(PackageError) as caught:
            write(folder)
        assert wanted in str(caught.value)
        assert files_of(folder) == {name: b'{"name": "other"}'}
    with pytest.raises(PackageError, match="cannot be read as a folder: Not a directory"):
        write(folder / name)


def test_a_package_whose_name_kernels_cannot_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="would be named 'a'; allowed on the Hub: at least two .* 'attngen-a'"):
        write(tmp_path / "kernel", SPEC.replace("attngen_hub", "a_"))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.compile_by(monkeypatch, FAKE_COMPILER)
    monkeypatch.chdir(tmp_path)
    spec = write_spec(tmp_path, SPEC, "hub.yaml")
    report = json.loads(attngen("package", spec, "--hub", "kernel", "--json").stdout)
    assert (report["package"], report["files"], report["wheel"]) == ("attngen_hub", [], None)
    assert report["drivers"] == {"sm90a": 13000}
    hub = report["hub"]
    assert (hub["folder"], hub["name"], hub["version"]) == ("kernel", "attngen-hub", 0)
    assert [each["folder"] for each in hub["builds"]] == ["kernel/build/torch-cuda", "kernel/build/torch-cpu"]
    assert not (tmp_path / "dist").exists()
    both = attngen("package", spec, "--hub", "kernel", "--wheel").stdout.splitlines()
    assert [line.partition(":")[0] for line in both[-3:]] == [
        "The wheel needs an NVIDIA driver", "kernel/build/torch-cuda", "kernel/build/torch-cpu",
    ]  # fmt: skip
    refused = attngen("package", spec, "--hub", "kernel", "--max-size", "8 MB", code=2).stderr
    assert "--max-size is about a wheel, and --hub alone makes none; add --wheel" in refused


# --- what it exports ------------------------------------------------------------------------------------------


@contextmanager
def imported(kernel: HubKernel, build: str = "torch-cuda") -> Iterator[ModuleType]:
    """Import a build variant as ``kernels`` does; afterwards this process has never heard of it."""
    folder, name = kernel.folder / "build" / build, metadata_of(kernel.folder, build)["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for each in [each for each in sys.modules if each.partition(".")[0] == name]:
            del sys.modules[each]


@contextmanager
def on_fake_gpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Tensors on the CPU are taken for those of a GPU by the runtime that a kernel carries."""
    runtime = f"{module.__name__}._runtime"
    choice = import_module(f"{runtime}.integrations.shared.choice")
    torch_state = import_module(f"{runtime}.runtime.arguments.torch_state")
    for holder in (choice, torch_state):
        monkeypatch.setattr(holder, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    gpu = FakeDriver()
    with import_module(f"{runtime}.runtime.device.driver").use(gpu):
        yield gpu


@pytest.mark.exhaustive
def test_its_functions_run_its_kernels(kernel: HubKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 2, 40, 4, 64).to(torch.bfloat16)
    starts = torch.tensor([0, 30, 80], dtype=torch.int32)
    with imported(kernel) as module, on_fake_gpu(module, monkeypatch) as gpu:
        assert {*FUNCTIONS, "attention", "flash_attn_interface"} <= {*module.__all__}
        assert all(hasattr(module, name) for name in module.__all__)
        out = module.flash_attn_func(q, k, v, causal=True)
        assert torch.equal(out, module.attention(q, k, v))
        flat = (t.flatten(0, 1) for t in (q, k, v))
        module.flash_attn_varlen_func(*flat, starts, starts, 50, 50, causal=True)
        assert [launch.symbol.split("_m")[0] for launch in gpu.launches][-1].endswith("d64_causal_varlen")
        with pytest.raises(module.errors.NoKernelError) as caught:
            module.flash_attn_func(q, k, v, window_size=(3, 3))
        said = str(caught.value)
        assert "variants that would serve it: window" in said
        assert "This package was made without one. Its maker can add to its spec, and package it again:" in said
        assert "attngen build" not in said


@pytest.mark.exhaustive
def test_sinks_join_the_softmax(kernel: HubKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a kernel without sinks on the GPU, whose result is joined with them."""
    q, k, v = torch.randn(3, 2, 24, 4, 64)
    sinks = torch.randn(4, requires_grad=True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8
    scores = scores.masked_fill(torch.ones(24, 24, dtype=torch.bool).triu(1), float("-inf"))
    scores = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 24, 1)], dim=-1)
    wanted = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(dim=-1)[..., :-1], v)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), sinks)
    with imported(kernel) as module:
        out = module.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(*torch.autograd.grad(out.square().sum(), sinks), gradient)
        starts = torch.tensor([0, 24], dtype=torch.int32)
        packed = module.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 24, 24, causal=True, s_aux=sinks)
        torch.testing.assert_close(packed, wanted[0])
        last = module.flash_attn_with_kvcache(q[:, -1:], k, v, cache_seqlens=24, causal=True, s_aux=sinks.detach())
        torch.testing.assert_close(last, wanted[:, -1:])
        with pytest.raises(module.errors.NoKernelError, match="return_attn_probs is not supported"):
            module.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, s_aux=sinks)
        with pytest.raises(module.errors.NoKernelError, match="block_table is not supported"):
            module.flash_attn_varlen_func(
                q[0], k, v, starts, starts, 24, 24, block_table=starts.view(2, 1), s_aux=sinks
            )
        with pytest.raises(module.errors.CallError, match=r"s_aux must be floating-point of shape \(4,\)"):
            module.flash_attn_func(q, k, v, causal=True, s_aux=sinks[:2])
        halves = (t.to(torch.bfloat16) for t in (q, k, v))
        with on_fake_gpu(module, monkeypatch) as gpu:
            joined = module.flash_attn_func(*halves, causal=True, s_aux=sinks.detach())
        assert "d64_causal_m" in gpu.launches[0].symbol
        torch.testing.assert_close(joined.float(), wanted.detach(), rtol=0.02, atol=0.02)


#: Two versions of a kernel in one process, as traced programs.
TWO_VERSIONS = """
import importlib.util, json, pathlib, sys, torch
def load(folder):
    name = json.loads((folder / "metadata.json").read_bytes())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
q = torch.randn(1, 9, 2, 64)
for folder in sorted(pathlib.Path("build").iterdir()):
    module = load(folder)
    for call in (lambda q: module.attention(q, q, q), lambda q: module.flash_attn_func(q, q, q, window_size=(2, 0))):
        torch.testing.assert_close(torch.compile(call, backend="aot_eager", fullgraph=True)(q), call(q))
    print(module.__name__, module.define_operators())
"""


@pytest.mark.exhaustive
def test_two_versions_work_in_one_process_without_attngen(kernel: HubKernel) -> None:
    lines = run(TWO_VERSIONS, kernel.folder).splitlines()
    names = [metadata_of(kernel.folder, build)["id"] for build in ("torch-cpu", "torch-cuda")]
    assert lines == [f"{name} ('{name}::causal',)" for name in names]


# --- what loads it --------------------------------------------------------------------------------------------


def program(text: str, kernel: HubKernel, repository: str) -> str:
    """Run a program in which ``LOCAL_KERNELS`` names the folder, and nothing of attngen is there; return its output."""
    environment = {
        **os.environ, "LOCAL_KERNELS": f"{repository}={kernel.folder}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    blocked = WITHOUT_ANYTHING.replace("'yaml', 'click', 'rich', 'platformdirs', ", "")  # which these libraries need
    done = subprocess.run(
        [sys.executable, "-c", blocked + text, str(kernel.folder)],
        capture_output=True, text=True, check=False, env=environment, cwd=kernel.folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


LOADED = """
import pathlib, sys, torch
from kernels import get_kernel, get_local_kernel
from kernels._rust import Digest, Metadata
local = get_local_kernel(pathlib.Path(sys.argv[1]))
assert get_kernel("someone/attngen-hub", version=1) is local
q = torch.randn(1, 9, 2, 64)
torch.testing.assert_close(local.flash_attn_func(q, q, q, causal=True), local.attention(q, q, q))
for build in ("torch-cuda", "torch-cpu"):
    folder = pathlib.Path(sys.argv[1], "build", build)
    read = Metadata.read_from_file(folder / "metadata.json")
    read.digest.validate(Digest.hash_variant(read.digest.algorithm, folder))
    print(read.id, read.name, read.version, read.backend.archs)
print(local.__name__)
"""


def test_kernels_loads_it_and_finds_its_digest_right(kernel: HubKernel) -> None:
    pytest.importorskip("kernels")
    cuda, cpu = (metadata_of(kernel.folder, build)["id"] for build in ("torch-cuda", "torch-cpu"))
    assert program(LOADED, kernel, "someone/attngen-hub").splitlines() == [
        f"{cuda} attngen-hub 0 ['9.0a']", f"{cpu} attngen-hub 0 None",
        cuda if torch.version.cuda else cpu,
    ]  # fmt: skip


#: A model by the kernel, against the same model by ``eager``: a padded batch, text, and gradients.
MODEL = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, max_position_embeddings=64, attn_implementation="eager",
)
model = LlamaForCausalLM(config).eval()
ids, mask = torch.randint(0, 64, (2, 12)), torch.ones(2, 12, dtype=torch.long)
mask[0, :4] = 0
def results():
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    text = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return logits, text, model.model.layers[0].self_attn.q_proj.weight.grad.clone()
wanted = results()
model.set_attn_implementation("someone/attngen-hub", allow_all_kernels=True)
torch.testing.assert_close(results(), wanted)
model.save_pretrained("model")
again = LlamaForCausalLM.from_pretrained("model", attn_implementation="someone/attngen-hub", allow_all_kernels=True)
torch.testing.assert_close(again(ids, attention_mask=mask).logits[mask.bool()], wanted[0])
print(again.config._attn_implementation)
"""

#: Models with sinks are right, too.
SINKS = """
from transformers import GptOssConfig, GptOssForCausalLM
config = GptOssConfig(
    vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=64, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
    layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
)
model = GptOssForCausalLM(config).eval()
for layer in model.model.layers:
    torch.nn.init.normal_(layer.self_attn.sinks)
wanted = model(ids).logits
model.set_attn_implementation("someone/attngen-hub", allow_all_kernels=True)
torch.testing.assert_close(model(ids).logits, wanted)
"""


def test_transformers_models_run_on_it(kernel: HubKernel) -> None:
    pytest.importorskip("kernels")
    utils = pytest.importorskip("transformers.utils")
    if not utils.is_kernels_available():
        pytest.skip("this release of transformers takes another release of kernels")
    assert program(MODEL + SINKS, kernel, "someone/attngen-hub").splitlines()[-1] == "someone/attngen-hub"


#: Both backends of diffusers that load flash-attn 2 from the Hub, and the passes that its parallel attention takes.
DIFFUSERS = """
import torch
from diffusers.models.attention_dispatch import _HUB_KERNELS_REGISTRY, AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn
q, k, v = torch.randn(3, 2, 9, 2, 64)
with attention_backend("native"):
    wanted = dispatch_attention_fn(q, k, v, is_causal=True)
for name in ("flash_hub", "flash_varlen_hub"):
    with attention_backend(name):
        torch.testing.assert_close(dispatch_attention_fn(q, k, v, is_causal=True), wanted)
    config = _HUB_KERNELS_REGISTRY[AttentionBackendName(name)]
    print(config.wrapped_forward_fn.__name__, config.wrapped_backward_fn.__name__)
"""


def test_diffusers_takes_it_for_flash_attn_2(kernel: HubKernel) -> None:
    pytest.importorskip("kernels")
    pytest.importorskip("diffusers")
    assert program(DIFFUSERS, kernel, "kernels-community/flash-attn2").splitlines() == [
        "_flash_attn_forward _flash_attn_backward", "_flash_attn_varlen_forward _flash_attn_varlen_backward",
    ]  # fmt: skip
