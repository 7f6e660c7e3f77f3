"""A kernel for the Hugging Face Hub: a folder that the library ``kernels`` loads, with what the wheel holds.

``build/torch-cuda`` is that package, with a copy of the runtime that has flash-attn's functions, which transformers and
diffusers call, and with ``metadata.json``. ``build/torch-cpu`` has no cubins: it is for a torch without CUDA, on which
every call runs the eager reference. There is no binary for the host, so that these two serve each torch, CUDA and
processor. The layout is that of https://huggingface.co/docs/kernels/kernel-requirements.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from attngen.arch import ARCHES, Arch
from attngen.build.pipeline import Observer
from attngen.compile.toolchain import newer_driver_note
from attngen.drivers import drivers_text
from attngen.errors import PackageError
from attngen.files import failed_write, naming
from attngen.packaging.contents import Contents, contents_of
from attngen.packaging.project import Choices, project_files
from attngen.packaging.vendor import runtime_files
from attngen.runtime.registry.shipped import INDEX
from attngen.store.temporary import TemporaryFolder

#: Folders of build variants → the backend of torch that each is for, as ``metadata.json`` names it.
BUILDS = {"torch-cuda": "cuda", "torch-cpu": "cpu"}

#: Module of the drop-ins that a kernel exports beside the calls of its package, and their names.
DROP_INS = "integrations.flash_attn.hub"
FUNCTIONS = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache")

#: flash-attn's module of the same functions, of which diffusers takes the forward and backward passes.
_INTERFACE = "flash_attn_interface"

METADATA = "metadata.json"

#: Names of kernels, as ``kernels`` checks them.
_NAME = re.compile(r"[a-z][-a-z0-9]*[a-z0-9]")

_EXPORTS = f"""

# What a kernel on the Hub exports besides. The name of this module is unique, and that of its operators with it, since
# two versions of a kernel may be loaded in one process.
from dataclasses import replace as _replace

from ._runtime.integrations.flash_attn import v2 as {_INTERFACE}
from ._runtime.{DROP_INS} import {", ".join(FUNCTIONS)}
from ._runtime.runtime.registry import lookup as _lookup

__all__ += [{", ".join(f'"{name}"' for name in (*FUNCTIONS, _INTERFACE))}]

_lookup.SHARED_NAMESPACE = f"{{__name__}}_variants"
_PACKAGE = _replace(_PACKAGE, namespace=__name__)
_lookup.registry.add(_PACKAGE)
"""

_STUBS = "".join(
    (
        "\nfrom ._runtime.integrations.flash_attn import v2\n",
        *(f"from ._runtime.{DROP_INS} import {name} as {name}\n" for name in FUNCTIONS),
        f"\n{_INTERFACE} = v2\n",
    )
)

_CARD = """---
license: {license}
library_name: kernels
tags: [kernel]
---

# {name}

Attention kernels for {arches}, compiled ahead of time by attngen {attngen} from `{spec}`.

```python
from kernels import get_kernel

kernel = get_kernel("<owner>/{name}", version={version}, trust_remote_code=True)
out = kernel.attention(q, k, v, variant="{variant}")
```

It needs torch and no compiler. Tensors on a GPU run a kernel, tensors on the CPU an eager reference. `flash_attn_func`,
`flash_attn_varlen_func` and `flash_attn_with_kvcache` serve calls whose mask one of the variants computes: {variants}.

NVIDIA driver: {drivers}.
"""


@dataclass(frozen=True, slots=True)
class HubBuild:
    """A build variant that was written: its folder, its unique name, and the files in it."""

    folder: Path
    id: str
    files: int
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``attngen package --json`` prints it."""
        return {"folder": str(self.folder), "id": self.id, "files": self.files, "bytes": self.bytes}


@dataclass(frozen=True, slots=True)
class HubKernel:
    """A kernel that was written. ``drivers`` are the oldest by arch; ``note`` says if another compiler would make
    kernels for older drivers."""

    package: str
    folder: Path
    name: str
    version: int
    builds: tuple[HubBuild, ...]
    drivers: Mapping[str, int]
    note: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``attngen package --json`` prints it."""
        builds = [build.to_dict() for build in self.builds]
        return {"folder": str(self.folder), "name": self.name, "version": self.version, "builds": builds}


def hub_kernel(
    spec: str | Path, folder: Path, choices: Choices | None = None, *, jobs: int | None = None,
    observer: Observer | None = None,
) -> HubKernel:  # fmt: skip
    """Write the package of a spec into ``folder``, as a kernel of the Hugging Face Hub.

    Build variants that an earlier call wrote are replaced, each as a whole and only if everything was made; a README.md
    that is there stays. Raises SpecError for a wrong spec, and PackageError if a kernel does not compile, a setting is
    wrong, or the folder holds something else.
    """
    from packaging.version import Version

    from attngen.schema import load_spec
    from attngen.schema.tuned import load_tuned

    choices = choices or Choices()
    loaded = load_spec(spec)
    name = _kernel_name(loaded.package)
    _check_folder(folder, name)
    own = project_files(loaded, choices, generator=False)  # which checks all choices
    version = Version(choices.version)
    contents = contents_of(
        replace(loaded, name=(PurePosixPath(loaded.name).parent / Path(loaded.file).name).as_posix()),
        str(version),
        only=choices.only,
        tuned=[load_tuned(path, name=f"tuned/{path.name}") for path in choices.tuned],
        jobs=jobs,
        observer=observer,
    )
    index = json.loads(contents.files[INDEX])
    licence = {key: own[key] for key in ("LICENSE",) if key in own}
    about = {"name": name, "version": version.release[0], "license": "other" if licence else "apache-2.0"}
    made = {}
    for build, backend in BUILDS.items():
        files = {**_files(contents, backend, about), **licence}
        made[f"build/{build}"] = {**files, METADATA: _metadata(files, backend, index, about)}
    try:
        _write(folder, made)
        if not (folder / "README.md").exists():
            with naming(folder / "README.md"):
                (folder / "README.md").write_text(_card(index, about), "utf-8")
    except OSError as error:
        raise PackageError(f"the kernel: {failed_write(error, folder)}") from error
    builds = tuple(
        HubBuild(folder / build, json.loads(files[METADATA])["id"], len(files), sum(map(len, files.values())))
        for build, files in made.items()
    )
    note = newer_driver_note(row["arch"] for row in index["kernels"] if row["backend"] == "cuda")
    return HubKernel(loaded.package, folder, name, version.release[0], builds, index["drivers"], note)


def _kernel_name(module: str) -> str:
    """Name of a kernel by that of its package. Raises PackageError if kernels cannot have it."""
    name = module.rstrip("_").replace("_", "-")
    if not _NAME.fullmatch(name):
        raise PackageError(
            f"package '{module}': the kernel would be named '{name}'; allowed on the Hub: at least two lowercase "
            f"letters, digits and dashes, the first one a letter, such as 'attngen-{name}'; name the package by "
            f"'package: attngen_{module}' in the spec"
        )
    return name


def _check_folder(folder: Path, name: str) -> None:
    """Raise PackageError if a folder holds something else than this kernel. Hidden files and README.md may be there."""
    remedy = "name a new folder, an empty one, or one that this command wrote for the same package"
    try:
        entries = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        builds = sorted(entry.name for entry in (folder / "build").iterdir()) if "build" in entries else []
    except FileNotFoundError:
        return
    except OSError as error:
        raise PackageError(f"{folder} cannot be read as a folder: {error.strerror or error}; {remedy}") from error
    for build in builds:
        if build not in BUILDS:
            raise PackageError(
                f"{folder} holds build/{build}, which 'kernels' might load instead; allowed there: "
                f"{', '.join(BUILDS)}. Remove it, or {remedy}"
            )
        other = _name_of(folder / "build" / build / METADATA)
        if other != name:
            what = f"the kernel '{other}'" if other else "no kernel"
            raise PackageError(f"{folder}/build/{build} is {what}, not '{name}'; {remedy}")
    strangers = [entry for entry in entries if entry not in ("build", "README.md")]
    if strangers and not builds:
        raise PackageError(f"{folder} holds something else: {strangers[0]}; {remedy}")


def _name_of(metadata: Path) -> str | None:
    """Name of the kernel that a build variant is of, or None where there is no such file."""
    try:
        read = json.loads(metadata.read_bytes())
    except (OSError, ValueError):
        return None
    name = read.get("name") if isinstance(read, dict) else None
    return name if isinstance(name, str) else None


def _files(contents: Contents, backend: str, about: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of a build variant, by their path in it, but for its metadata."""
    module = contents.module
    files = {**contents.files, **{f"_runtime/{name}": data for name, data in runtime_files(DROP_INS).items()}}
    load = f'    {module} = kernels.get_kernel("<owner>/{about["name"]}", version={about["version"]})\n'
    text = files["__init__.py"].decode().replace(f"    import {module}\n", load, 1)
    files["__init__.py"] = (text + _EXPORTS).encode()
    files["__init__.pyi"] += _STUBS.encode()
    return {name: data for name, data in files.items() if backend == "cuda" or not name.endswith(".cubin")}


def _metadata(files: Mapping[str, bytes], backend: str, index: Mapping[str, Any], about: Mapping[str, Any]) -> bytes:
    """The text of ``metadata.json``, which ``kernels`` reads before it imports a build variant."""
    digests = {name: b64encode(sha256(data).digest()).decode() for name, data in sorted(files.items())}
    content = sha256(json.dumps(digests).encode()).hexdigest()[:12]
    metadata = {
        **about,
        "id": f"_{index['package']}_{backend}_{content}",  # the module's name: no two contents have the same
        "python-depends": [],  # of a list that 'kernels' has, beside torch and what torch brings
        "backend": {"type": backend, **({"archs": list(_archs(index["arches"]))} if backend == "cuda" else {})},
        "digest": {"algorithm": "sha256", "files": digests},
    }
    return json.dumps(metadata, indent=2).encode() + b"\n"


def _archs(names: Sequence[str]) -> Iterator[str]:
    """Compute capabilities in the form in which ``kernels`` compares them with that of a device."""
    for name in names:
        arch: Arch = ARCHES[name]
        suffix = "+PTX" if arch.portable else "a" if arch.specific else ""
        yield f"{arch.capability // 10}.{arch.capability % 10}{suffix}"


def _card(index: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    variants = list(dict.fromkeys(row["variant"] for row in index["kernels"]))
    return _CARD.format(
        **about,
        arches=", ".join(index["arches"]),
        attngen=index["attngen"],
        spec=index["spec"],
        variant=variants[0],
        variants=", ".join(f"`{variant}`" for variant in variants),
        drivers=drivers_text(index["drivers"]),
    )


def _write(folder: Path, made: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write folders of files into a folder, in place of those that are there. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryFolder(folder, prefix=".attngen-") as work:
        for place, files in made.items():
            for name, data in files.items():
                path = work / place / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with naming(path):
                    path.write_bytes(data)
        for place in made:
            target = folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                os.replace(target, work / "before")
            os.replace(work / place, target)
            shutil.rmtree(work / "before", ignore_errors=True)
