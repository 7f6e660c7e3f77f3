"""Split-KV kernels, whole, on the CPU: threads are fibers, clusters and barriers work as on the GPU, copies land at
once.

What a kernel says is compiled by the host's compiler beside small stand-ins for what the hardware does
(``tests/host``). So who waits for whom, which block does what, and every address of shared memory are run and not only
read: a wait without an end, an address of the wrong block, a counter that is not 0 again, or a wrong result fails.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from attngen.lang.listed import LISTS
from attngen.plan import Plan
from attngen.render import render
from tests.host_compiler import COMPILER, HOST, compile_host
from tests.plan.specs import planned
from tests.render.headers import headers
from tests.sampling import few

#: Headers that are compiled as they are, but for what they ask of the hardware.
COMPILED = (
    "softmax.cuh", "divisor.cuh", "counted.cuh", "split.cuh", "ring.cuh", "expression.cuh", "widen.cuh", "pair.cuh",
    "quad.cuh", "lane_max.cuh", "few_heads.cuh", "gather.cuh", "quick_ranges.cuh", "staged_rows.cuh",
    "short_parts.cuh", "shares.cuh", "work_list.cuh",
)  # fmt: skip

#: Stand-ins on the host for the PTX in headers.
PTX = {
    r'asm\("ex2\.approx\.ftz\.f32 .*?\);': "y = exp2f(x);",
    r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\(quotient.*?\);': "quotient = 1.0f / sum[row];",
    r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\(reciprocal.*?\);': "reciprocal = 1.0f / divisor;",
    r'asm\("lg2\.approx\.ftz\.f32 .*?"=f"\(([\w.]+)\) : "f"\((\w+)\)\);': r"\1 = log2f(\2);",
    r'asm\("rcp\.approx\.ftz\.f32 %0, %1;" : "=f"\(scales.*?\);': "scales.z = 1.0f / positive;",
    r'asm\("max\.u16x2 .*?\);': "larger = max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;",
    r'asm\("\{\.reg .*? cvt\.rn\.f16x2\.e4m3x2 .*?\);': "wide = widened_by_table(four);",
    r'asm\("tanh\.approx\.f32 .*?\);': "y = tanhf(x);",
    r'asm\("div\.approx\.ftz\.f32 .*?\);': "quotient = a / b;",
    r'asm\("sqrt\.approx\.ftz\.f32 .*?\);': "root = sqrtf(x);",
    r'asm\("min\.NaN\.f32 .*?\);': "least = a < b || a != a ? a : b;",
    r'asm\("max\.NaN\.f32 .*?\);': "greatest = a > b || a != a ? a : b;",
    r'asm\("" : "\+r"\(number\)\);': "",
    r'asm volatile\("" : "\+l"\((address|number)\)\);': "",
    r'asm volatile\("st\.global\.v4\.b32 .*?\);': "std::memcpy(to, block, 16);",
    r'asm\("\{ \.reg .*? selp\.f32 .*?\);': "chosen = condition ? yes : no;",
    r'asm\("\{\\n"\s+"\.reg \.pred holds.*?\);': "chosen = condition ? first : second;",
    r'asm volatile\(\s*"cp\.async\.bulk\.tensor\.3d.*?\);': "",  # of packed sequences, which do not run here
    r'asm volatile\("cp\.async\.bulk\.prefetch.*?\);': "",
    r'asm volatile\("\{\.reg \.pred p; elect\.sync .*?\);': "own = threadIdx.x % 32 == 0;",
    r'asm volatile\("ld\.acquire\.gpu\.global\.u32 .*?\);': "done = __atomic_load_n(counter, __ATOMIC_ACQUIRE);",
    r'asm volatile\("atom\.acq_rel\.gpu\.global\.add\.u32 .*?\);': (
        "before = __atomic_fetch_add(counter, times, __ATOMIC_ACQ_REL);"
    ),
    r'asm volatile\("atom\.relaxed\.gpu\.global\.add\.u32 .*?\);': (
        "before = __atomic_fetch_add(counter, times, __ATOMIC_RELAXED);"
    ),
    r'asm volatile\("fence\.proxy\.async;" .*?\);': "",
    r'asm volatile\(\s*"\{\.reg \.pred p, q; .*? barrier\.cta\.red\.or.*?\);': "any = named_or(id, threads, value);",
}

#: Query heads, KV heads, queries, blocks, tiles of a split, rows of a page; then the lengths.
CASES = [
    "4,1,1,8,0,16,100",
    "8,2,1,16,0,16,1024",
    "4,1,1,32,0,16,1300",
    "4,1,1,32,0,16,1300,1200",
    "4,2,1,16,0,16,0,1,15,16,17,33,200",
    "4,2,1,120,0,64,0,1,15,16,17,33,200",
    "8,2,1,16,4,16,300,77",
    "8,2,1,64,16,16,1000",
    "8,2,5,16,0,8,300,77,3",
    "16,2,16,16,0,48,130,40",
    "6,2,1,24,0,16,900,10,300",
    "2,1,1,120,0,1,600",
    "8,2,1,16,0,16,300," + "0," * 20 + "200,0,0,0",  # a batch that is padded by empty sequences
    "4,2,1,8,0,16,0,0,0",
    "8,2,1,17,0,16," + ",".join(["200"] * 16),  # 32 units for 17 blocks: 16 of them take two each
]

#: Parts of 8-bit kernels only: the step, and the scales of pages.
FEW_CASES = [
    "4,1,1,8,0,16,100",
    "8,2,1,16,0,16,300," + "0," * 20 + "200,0,0,0",
    "8,2,5,16,0,8,300,77,3",
    "4,2,1,120,0,64,0,1,15,16,17,33,200",
    "8,2,1,16,2,1,90,77",
]


def on_host(name: str, text: str) -> str:
    for pattern, instead in PTX.items():
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    assert "asm" not in text, name
    return text


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("head_dim", "layout", "cases"),
    [(128, "paged", CASES), (128, "dense", CASES), (256, "paged", CASES), (80, "dense", CASES)],
    always=0,
    often=(0,),
    ids=lambda value: "" if isinstance(value, list) else str(value),
)
def test_a_kernel_runs_to_its_end_and_is_right(head_dim: int, layout: str, cases: list[str], tmp_path: Path) -> None:
    """Each case runs with single blocks and with clusters."""
    run({"head_dim": head_dim, "layout": layout}, cases, tmp_path)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    "fields",
    [
        {"head_dim": 48, "dtype": "fp8_e4m3"},
        {"head_dim": 64, "layout": "paged", "kv_dtype": "fp8_e4m3", "descale": "page"},
        {"head_dim": 128, "kv_dtype": "fp8_e4m3"},
        {"head_dim": 192, "layout": "paged", "dtype": "fp8_e4m3", "descale": "page"},
        {"head_dim": 256, "kv_dtype": "fp8_e4m3"},
        {"head_dim": 80, "layout": "paged", "dtype": "fp16", "kv_dtype": "fp8_e4m3"},
        {"head_dim": 512, "layout": "paged", "kv_dtype": "fp8_e4m3"},
        {"head_dim": 320, "kv_dtype": "fp8_e4m3"},
        {"head_dim": 512, "layout": "paged", "dtype": "fp8_e4m3", "descale": "page"},
        {"head_dim": 128, "layout": "paged", "kv_dtype": "fp8_e4m3", "descale": "token"},
        {"head_dim": 512, "layout": "paged", "dtype": "fp8_e4m3", "descale": "token"},
    ],
    always=0,
    often=(0, 1),
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_one_that_reads_8_bits_is_right(fields: dict[str, object], tmp_path: Path) -> None:
    run(fields, FEW_CASES, tmp_path)


#: The same for 64 rows of a block, and more; or for up to 16 of them, which have products of their own. Blocks merge up
#: to four parts of an item in another way than more. They run one after the other, and wait in vain; then all at once.
KEY_VALUE_CASES = [
    "128,1,1,6,0,64,330,77", "16,1,1,4,0,64,64,1,200", "24,1,1,3,0,16,500", "48,1,3,4,2,16,300,0,5", "40,2,4,6,3,1,150",
    "8,1,2,3,0,16,700,90", "16,1,1,5,0,64,1000", "64,1,1,9,0,64,2000", "8,1,1,9,0,64,1500,0,70",
    "96,1,1,16,0,64,500,300,80", "16,1,9,16,0,64,500,1000", "128,1,1,8,0,64,1000",
]  # fmt: skip


#: The same with several KV heads. In the last case blocks take whole items before their ranges.
WIDE_CASES = ["16,2,1,4,0,64,64,1,200", "4,1,1,3,0,16,500", "48,1,3,4,2,16,300,0", "4,4,70,2,0,64,100"]


LATENT_FIELDS = {
    "paged": {"head_dim": "{qk: 576, v: 512}", "layout": "paged"},
    "8 bits": {"head_dim": "{qk: 576, v: 512}", "layout": "paged", "kv_dtype": "fp8_mla_656"},
    "dense": {"head_dim": "{qk: 576, v: 512}", "layout": "dense"},
    "512 columns": {"head_dim": 512, "layout": "paged", "dtype": "fp16"},
}


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("form", "cases"),
    [(form, cases) for cases in (KEY_VALUE_CASES[:2], KEY_VALUE_CASES[2:]) for form in LATENT_FIELDS],
    always=0,
    often=(0,),
    ids=[f"{form}-{part}" for part in ("few", "rest") for form in LATENT_FIELDS],
)
def test_one_whose_values_are_keys_is_right(form: str, cases: list[str], tmp_path: Path) -> None:
    run({"v": "key", **LATENT_FIELDS[form]}, cases, tmp_path)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    "fields",
    [
        {"head_dim": 512, "layout": "paged", "dtype": "fp16"},
        {"head_dim": 320, "layout": "dense"},
        {"head_dim": 512, "layout": "dense"},
    ],
    always=0,
    often=(0,),
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_one_beyond_head_dim_256_is_right(fields: dict[str, object], tmp_path: Path) -> None:
    run(fields, WIDE_CASES, tmp_path)


#: Heads, queries, blocks, keys, entries of a list, a factor of Q; then how many entries of each query count. Lists have
#: no tile, one, and odd and even numbers of them; ranges of blocks end inside of lists; with a large Q row maxima rise.
LISTED_CASES = [
    "64,9,2,300,200,1,200,0,64,65,129,1,128,64,63", "128,4,4,500,260,8,260,1,192,193",
    "64,12,3,200,140,3,0,1,2,64,65,128,129", "100,3,4,200,130,1,130,128,0", "30,3,2,100,200,1",
    "16,5,2,300,200,4,200,0,65,129",
    # fewer items than blocks: each is cut evenly
    "65,1,8,300,400,1", "100,2,12,500,700,2,700,300", "16,1,5,700,640,4", "128,2,14,300,330,1,330,0",
]  # fmt: skip


#: The same with lists of blocks of 16 keys, and of 4.
LISTED_BLOCKS_CASES = ["64,9,2,300,13,1,13,0,4,5,8,1,3", "128,3,4,512,16,8,16,1,12", "16,5,2,300,12,4,12,0,5,9"]
LISTED_SMALL_BLOCKS_CASES = ["64,9,2,300,50,1,50,0,4,15,16,17,3", "16,5,2,300,35,4,35,0,5,9"]


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    ("keys", "fields", "cases"),
    [
        ("counted_index", {"head_dim": "{qk: 576, v: 512}"}, LISTED_CASES[5:8]),
        ("counted_blocks_of_16", {"head_dim": "{qk: 576, v: 512}"}, LISTED_BLOCKS_CASES),
        ("counted_blocks_of_4", {"head_dim": "{qk: 576, v: 512}"}, LISTED_SMALL_BLOCKS_CASES),
        ("counted_index", {"head_dim": "{qk: 576, v: 512}"}, LISTED_CASES),
        ("counted_index", {"head_dim": "512"}, LISTED_CASES),
        ("counted_index", {"head_dim": "{qk: 576, v: 512}", "kv_dtype": "fp8_mla_656"}, LISTED_CASES),
    ],
    always=0,
    often=(0,),
    ids=lambda value: "" if isinstance(value, list) else "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_one_whose_calls_list_keys_is_right(
    keys: str, fields: dict[str, str], cases: list[str], tmp_path: Path
) -> None:
    declared = f"variants:\n  listed: {{keys: {keys}}}\n"
    plan = planned("listed", declared=declared, backend="cuda", v="key", layout="dense", **fields)
    assert plan.variant.keys is not None
    defined = {"BLOCK": LISTS[plan.variant.keys].block, "LATENT_ROWS": int(plan.latent_row is not None)}
    run_plan(plan, "listed.cpp", defined, cases, tmp_path)


#: Heads, queries, blocks, slots of both caches, entries of both lists, a factor of Q; then entries that count, of both
#: lists of each query.
TWO_CACHES_CASES = [
    "64,9,2,300,208,200,130,1,200,130,0,0,64,0,0,65,129,64,1,1,128,128,64,63,63,64",
    "128,4,6,500,304,260,700,8,260,700,1,0,192,1,193,2",
    "100,3,4,200,112,130,64,1,130,64,128,0,0,63", "30,3,2,100,80,200,100,1", "128,2,20,300,304,128,512,3",
]  # fmt: skip


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@few(
    "cases", [TWO_CACHES_CASES[3:4], TWO_CACHES_CASES[:3] + TWO_CACHES_CASES[4:]],
    always=0, often=(0,), ids=["few", "rest"],
)  # fmt: skip
def test_one_with_two_caches_is_right(cases: list[str], tmp_path: Path) -> None:
    declared = "variants:\n  listed: {keys: counted_index_of_two_caches}\n"
    plan = planned(
        "listed", declared=declared, backend="cuda", v="key", layout="paged", head_dim=512, kv_dtype="fp8_mla_584"
    )
    run_plan(plan, "two_caches.cpp", {}, cases, tmp_path)


def run(fields: dict[str, object], cases: list[str], folder: Path) -> None:
    """Compile the kernel of a spec with these fields, and run it."""
    split = {} if "v" in fields else {"split_kv": "true"}
    plan = planned("causal", backend="cuda", **split, **fields)
    defined = {
        "VALUES_OF_KEYS": int(plan.v_of_key),
        "V_KEYS": getattr(plan.structure, "value_keys", plan.tile_n),
        "MERGES_IN_PLACE": int(getattr(plan.structure, "merges", False)),
        "PAGED": int(plan.layout == "paged"),
        "LATENT_ROWS": int(plan.latent_row is not None),
        "ROW_WARPS": plan.launches[0].row_warps,
        "SCALED": plan.descaled + (plan.operands.q.bytes == 1), "PAGE_SCALES": int(fields.get("descale") == "page"),
        "TOKEN_SCALES": int(plan.token_scales),
    }  # fmt: skip
    run_plan(plan, "decode.cpp", defined, cases, folder)


def run_plan(plan: Plan, main: str, defined: dict[str, int], cases: list[str], folder: Path) -> None:
    """Compile the kernel of a plan with a program that calls it, and run that."""
    source = render(plan)
    text = source.text.replace("extern __shared__ char shared_memory[];", "")
    (folder / "kernel.inc").write_text(text)
    for name in COMPILED:
        (folder / name).write_text(on_host(name, headers()[name].replace("#ifdef __CUDA_ARCH__", "#if 1")))
    program = folder / "program"
    names = {
        "KERNEL": source.name, "HEAD_DIM": plan.head_dim_qk, "HEAD_DIM_V": plan.head_dim_v,
        **({"MERGE": f"{source.name}_merge"} if plan.has_launch("merge") else {}),
    }  # fmt: skip
    compile_host(HOST / main, program, folder, define={**names, **defined})
    done = subprocess.run([program, *cases], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
