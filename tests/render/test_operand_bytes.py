"""CUDA kernels take bytes of elements, K of products and columns of copies from their operands.

Their texts are rendered with operands of two bytes and of one, and what these say of bytes is compared with the plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from attngen.dtypes import DTYPES
from attngen.families.hopper_forward.structure import HopperForward
from attngen.parts.regions import SWIZZLES
from attngen.plan import Plan
from attngen.plan.catalogue import schedules
from attngen.plan.layouts import LAYOUTS
from attngen.plan.operands import fragment_registers
from attngen.render import render
from attngen.resources import root
from tests.plan.one_byte import use_one_byte
from tests.plan.specs import planned
from tests.render.operand_bytes import asserted, constants, copies, evaluate, offset, places, product_loops
from tests.sampling import some

FORWARD, BACKWARD = {"backend": "cuda"}, {"passes": "backward", "backward": "{backend: cuda}"}
KERNELS = {
    "forward": {**FORWARD, "head_dim": 128},
    "forward of 64 bytes a copy": {**FORWARD, "head_dim": 96},
    "skips": {**FORWARD, "variant": "sliding_window", "head_dim": 64},
    "varlen": {**FORWARD, "head_dim": 128, "layout": "varlen"},
    "packed heads": {**FORWARD, "head_dim": 128, "pack_gqa": "true"},
    "direct": {**FORWARD, "head_dim": 64, "epilogue": "direct"},
    "two head dims": {**FORWARD, "head_dim": "{qk: 192, v: 128}"},
    "fp8": {**FORWARD, "head_dim": 128, "dtype": "fp8_e4m3"},
    "fp8 of several boxes": {**FORWARD, "head_dim": 256, "dtype": "fp8_e4m3", "layout": "varlen"},
    "pingpong": {**BACKWARD, "head_dim": 64},
    "gradients": {**BACKWARD, "head_dim": 128},
    "scored": {**BACKWARD, "variant": "alibi", "head_dim": 128},
    "nothing": {**BACKWARD, "variant": "causal_dropout", "head_dim": 128},
    "varlen backward": {**BACKWARD, "head_dim": 128, "layout": "varlen"},
    "cluster": {**BACKWARD, "head_dim": 192},
    "cluster of parts": {**BACKWARD, "head_dim": 256},
    "cluster of halves": {**BACKWARD, "head_dim": 512},
}
DROPOUT = 'variants:\n  causal_dropout: {mask: "kv <= q_pos", dropout: true}\n'


#: Cases by kernel and bytes: all tests look at the same ones.
RENDERED: dict[tuple[str, int], tuple[Plan, str, dict[str, int]]] = {}


#: Kernels that always run; together they have all kinds of operands.
ALWAYS = ("forward", "fp8", "two head dims", "packed heads", "gradients", "cluster of halves")


@pytest.fixture(params=some(KERNELS, ALWAYS))
def kernel(request: pytest.FixtureRequest) -> dict[str, object]:
    fields = KERNELS[request.param]
    return {**fields, "declared": DROPOUT} if fields.get("variant") == "causal_dropout" else dict(fields)


@pytest.fixture(params=[2, 1], ids=["two bytes", "one byte"])
def case(request: pytest.FixtureRequest, kernel: dict[str, object]) -> Iterator[tuple[Plan, str, dict[str, int]]]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == 1:
            use_one_byte(patch)
        known = str(kernel), request.param
        if known not in RENDERED:
            plan = planned(**kernel)  # type: ignore[arg-type]
            assert plan.operands.q.bytes == (1 if "dtype" in kernel else request.param)
            text = render(plan).text
            RENDERED[known] = plan, text, constants(text, {row.cuda: row.bytes for row in DTYPES.values()})
        yield RENDERED[known]


def boxes(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Return rows, columns and bytes of an element of the box of each tensor map."""
    maps = [a for launch in plan.launches for a in launch.arguments if a.kind == "descriptor"]
    rows = {a.of: (a.box[-3], a.box[-1], plan.operands.of(a.of).bytes) for a in maps if a.of and a.box}
    for name in ("out", "q") if plan.pack_gqa else ():
        assert rows[name][0] in (64, plan.tile_m)
    return rows


def test_constants_are_those_of_the_operands(case: tuple[Plan, str, dict[str, int]]) -> None:
    plan, _, numbers = case
    operands, structure = plan.operands, plan.structure
    assert numbers["kMmaK"] == operands.q.mma_k
    assert numbers["kElementBytes"] == operands.q.bytes
    assert numbers["kBoxBytes"] == structure.box_bytes
    assert numbers["kBoxColumns"] == structure.box_bytes // operands.q.bytes
    if isinstance(structure, HopperForward):
        assert numbers["kPacked"] == operands.p.register_elements
        assert numbers["kOutChunk"] == operands.out.chunk_elements
    else:
        assert (numbers["kChunk"], numbers["kGradChunk"]) == (operands.dout.chunk_elements, operands.dq.chunk_elements)


def test_matrices_fill_the_memory_that_is_planned(case: tuple[Plan, str, dict[str, int]]) -> None:
    _, text, numbers = case
    equations = asserted(text)
    assert len(equations) >= 2
    for equation in equations:
        assert evaluate(equation, numbers), equation


def test_copies_go_where_products_look(case: tuple[Plan, str, dict[str, int]]) -> None:
    plan, text, numbers = case
    shapes, seen = boxes(plan), set()
    for tensor, where, step in copies(text):
        names = [tensor] if tensor else ["k", "v"]  # a cluster's loader has a function for both
        columns = evaluate(step, numbers)
        for rows, width, size in (shapes[name] for name in names):
            if "kVRows" in where:  # a box in each stage, until it is transposed
                assert numbers["kVRowsBytes"] == width * rows * size
                continue
            start = evaluate(where, {**numbers, "column": 0})
            assert evaluate(where, {**numbers, "column": width}) - start == width * rows * size, (tensor, where)
            assert columns in (width, 2 * width), (tensor, step)  # a block of a cluster brings every second one
        seen.update(names)
    assert seen == set(shapes)


def test_products_step_by_32_bytes(case: tuple[Plan, str, dict[str, int]]) -> None:
    plan, text, numbers = case
    element, seen = plan.operands.q, 0
    boxes_of_rows = ((numbers["kBoxColumns"], numbers["kBoxBytes"]), (64, 64 * element.bytes))  # and those of dS
    sides = {numbers["kBlockM"], numbers.get("kKeys", numbers["kBlockN"])}
    for loop in product_loops(text, numbers):
        assert loop.step == element.mma_k
        values = range(0, loop.end, loop.step)
        # 32 bytes further in a row of a box, from box to box; or so many rows further
        expected = [
            [value // columns * rows * size + value % columns * element.bytes for value in values]
            for columns, size in boxes_of_rows
            for rows in sides
        ] + [[value * size for value in values] for _, size in boxes_of_rows]
        seen += loop.products
        for expression in loop.offsets:
            assert [offset(loop, expression, value, numbers) for value in values] in expected, expression
            part = offset(loop, expression, 0, numbers, part=1)
            width = numbers.get("kQkPart", 0)
            assert part in {0, *(width * rows * element.bytes for rows in sides)}, expression
    assert seen == len(re.findall(r"\b[sr]s<\d(?:, \d)?>\(", text)) >= 2


def test_descriptors_have_boxes_of_the_bytes_that_are_swizzled(case: tuple[Plan, str, dict[str, int]]) -> None:
    plan, text, numbers = case
    rows_of_boxes = {plan.structure.box_bytes, 64 * plan.operands.q.bytes, numbers.get("kVBoxBytes")}
    sides = {numbers["kBlockM"], numbers.get("kKeys", numbers["kBlockN"])}
    matrices = re.findall(r"using \w+ = Matrix<(.*?), (.*?), (\d)>;", text)
    assert len(matrices) >= 3
    for leading, stride, swizzle in matrices:
        size, rest = divmod(evaluate(stride, numbers), 8)  # rows
        assert rest == 0
        assert size in rows_of_boxes, stride
        if "kVBoxBytes" in stride:  # what a kernel transposes it swizzles itself
            assert SWIZZLES[size] == int(swizzle)
        assert evaluate(leading, numbers) in {16, *(rows * size for rows in sides)}, leading


def test_places_in_shared_memory_count_bytes_of_rows(case: tuple[Plan, str, dict[str, int]]) -> None:
    """Rows of a box follow each other, 64 of a consumer; dS has boxes of the 64 keys of a consumer."""
    plan, text, numbers = case
    box, size = plan.structure.box_bytes, plan.operands.q.bytes
    keys = numbers.get("kKeys", numbers["kBlockN"])
    consumer = {
        "kDq": {numbers.get("kDqBytes")},
        "kOut": {numbers.get("kOutBytes")},
        "kK": {numbers.get("kDqColumns", 0) * keys * size},
        "": {64 * box},
    }
    for place in places(text):
        rows = 64 if "warpgroup * 64 *" in place else numbers["kBlockM"]  # of dS: a consumer's of dQ, or all
        consumer["kDs"] = {rows * 64 * size}
        region = next((name for name in ("kDs", "kDq", "kOut", "kK") if re.search(rf"\b{name}\b", place)), "")
        moves = {
            "warpgroup": (1, consumer[region]),
            "row": (8, {8 * box}),
            "q": (8, {8 * 64 * size}),
            "i": (1, {16 if place == "to + 16 * i" else 16 * 64 * size}),  # a chunk that is cleared, or rows of dS
            "part": (1, {numbers.get("kVPart", 0) * keys * size}),
            "column": (box // plan.operands.out.bytes, {64 * box}) if "out_rows" in place else (1, {keys * size}),
        }
        for name, (count, allowed) in moves.items():
            if "kChunks" not in place and re.search(rf"\b{name}\b", place):  # dK and dV fill what they need
                moved = evaluate(place, {**numbers, name: count}) - evaluate(place, numbers)
                assert moved in allowed, (place, name)


def test_copies_announce_the_bytes_that_they_bring(case: tuple[Plan, str, dict[str, int]]) -> None:
    plan, text, numbers = case
    size = plan.operands.q.bytes
    told = re.findall(r"arrive_expecting\((.*?)\);", text)
    announced = {evaluate(one, {**numbers, "inside": 1}) for one in told}
    stage = {region.name: region.bytes for region in plan.structure.shared}
    landed, ring = ("v_rows", "VRowsRing_kStages") if "v_rows" in stage else ("v", "VRing_kStages")
    rings = {"q": "QRing_kStages", "k": "KRing_kStages", landed: ring, "dout": "DoutRing_kStages"}
    wanted = {stage[name] // numbers[ring] for name, ring in rings.items() if name in stage and ring in numbers}
    if plan.structure.consumers and plan.direction == "backward":
        wanted = {stage[name] // numbers[rings[name]] for name in ("q", "dout")}
        if plan.structure.cluster > 1:
            wanted |= {stage["other_ds"] // 2, numbers["kKeys"] * size}  # of one column
            wanted |= {stage["part"] // 4} if "part" in stage else set()  # of a warp
        else:
            apart = plan.structure.stores_apart  # K and V arrive apart
            wanted |= {stage["k"], stage["v"]} if apart else {stage["k"] + stage["v"]}
            wanted |= {numbers["kDqBlockBytes"]}
    assert announced == wanted


def test_chunks_are_16_bytes(case: tuple[Plan, str, dict[str, int]]) -> None:
    """Reads of a lane, swizzled exchanges and what a loader clears are 16 bytes."""
    plan, text, numbers = case
    read = plan.operands.dout.chunk_elements
    for expression in re.findall(r"<const int4\*>\(\w+ \+ .* \+ (\S+ \* chunk)\)", text):
        assert evaluate(expression, {**numbers, "chunk": 1}) == read
    for expression in re.findall(r"const int chunk = (column [^,;]*)", text):
        columns = plan.structure.box_bytes // plan.operands.out.bytes
        chunks = [evaluate(expression, {**numbers, "column": column}) for column in range(0, 2 * columns, 8)]
        assert chunks == 2 * list(range(columns // plan.operands.out.chunk_elements))
    for expression in re.findall(r"int i = (inside [^;]*?) \+ lane|i < (columns [^;]*);", text):
        cleared = evaluate("".join(expression), {**numbers, "inside": 32, "columns": 32})
        assert 16 * cleared == 32 * numbers["kKeys"] * plan.operands.k.bytes


@pytest.mark.parametrize("kernel", [name for name, fields in KERNELS.items() if "passes" not in fields], indirect=True)
def test_probabilities_take_their_registers(case: tuple[Plan, str, dict[str, int]]) -> None:
    """Those of a backward come in pairs, as the kernel asserts."""
    plan, text, numbers = case
    registers = [evaluate(one, numbers) for one in re.findall(r"uint32_t p\[(.*?)\];", text)]
    assert registers == [fragment_registers(plan.tile_n, plan.operands.p)]
    (step,) = re.findall(r"\(acc, p \+ (.*?), v\.at", text)
    assert evaluate(step, {**numbers, "key": plan.operands.p.mma_k}) == 4


def test_every_schedule_and_layout_is_among_them() -> None:
    plans = [planned(**fields, declared=DROPOUT) for fields in KERNELS.values()]  # type: ignore[arg-type]
    rows = [row for direction in ("forward", "backward") for row in schedules(direction, backend="cuda")]
    # the others multiply by mma.sync, for which fp8 would be a kernel of its own, or take 16 bits alone
    of_any_bytes = tuple(f"attngen.families.{family}." for family in ("hopper_forward", "hopper_backward"))
    wanted = {row.name for row in rows if row.view.startswith(of_any_bytes)} - {
        "hopper_blocks"
    }  # asserts its two bytes
    assert {plan.schedule for plan in plans} == wanted
    # the copies of pages have a test of their own: tests/compile/test_pages.py
    assert {plan.layout for plan in plans} == set(LAYOUTS) - {"paged"}


#: Lines that rendered kernels may lack, since no plan here takes them: sizes, boxes and steps of two bytes.
_OF_TWO_BYTES = re.compile(
    r"\* 2[,)]* *(?:\w+_)?map\b|% kBoxColumns \* 2|\bk\w*Bytes = [^;]* \* 2;|2 \* kBoxColumns;|(?<!word )\+= 16\)"
)


def test_no_line_of_a_template_takes_two_bytes_for_granted() -> None:
    folder = root() / "templates" / "cuda"
    of_16_bits = folder / "latent_backward"  # alone, and with steps of 16 columns
    paths = [path for path in sorted(folder.rglob("*.j2")) if not path.is_relative_to(of_16_bits)]
    assert paths
    for path in paths:
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            assert not _OF_TWO_BYTES.search(line), f"{path.relative_to(folder)}:{number}: {line.strip()}"
