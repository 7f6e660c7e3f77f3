"""Pipes of the Hopper kernels: what is declared fits memory, kernels and docs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from attngen.families.decode.pipes import decode_pipes
from attngen.families.latent.indexed_pipes import indexed_pipes
from attngen.families.latent.pipes import mla_pipes
from attngen.families.latent_backward.pipes import dkv_pipes, dq_pipes
from attngen.families.wide.pipes import wide_pipes
from attngen.plan import Plan
from attngen.plan.catalogue import named
from attngen.plan.pipes import Pipes, Ring
from attngen.render import render
from attngen.resources import root, templates_dir
from tests.plan import declared
from tests.plan.specs import planned
from tests.sampling import some

BACKWARD = {"passes": "backward", "backward": "{backend: cuda}"}
CHOICES: list[dict[str, object]] = [
    {"backend": "cuda"},
    {"backend": "cuda", "head_dim": 256},
    {"backend": "cuda", "variant": "sliding_window", "tile": "{m: 192, n: 64}"},
    {"backend": "cuda", "variant": "allowed", "head_dim": 128},
    {"backend": "cuda", "persistent": "false", "warps": "{schedule: cooperative}", "epilogue": "direct"},
    {"backend": "cuda", "pack_gqa": "true"},
    {"backend": "cuda", "split_kv": "true"},
    {"backend": "cuda", "split_kv": "true", "head_dim": 256, "layout": "paged"},
    {"backend": "cuda", "v": "key", "head_dim": "{qk: 576, v: 512}", "layout": "paged"},
    {"backend": "cuda", "v": "key", "head_dim": 512},
    {**BACKWARD},
    {**BACKWARD, "head_dim": 128},
    {**BACKWARD, "head_dim": 128, "deterministic": "true"},
    {**BACKWARD, "head_dim": 256},
    {**BACKWARD, "head_dim": 192, "deterministic": "true"},
]


def pipes_of(plan: Plan) -> Pipes:
    declare = named(plan.schedule).pipes
    assert declare is not None
    return declare(plan)


@pytest.fixture(
    params=some(CHOICES, CHOICES[::3]), ids=lambda choice: "-".join(str(value) for value in choice.values())
)
def kernel(request: pytest.FixtureRequest) -> Plan:
    return planned(**request.param)


def test_shared_memory_is_what_is_declared(kernel: Plan) -> None:
    pipes, roles = pipes_of(kernel), kernel.structure
    assert pipes.regions == roles.shared
    offset = 0
    for region in pipes.regions:
        assert region.offset == offset
        offset += region.bytes
    sizes = {region.name: region.bytes for region in pipes.regions}
    for barrier in pipes.barriers:
        assert sizes.pop(barrier.name) == 8 * barrier.count
        assert next(r.offset for r in pipes.regions if r.name == barrier.name) % 8 == 0
    for ring in pipes.rings:
        for name, size in ring.stored:
            assert sizes.pop(name) == ring.stages * size
    assert sizes == dict(pipes.others)


def test_the_kernel_begins_and_names_what_is_declared(kernel: Plan) -> None:
    pipes, text = pipes_of(kernel), render(kernel).text
    begun = re.findall(
        r"init_barriers\((?:here \+ )?k(\w+), (\d+), (\d+)(?:, own, 32 \* kLoaders|, lane, 32)?\);", text
    )
    assert begun == [
        ("".join(part.capitalize() for part in one.name.split("_")), str(one.count), str(one.signal.arrivals))
        for one in pipes.barriers
    ]
    rings = dict(re.findall(r"using (\w+)Ring = (.+?);", text))
    assert len(rings) == len(pipes.rings)
    for ring in pipes.rings:
        own = rings["".join(part.capitalize() for part in ring.name.split("_"))]
        assert own.endswith(f", {ring.stages}>") or (ring.alternates and own.startswith("Pair<"))
        assert own.count("kNoBarrier") == (ring.full is None) + (ring.empty is None)
    enum = re.search(r"enum class Named \{(.*?)\};", text, re.DOTALL)
    numbers = re.findall(r"k(\w+) = (\d+),", enum[1]) if enum else []
    assert numbers == [(one.name.capitalize(), str(one.first)) for one in pipes.named]
    for role in pipes.roles:
        if role.warps == 1:
            name = "".join(part.capitalize() for part in role.name.split("_"))
            assert f"k{name} = {role.first}" in text
    warps = sorted(warp for role in pipes.roles for warp in range(role.first, role.first + role.warps))
    assert len(set(warps)) == len(warps)
    assert warps[-1] < kernel.num_warps


def test_structs_in_shared_memory_are_as_large_as_planned(kernel: Plan) -> None:
    text = render(kernel).text
    for name in ("Work", "Step", "Sum", "Code"):
        if f"shared_at<{name}>" in text:
            assert re.search(rf"static_assert\(.*sizeof\({name}\) [<=]= \d+\);", text), name


def test_templates_have_no_barrier_but_through_rings() -> None:
    """A stage is advanced, and an address of a barrier made of it, in ring.cuh alone."""
    paths = list((templates_dir() / "cuda").rglob("*.j2"))
    assert paths
    for path in paths:
        text = path.read_text("utf-8")
        assert not re.search(r"k\w*(Full|Empty)\b(?!>)", text), path
        assert not re.search(r"named_(sync|arrive)\((?!Named::)", text), path
        assert not re.search(r"\+\+\w+ == k\w*Stages", text), path


# --- the docs -------------------------------------------------------------------------------------------------


def table(pipes: Pipes) -> str:
    lines = ["| pipe | guards | full: arrivals | empty: arrivals |", "|---|---|---|---|"]
    for pipe in pipes.pipes:
        sides = (pipe.full, pipe.empty) if isinstance(pipe, Ring) else (pipe.signal, None)
        guards = pipe.guards if isinstance(pipe, Ring) else pipe.signal.says
        cells = [f"`{pipe.name}`", guards, *(signal.sources if signal else "–" for signal in sides)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "declare",
    [
        pytest.param(partial(declared.forward, 2, 1, 2, 4, pingpong=True, skips=False), id="forward"),
        pytest.param(partial(declared.backward, 3, 2, 4, "pingpong", bias_stages=1), id="backward"),
        pytest.param(partial(declared.cluster, 3, 3, 4, ordered=True), id="cluster"),
        pytest.param(partial(decode_pipes, warps=8, stages=24, stage=8192, merge=34816, q=0), id="decode"),
        pytest.param(partial(mla_pipes, qk=576, v=512, element=2, registers=(56, 224)), id="mla"),
        pytest.param(
            partial(wide_pipes, width_qk=512, element=2, register_boxes=3, registers=(160, 144, 48)), id="wide"
        ),
        pytest.param(partial(indexed_pipes, qk=576, v=512, element=2, registers=(56, 224)), id="indexed"),
        pytest.param(partial(dq_pipes, qk=576, v=512, element=2), id="mla-dq"),
        pytest.param(partial(dkv_pipes, element=2), id="mla-dkv"),
    ],
)
def test_the_docs_have_the_table_that_is_declared(declare: partial[Pipes]) -> None:
    pages = [page.read_text("utf-8") for page in (root() / "docs/schedules").glob("*.md")]
    assert any(table(declare()) in page for page in pages), f"docs/schedules lacks\n{table(declare())}"


def test_barriers_of_one_number_are_refused() -> None:
    pipes = declared.backward(3, 2, 4, "pingpong")
    twice = replace(pipes.named[-1], first=pipes.named[0].first)
    with pytest.raises(ValueError, match="declared twice"):
        replace(pipes, named=(*pipes.named[:-1], twice))
    with pytest.raises(ValueError, match="declared twice"):
        replace(pipes, pipes=(*pipes.pipes, pipes.pipes[0]))
    with pytest.raises(ValueError, match="no place in shared memory"):
        replace(pipes, order=pipes.order[1:])


def test_roles_ask_for_no_more_registers_than_a_launch_reserves() -> None:
    indexed_pipes(qk=576, v=512, element=2, registers=(88, 208))
    with pytest.raises(ValueError, match=r"65536 registers; a launch reserves 384 x 168"):
        indexed_pipes(qk=576, v=512, element=2, registers=(96, 208))


def test_registers_are_those_of_whole_warpgroups() -> None:
    pipes = declared.backward(3, 2, 4, "pingpong")
    *others, last = pipes.roles
    with pytest.raises(ValueError, match=r"same registers, not \[24, 32\]"):
        replace(pipes, roles=(*others, replace(last, registers=32)))
