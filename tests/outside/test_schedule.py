"""A schedule that attngen does not know: it is planned, rendered, compiled and called, and changes nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attngen
from attngen.compile import compile_source
from attngen.errors import PlanError
from attngen.plan import Plan, plan
from attngen.plan.schedules import schedules, with_schedule
from attngen.render import render
from attngen.runtime.arguments import torch_state
from attngen.runtime.device import driver as drivers
from attngen.runtime.kernels.module import Kernel
from attngen.runtime.registry.lookup import package_of_kernels, registry
from attngen.schema import expand, load_spec_text
from attngen.store.key import key_of
from attngen.tools.explain.of_spec import explain_spec
from tests.outside.split_keys import SCHEDULE
from tests.runtime.support import FakeDriver, decode, launch_of

SPEC = """
schema: 1
package: outside
arch: [sm90a]
kernels:
  - {variant: full, dtype: [bf16, fp16], head_dim: [64, {qk: 40, v: 72}]}
  - {variant: causal, dtype: [bf16, fp16], head_dim: [64, {qk: 40, v: 72}]}
"""


def plans() -> list[Plan]:
    return [plan(kernel) for kernel in expand(load_spec_text(SPEC))]


@pytest.fixture
def known() -> Iterator[None]:
    with with_schedule(SCHEDULE, before="hopper_forward"):
        yield


@pytest.mark.usefixtures("known")
def test_the_outside_schedule_is_asked_first_and_takes_what_it_can() -> None:
    assert [(kernel.schedule, kernel.variant.name) for kernel in plans()] == [
        *[("split_keys", "full")] * 4, *[("hopper_forward", "causal")] * 4,
    ]  # fmt: skip


@pytest.mark.usefixtures("known")
def test_its_reason_is_in_the_error_where_no_schedule_takes_a_kernel() -> None:
    text = SPEC.replace("variant: causal", "variant: causal, backend: cuda, loads: pointer, softmax: first_max")
    with pytest.raises(PlanError, match=r"no mask, no score.*; cuda kernels load through tensor descriptors"):
        [plan(kernel) for kernel in expand(load_spec_text(text))]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("known")
def test_the_outside_schedule_renders_and_compiles_with_its_launches_and_workspaces() -> None:
    for kernel in (one for one in plans() if one.schedule == "split_keys"):
        artifact = compile_source(kernel, render(kernel))
        manifest = artifact.manifest
        assert [row["name"] for row in manifest["launches"]] == ["forward", "combine"]
        assert [row["name"] for row in manifest["workspaces"]] == ["out_partial", "lse_partial"]
        assert not artifact.others
        assert manifest["resources"]["registers"] > 0


@pytest.mark.exhaustive
def test_nothing_else_changes() -> None:
    before = [(kernel, render(kernel)) for kernel in plans()]
    with with_schedule(SCHEDULE):  # after all
        assert [(kernel, render(kernel)) for kernel in plans()] == before
        assert SCHEDULE in schedules("forward")
    assert [key_of(kernel, source) for kernel, source in before] == [
        key_of(kernel, render(kernel)) for kernel in plans()
    ]
    assert SCHEDULE not in schedules("forward")


class Recorder(FakeDriver):
    """Notes what is launched, with the values of its parameters."""

    def launch_one(self, kernel: object, device: int) -> None:
        (symbol, manifest, rows), grid, threads, *_, parameters = kernel  # type: ignore[misc]
        values = decode(rows, parameters)
        self.launches.append((launch_of(manifest, symbol)["name"], grid, threads, values))  # type: ignore[arg-type]

    def load(self, image: bytes, symbol: str, device: int, shared: int, sizes: object, cluster: int = 1) -> object:
        manifest = json.loads(image)
        return symbol, manifest, launch_of(manifest, symbol)["parameters"]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    driver = Recorder()
    monkeypatch.setattr(torch_state, "on_gpu", lambda tensor: isinstance(tensor, torch.Tensor))
    registry.clear()
    with drivers.use(driver):
        yield driver
    registry.clear()


@pytest.mark.usefixtures("known")
def test_a_call_makes_both_launches_on_one_workspace(recorder: Recorder) -> None:
    kernel = plans()[0]
    manifest = kernel.to_dict() | {"resources": {"shared_memory": 0}}
    image = json.dumps(manifest).encode()
    registry.add(package_of_kernels([Kernel(manifest, lambda: image, origin="outside")], "outside"))
    q, k, v = (torch.randn(2, seqlen, heads, 64).bfloat16() for seqlen, heads in ((5, 4), (100, 2), (100, 2)))
    attngen.attention(q, k, v, variant="full", package="outside", return_lse=True)
    (partial, grid, threads, first), (combine, rows, _, second) = recorder.launches  # type: ignore[misc]
    splits, row_tiles = 3, 2
    assert (partial, grid, threads) == ("forward", splits * row_tiles * 4 * 2, 128)
    assert (combine, rows) == ("combine", row_tiles * 4 * 2)
    assert first["num_splits"] == second["num_splits"] == splits
    for name in ("out_partial_ptr", "lse_partial_ptr"):
        assert first[name] == second[name] != 0
    assert second["lse_partial_ptr"] - second["out_partial_ptr"] == 4 * splits * 2 * 4 * 5 * 64


@pytest.mark.usefixtures("known")
def test_the_outside_schedule_is_explained_beside_the_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "outside.yaml"
    path.write_text(SPEC)
    for explanation in explain_spec(path, seqlens=[128]):
        labels = [label for label, _ in explanation.facts()]
        own = explanation.plan.schedule == "hopper_forward"
        assert ("rings" in labels) == ("roles" in labels) == own
        assert ("pipes" in explanation.to_dict()) == own
