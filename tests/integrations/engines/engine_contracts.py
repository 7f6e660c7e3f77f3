"""The contract tests of serving engines: ``python -m tests.integrations.engines.engine_contracts [vllm==0.33.0 …]``.

Downloads the wheels of the named releases, unpacks their Python parts (no binaries), installs the pure Python packages
that they import, and runs ``contract_<engine>.py`` and ``contract_<engine>_engine.py`` in each, on the CPU, and on a
Hopper GPU ``contract_<engine>_gpu.py``. Without names: all releases that the plugins name. ``--folder`` keeps what was
downloaded, for the next run. Nothing is installed in this environment.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import torch

from attngen.integrations.diffusers import backend as diffusers
from attngen.integrations.sglang import plugin as sglang
from attngen.integrations.vllm import plugin as vllm

ROOT = Path(__file__).parents[3]

#: Releases by engine.
RELEASES = {"vllm": vllm.RELEASES, "sglang": sglang.RELEASES, "diffusers": diffusers.RELEASES}

#: Packages whose name is not that of their module.
PACKAGES = {
    "cpuinfo": "py-cpuinfo", "zmq": "pyzmq", "PIL": "pillow", "tvm_ffi": "apache-tvm-ffi",
    "cv2": "opencv-python-headless", "google": "protobuf googleapis-common-protos", "dotenv": "python-dotenv",
    "pythonjsonlogger": "python-json-logger", "jwt": "pyjwt", "sklearn": "scikit-learn", "IPython": "ipython",
    "opentelemetry": "opentelemetry-api opentelemetry-sdk opentelemetry-semantic-conventions "
    "opentelemetry-exporter-otlp", "multipart": "python-multipart",
}  # fmt: skip

#: Modules that engines are known to import.
KNOWN = (
    "aiohappyeyeballs", "aiohttp", "aiosignal", "apache-tvm-ffi", "blake3", "cachetools", "cbor2", "certifi",
    "charset-normalizer", "cloudpickle", "compressed-tensors", "depyf", "dill", "diskcache", "distro", "einops",
    "fastapi", "frozenlist", "gguf", "ipython", "jiter", "lark", "llguidance", "loguru", "mistral-common", "ml_dtypes",
    "msgpack", "msgspec", "multidict", "openai", "openai-harmony", "opentelemetry-api", "opentelemetry-exporter-otlp",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions", "orjson", "partial-json-parser", "pillow",
    "prometheus-client", "propcache", "py-cpuinfo", "pybase64", "pydantic-settings", "python-dotenv",
    "python-json-logger", "pyzmq", "requests", "sentencepiece", "setproctitle", "sniffio", "starlette", "tiktoken",
    "torchao", "traitlets", "urllib3", "uvloop", "watchfiles", "xgrammar", "yarl",
)  # fmt: skip

#: Modules of binaries that the tests only import.
EMPTY = ("torchvision", "sgl_kernel")

_MOST_PACKAGES = 40


def unpacked(requirement: str, folder: Path) -> Path:
    """The folder with the Python part of a release, downloaded if it is not there."""
    engine, _, version = requirement.partition("==")
    place = folder / f"{engine}-{version}"
    if (place / engine).is_dir():
        return place
    wheels = folder / "wheels"
    pip("download", "--no-deps", "--only-binary", ":all:", "-d", str(wheels), requirement)
    wheel = next(wheels.glob(f"{engine}-{version}-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place, [name for name in archive.namelist() if not name.endswith(".so")])
    wheel.unlink()
    return place


def empty_modules(folder: Path) -> Path:
    """A folder with modules in which every name is a mock."""
    place = folder / "empty"
    place.mkdir(exist_ok=True)
    for name in EMPTY:
        (place / f"{name}.py").write_text(_EMPTY)
    return place


_EMPTY = '''
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

__version__, __path__ = "0", []


class _Parts:
    """Any module below this one, in which every name is a mock."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(__name__ + ".") else None

    def create_module(self, spec):
        class Part(ModuleType):
            def __getattr__(self, attribute):
                if attribute.startswith("__"):
                    raise AttributeError(attribute)
                return MagicMock(name=attribute)

        return Part(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Parts())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
'''


def pip(*arguments: str) -> None:
    """Run pip of this environment."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def run(requirement: str, folder: Path, options: list[str]) -> int:
    """Run the contract tests of a release; the exit status of pytest."""
    engine = requirement.partition("==")[0]
    place, packages = unpacked(requirement, folder), folder / "packages"
    if not packages.is_dir():
        pip("install", "--no-deps", "--target", str(packages), *KNOWN)
    path = os.pathsep.join([str(place), str(packages), str(ROOT), str(empty_modules(folder))])
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    tests = ROOT / "tests" / "integrations" / engine
    kinds = ("", "_sparse", "_blocks", "_engine", *(("_gpu",) if _on_hopper() else ()))
    files = [tests / f"contract_{engine}{kind}.py" for kind in kinds]
    return max(run_file(file, folder, environment, options) for file in files if file.exists())


def _on_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def run_file(file: Path, folder: Path, environment: dict[str, str], options: list[str]) -> int:
    """Run the tests of a file, installing what it fails to import; the exit status of pytest."""
    packages = folder / "packages"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n0",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        str(file),
        *options,
    ]
    for _ in range(_MOST_PACKAGES):
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        missing = re.findall(r"No module named '([^'.]+)", result.stdout + result.stderr)
        missing = [name for name in missing if name not in RELEASES]
        if result.returncode in (0, 1) or not missing:
            print(result.stdout[-6000:], result.stderr[-2000:], flush=True)
            return result.returncode
        pip("install", "--no-deps", "--target", str(packages), *PACKAGES.get(missing[-1], missing[-1]).split())
    return 1


def main() -> int:
    """Run what the command line names; 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help="such as vllm==0.33.0; default: all that are served")
    parser.add_argument("--folder", type=Path, default=Path.home() / ".cache" / "attngen-engines")
    given, options = parser.parse_known_args()
    every = [f"{engine}=={version}" for engine, versions in RELEASES.items() for version in versions]
    given.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for release in given.releases or every:
        print(f"== {release}", flush=True)
        failed |= run(release, given.folder, options) != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
