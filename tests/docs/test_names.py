"""Every file, module, symbol and field that the docs name exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path

from attngen.lang.listed import LISTS
from tests.docs.blocks import DOCUMENTS, ROOT, code_spans, prose, tables
from tests.render.generated import HASHES, needs_generated

FOLDERS = ("attngen", "tests", "templates", "specs", "docs", "generated")
ENDINGS = ("py", "j2", "cuh", "yaml", "json", "md")

#: A generated table of transformers' names, which ``tests/integrations/transformers/test_model_sweep.py`` checks.
PAGE = ROOT / "docs" / "models.md"

#: Names that are none of ours, or that only a reader's own project has.
OTHERS = {
    "sparse_attn_indexer": "vLLM's",
    "CustomOp.register_oot": "vLLM's",
    "specs/my_mask.yaml": "the spec of README",
    "kernels/my_masks.yaml": "a spec of a user's project",
    "S_dmask": "flash-attn's",
    "attngen_P": "a package P",
    "attngen_installed_P": "a package P",
    "my_model": "a user's project",
    "my_module.py": "functions of a user's program",
    "BLOCK_SIZE": "FlexAttention's",
    "causal_upper_left": "torch's",
    "causal_lower_right": "torch's",
    "make_fx": "torch's",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "torch's",
    "DistributedDataParallel": "torch's",
    "FakeTensorMode": "torch's",
    "FlopCounterMode": "torch's",
    "leaky_relu": "torch's",
    "log_ndtr": "torch's",
    "bessel_j0": "torch's",
    "rand_like": "torch's",
    "position_ids": "transformers'",
    "LOCAL_KERNELS": "kernels'",
    "get_local_kernel": "kernels'",
    "flash_hub": "diffusers'",
    "flash_varlen_hub": "diffusers'",
    "attngen.kernels": "a group of entry points",
    "attngen.spec": "what attngen.schema was",
    "u_window": "a scalar of a spec, in a kernel",
    "extent_u_doc_1": "an extent of a tensor of a spec, in a kernel",
    "gradient_u_slope": "the gradient of a tensor of a spec, in a kernel",
    "fwd_sm90a_wgmma_bf16_d128_causal_m128n128s2c2": "an example of a kernel's name",
}

#: Page whose names are FlashInfer's, in the first column of its table.
MIGRATION = ROOT / "docs" / "migration.md"

#: Placeholders for a word of the reader's choice in a path.
_PLACEHOLDER = re.compile(r"<\w+>|\bNAME\b|\*")


@cache
def files() -> frozenset[str]:
    """Return every file and folder of the checkout that docs may name, from its root."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if "__pycache__" not in path.parts)
    return frozenset(path.relative_to(ROOT).as_posix() for path in paths) | set(FOLDERS)


@cache
def words() -> frozenset[str]:
    """Every word of the code: names, fields of specs, texts; and the composed names of lists of keys."""
    folders = ("attngen/", "templates/", "specs/", "docs/examples/")
    sources = [ROOT / path for path in files() if path.startswith(folders)]
    sources.append(ROOT / "pyproject.toml")
    texts = [path.read_text() for path in sources if path.suffix.lstrip(".") in (*ENDINGS, "toml")]
    return frozenset(word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text)) | LISTS.keys()


@cache
def kernel_names() -> str:
    """Return the names of the rendered kernels, committed or not, whose parts docs explain."""
    return " ".join(path for path in files() if path.startswith("generated/")) + HASHES.read_text()


def is_file(name: str) -> bool:
    """Whether a path, or the end of one, is a file or folder; placeholders stand for anything."""
    pattern = _PLACEHOLDER.sub("\0", name.rstrip("/"))
    parts = re.escape(pattern).replace("\0", r"[^/]*")
    return any(re.search(rf"(^|/){parts}$", path) for path in files())


@cache
def theirs() -> frozenset[str]:
    """Names of other libraries: the first columns of the tables of the page on migration."""
    tables_of = (tables(MIGRATION, library, "attngen") for library in ("flash-attn", "FlexAttention", "FlashInfer"))
    cells = [row[0] for rows in tables_of for table in rows for row in table]
    return frozenset(span for cell in cells for span in re.findall(r"`([^`]+)`", cell))


def named(pattern: str) -> list[tuple[str, str]]:
    """Return document and inline code of all that matches the pattern as a whole."""
    spans = [
        (path.relative_to(ROOT).as_posix(), span)
        for path in DOCUMENTS
        if path != PAGE
        for span in dict.fromkeys(code_spans(path))
        if re.fullmatch(pattern, span) and span not in OTHERS and not (path == MIGRATION and span in theirs())
    ]
    assert spans, f"the docs name nothing that looks like {pattern}"
    return spans


@needs_generated
def test_paths_exist() -> None:
    spans = named(rf"(?:{'|'.join(FOLDERS)})/[\w./*<>-]*")
    assert not [f"{document} names {name}, which does not exist" for document, name in spans if not is_file(name)]


def test_files_exist() -> None:
    missing = []
    for document, name in named(rf"[\w./-]+\.(?:{'|'.join(ENDINGS)})"):
        written = Path(name).suffix == ".json" and f'"{name}"' in written_files()  # by the cache and by packages
        if not (written or is_file(name) or (ROOT / name).exists()):
            missing.append(f"{document} names {name}, and there is no such file")
    assert not missing


@cache
def written_files() -> str:
    return " ".join((ROOT / path).read_text() for path in files() if re.fullmatch(r"attngen/.*\.py", path))


@needs_generated
def test_symbols_exist() -> None:
    missing = []
    parts = re.sub(r"[./]", "_", kernel_names())
    for document, name in named(r"_[a-z]\w*|[A-Za-z]\w*_\w+|[A-Z][a-z]\w*[A-Z]\w*|[A-Z]\w*(?:\.[a-z_]\w*)+"):
        if name.startswith("_") and name not in words() and f"{name}_" in parts:
            continue  # a part of names of kernels
        if not words().issuperset(re.findall(r"[A-Za-z_]\w*", name)):
            missing.append(f"{document} names {name}, which the code does not have")
    assert not missing


def symbols_in_files() -> Iterator[tuple[str, str, str]]:
    """Symbols that a document places in a file: `symbol` in `file`, or `file` (`symbol`)."""
    ending = rf"[\w/]+\.(?:{'|'.join(ENDINGS)})"
    for path in DOCUMENTS:
        text = prose(path)
        symbol, file = r"`(?P<symbol>\w+)`", rf"`(?P<file>{ending})`"
        for pattern in (rf"{symbol}\s+in\s+{file}", rf"{file}\s+\({symbol}"):
            for match in re.finditer(pattern, text):
                yield path.relative_to(ROOT).as_posix(), match["symbol"], match["file"]


def test_symbols_stand_in_their_files() -> None:
    symbols = list(symbols_in_files())
    assert symbols
    for document, symbol, file in symbols:
        places = [path for path in files() if path == file or path.endswith(f"/{file}")]
        texts = [(ROOT / path).read_text() for path in places]
        assert any(re.search(rf"\b{symbol}\b", text) for text in texts), f"{document}: {file} has no {symbol}"


def test_modules_and_their_symbols_exist() -> None:
    for document, name in named(r"attngen(?:\.\w+)+"):
        owner, rest = import_module("attngen"), name.split(".")[1:]
        for place, part in enumerate(rest):
            if not hasattr(owner, part):
                with suppress(ModuleNotFoundError):
                    import_module(".".join(["attngen", *rest[: place + 1]]))
            assert hasattr(owner, part), f"{document} names {name}; {owner} has no {part}"
            owner = getattr(owner, part)


def test_no_exception_is_left_over() -> None:
    spans = {span for path in DOCUMENTS for span in code_spans(path)}
    assert not OTHERS.keys() - spans, "no document names them any more"
