"""Assumptions of explain: any legal mask is counted, in bounded memory; values are as declared; files are checked."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attngen import cli
from attngen.inspect import visits as visits_module
from attngen.inspect.assumed import Assumed, assume
from attngen.inspect.efficiency import efficiency, scalars_of
from attngen.inspect.visits import visits
from attngen.lang.variant import Monotone, Tensor
from attngen.plan import Plan, plan
from attngen.schema import expand, load_spec_text
from tests.fuzz.variants import banded, typed
from tests.sampling import few, sampled

#: Bytes that tensors may take at once, at any length: blocks, and a few copies of them.
LIMIT = 3 * 2**28

#: Masks that crashed explain or were killed: a bit for each key, extents that no length has, indices that go beyond
#: their tensor, an extent that no scalar declares, tensors of all pairs.
HARD = {
    "tree": ("(words[b, q, kv // 32] >> (kv % 32)) & 1 == 1", {"words": ("int32", ["b", "seqlen_q", "n_words"])}),
    "fixed": ("t[q, kv]", {"t": ("bool", [16, 16])}),
    "beyond": ("doc[q_global + 5] == doc[kv_global]", {"doc": ("int32", ["total_q"])}),
    "pairs": ("t[b, h, q, kv]", {"t": ("bool", ["b", "h", "seqlen_q", "seqlen_k"])}),
    "eight": ("t[b, h, q, kv, q, kv, q, kv] > 0.5", {"t": ("float32", ["b", "h"] + ["seqlen_q", "seqlen_k"] * 3)}),
    "unbounded": ("t[x[q], kv]", {"t": ("bool", ["n", "seqlen_k"]), "x": ("int64", ["seqlen_q"])}),
}


class Meter(TorchDispatchMode):
    """Adds up the bytes of the tensors that are alive, and keeps the most."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, list[int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive.setdefault(storage.data_ptr(), [0, storage.nbytes()])[0] += 1
                weakref.finalize(tensor, self.release, storage.data_ptr())
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out

    def release(self, place: int) -> None:
        if place in self.alive:
            self.alive[place][0] -= 1
            if not self.alive[place][0]:
                del self.alive[place]


@contextmanager
def bounded_memory() -> Iterator[None]:
    with Meter() as meter:
        yield
    assert meter.most < LIMIT


def planned(variant: dict[str, Any], **fields: Any) -> Plan:
    kernel = {"variant": "m", "head_dim": 64, "allow": ["spill", "serialized_wgmma"], **fields}
    spec = {"schema": 1, "package": "p", "arch": ["sm90a"], "variants": {"m": variant}, "kernels": [kernel]}
    (only,) = expand(load_spec_text(yaml.safe_dump(spec)))
    return plan(only)


def hard(name: str) -> dict[str, Any]:
    mask, tensors = HARD[name]
    return {"mask": mask, "tensors": {n: {"dtype": dtype, "shape": shape} for n, (dtype, shape) in tensors.items()}}


@pytest.fixture
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at few tiles: what is tested is that none fails, and what a block of pairs takes."""
    monkeypatch.setattr(visits_module, "_WORK", 2**21)


@pytest.mark.usefixtures("little_work")
@sampled(always=3, backend=["cuda", "triton"], name=[*HARD])
def test_hard_masks_are_counted(name: str, backend: str) -> None:
    kernel_plan = planned(hard(name), backend=backend)
    with bounded_memory():
        for counted in efficiency(kernel_plan, [100, 16384], scalars_of(kernel_plan.variant, {})):
            assert 0 <= counted.efficiency <= 1 or counted.outside
            assert counted.complete == (counted.seqlen == 100) or (counted.heads > 1 and not counted.complete)


@pytest.mark.usefixtures("little_work")
@few("seed", range(12), always=(8,))
def test_random_masks_are_counted(seed: int) -> None:
    chance = random.Random(seed)
    kernel_plan = planned((banded if seed % 2 else typed)(chance), backend="triton")
    with bounded_memory():
        for counted in efficiency(kernel_plan, [33, 700, 16384], scalars_of(kernel_plan.variant, {}), seed=seed):
            assert counted.full >= 0
            assert 0 <= counted.visible_pairs <= counted.heads * counted.seqlen**2


def test_some_heads_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of heads whose windows grow, as many as the work allows, spread evenly."""
    mask = {"mask": "q_pos >= kv and q_pos - kv < 8 * (h + 1)"}
    kernel_plan = planned(mask, tile={"m": 64, "n": 64}, backend="triton")
    (whole,) = efficiency(kernel_plan, [1024], {})
    monkeypatch.setattr(visits_module, "_WORK", 2**22)
    (some,) = efficiency(kernel_plan, [1024], {})
    assert (whole.heads, some.heads) == (16, 16)
    assert whole.sampled == (16 * 16, 16 * 16)
    assert some.sampled[0] < 16
    assert some.sampled[1] == 16 * 16
    assert some.visible_pairs == pytest.approx(whole.visible_pairs, rel=0.25)


@few("name", ["causal", "sliding_window", "chunked"])
def test_some_tiles_stand_for_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel, *_) = expand(
        load_spec_text(f"schema: 1\narch: [sm90a]\nkernels: [{{variant: {name}, head_dim: 64}}]\n", "one.yaml")
    )
    kernel_plan = plan(kernel)
    (whole,) = efficiency(kernel_plan, [4096], scalars_of(kernel_plan.variant, {}))
    monkeypatch.setattr(visits_module, "_WORK", 2**25)
    (some,) = efficiency(kernel_plan, [4096], scalars_of(kernel_plan.variant, {}))
    assert whole.complete
    assert not some.complete
    assert some.visible_pairs == pytest.approx(whole.visible_pairs, rel=0.25)
    assert some.efficiency == pytest.approx(whole.efficiency, rel=0.25)


DECLARED = [
    Tensor("x", "int32", ("n",), range=(3, 17)),
    Tensor("x", "int8", ("n",), range=(-5, None)),
    Tensor("x", "int64", ("n",), range=(-(2**63), 2**63 - 1)),
    Tensor("x", "fp32", ("n",), range=(-2.5, 0.5)),
    Tensor("x", "int32", ("n",), Monotone(0), range=(1, 9)),
    Tensor("x", "int32", ("n",), Monotone(0)),
    Tensor("x", "fp32", ("n",), Monotone(0), range=(0.0, 2.0)),
]


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_assumed_values_keep_what_is_declared(declared: Tensor) -> None:
    least, most = declared.range or (0, None)
    limits = (least, 1000 if most is None else most)
    values = Assumed(declared, (1000,), limits, 3)[(torch.arange(1000),)]  # type: ignore[arg-type]
    assert len(values) == 1000
    assert bool((values >= limits[0]).all() and (values <= limits[1]).all())
    assert len(values.unique()) > 1
    if declared.monotone is not None:
        assert bool((values.diff() >= 0).all())
    again = Assumed(declared, (1000,), limits, 3)[(torch.tensor([7, 7]),)]  # type: ignore[arg-type]
    assert again[0] == again[1] == values[7]


def test_an_assumed_tensor_is_read_as_a_real_one() -> None:
    """The same mask over the values written out gives the same counts."""
    for name in ("tree", "pairs"):
        kernel_plan = planned(hard(name), tile={"m": 64, "n": 64}, backend="triton")
        arguments = assume(kernel_plan.variant, 300, {}, {}, 5)
        ((key, lazy),) = arguments.items()
        grids = torch.meshgrid(*(torch.arange(n) for n in lazy.shape), indexing="ij")
        assert visits(kernel_plan, 300, arguments) == visits(kernel_plan, 300, {key: lazy[grids]})


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    variant = {
        "mask": "doc[kv] == doc[q] and kv <= q + reach",
        "scalars": {"reach": {"type": "int32", "min": 0}},
        "tensors": {
            "doc": {"dtype": "int32", "shape": ["seqlen_k"], "monotone": {"axis": 0}, "range": {"min": 0, "max": 99}}
        },
    }
    kernels = [{"variant": "m", "head_dim": 64}]
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "arch": ["sm90a"], "variants": {"m": variant}, "kernels": kernels}))
    return path


def explain(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli.group, ["explain", *map(str, arguments)])
    return result.exit_code, result.output


def test_it_says_what_it_assumed(spec: Path) -> None:
    code, output = explain(spec, "--seqlen", 512, "--seed", 4)
    assert code == 0
    assert "assumed reach=256, on which the shares depend" in output
    assert "doc: int32 [512], never decreasing along axis 0: 6 steps at random places, 0 to 99" in output
    assert "(seed 4); --tensor NAME=FILE gives real ones" in output


def test_a_tensor_of_the_users_own(spec: Path, tmp_path: Path) -> None:
    torch.save(torch.arange(256, dtype=torch.int32) // 128, tmp_path / "doc.pt")
    code, output = explain(spec, "--tensor", f"doc={tmp_path / 'doc.pt'}", "--set", "reach=0")
    assert code == 0
    assert "doc: int32 [256], as given" in output
    assert "assumed" not in output
    assert "depend" not in output
    assert "seqlen    256" in output


def test_a_tensor_from_numpy(spec: Path, tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "doc.npy", numpy.zeros(64, dtype="int32"))
    code, output = explain(spec, "--tensor", f"doc={tmp_path / 'doc.npy'}")
    assert code == 0
    assert "int32 [64], as given" in output


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(4, 4, dtype=torch.int32), "has shape [4, 4]; allowed: [seqlen_k]"),
        (torch.zeros(8), "has dtype torch.float32; allowed: torch.int32"),
        (torch.tensor([1, 0], dtype=torch.int32), "decreases along axis 0"),
        (torch.tensor([1, 100], dtype=torch.int32), "holds 100, above the declared maximum 99"),
        (torch.tensor([-1, 0], dtype=torch.int32), "holds -1, below the declared minimum 0"),
        (torch.zeros(7, dtype=torch.int32), "made for a sequence of 7 tokens, not for 512"),
        ([1, 2], "holds no single dense tensor"),
    ],
)
def test_tensors_that_do_not_fit(spec: Path, tmp_path: Path, value: Any, message: str) -> None:
    torch.save(value, tmp_path / "doc.pt")
    code, output = explain(spec, "--seqlen", 512, "--tensor", f"doc={tmp_path / 'doc.pt'}")
    assert code == cli.EXIT_USAGE
    assert message in output


@pytest.mark.parametrize(
    ("name", "content"), [("doc.pt", b"no"), ("doc.pt", b"junk"), ("doc.npy", b"no"), ("doc.txt", b""), ("x.pt", None)]
)
def test_files_that_are_none(spec: Path, tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, output = explain(spec, "--tensor", f"doc={tmp_path / name}")
    assert code == cli.EXIT_USAGE
    assert "allowed: a .pt file with one tensor" in output


def test_names_that_are_none(spec: Path) -> None:
    assert explain(spec, "--tensor", "doc")[0] == cli.EXIT_USAGE
    code, output = explain(spec, "--tensor", "dok=x.pt")
    assert code == cli.EXIT_USAGE
    assert "did you mean 'doc'?" in output
