"""``attngen check``: tables, JSON, warnings, and every error of every spec."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from attngen import cli, resources
from attngen.build.compiles import Task
from attngen.build.pipeline import prepare
from attngen.plan.attempts import Attempts, next_attempt
from attngen.plan.model import Refused
from attngen.schema import load_spec
from attngen.store import Store
from attngen.store.refusals import write_refusal
from tests.sampling import few


def run(*arguments: str):
    return CliRunner().invoke(cli.group, ["check", *arguments])


def write(folder, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text)
    return str(path)


def test_table():
    path = str(resources.specs_dir() / "presets" / "causal.yaml")
    result = run(path)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == f"{path}: 2 kernels, nothing wrong"
    assert sum("causal" in line and "sm90a" in line for line in result.output.splitlines()) == 2


def test_a_part_of_a_spec():
    path = str(resources.specs_dir() / "presets" / "causal.yaml")
    assert run(path, "--head-dim", "128").output.splitlines()[-1] == f"{path}: 1 kernel, nothing wrong"
    result = run(path, "--head-dim", "12")
    assert result.exit_code == 2
    assert "head_dim: the spec lists no kernels for '12'" in result.output


def test_a_shipped_spec_needs_no_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "2 kernels, nothing wrong" in run("specs/presets/causal.yaml").output
    (tmp_path / "specs/presets").mkdir(parents=True)
    (tmp_path / "specs/presets/causal.yaml").write_text("schema: 9\n")  # a file that is there comes first
    assert run("specs/presets/causal.yaml").exit_code == 2
    assert "there is no file 'specs/hoper.yaml'" in run("specs/hoper.yaml").output


def test_registers_that_only_a_compiler_knows_are_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNGEN_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, "schema: 1\narch: sm90a\nkernels:\n  - {variant: causal, head_dim: 64, passes: backward}\n")
    result = run(path)
    assert "1 kernel in cuda not compiled yet: only the compiler sees registers" in result.output
    (prepared,) = prepare(load_spec(path))
    first = prepared.plan
    refused = Refused(first.name, "cuda", "660 B of spills at 168 registers", (False, 660))
    write_refusal(Store(), Task.of(prepared).key, refused)
    following = next_attempt(Attempts(prepared.spec), [refused])
    assert f"{following.name}: in place of {first.name}, which an earlier build refused: 660 B" in run(path).output
    (report,) = json.loads(run(path, "--json").stdout)["specs"]
    assert [kernel["name"] for kernel in report["kernels"]] == [following.name]
    assert report["never_compiled"] == 1


@pytest.mark.exhaustive
def test_json():
    result = run(str(resources.specs_dir() / "hopper.yaml"), "--json")
    (report,) = json.loads(result.stdout)["specs"]
    assert report["package"] == "attngen_hopper"
    assert (report["errors"], report["warnings"]) == ([], [])
    assert len({kernel["name"] for kernel in report["kernels"]}) == len(report["kernels"]) > 40


def test_schema():
    schema = json.loads(run("--schema").stdout)
    assert "kernels" in schema["properties"]


def test_errors_of_all_specs(tmp_path):
    bad = write(tmp_path, "schema: 1\nkernel: []\n")
    result = run(bad, "missing.yaml")
    assert result.exit_code == 2
    assert f"{bad}:2: kernel: unknown field; did you mean 'kernels'?" in result.stderr
    assert "there is no file 'missing.yaml'" in result.stderr
    (first, second) = json.loads(run(bad, "missing.yaml", "--json").stdout)["specs"]
    assert (first["errors"][0]["line"], first["errors"][0]["field"]) == (2, "kernel")
    assert second["kernels"] == []


def test_each_kernel_that_cannot_be_planned_is_told(tmp_path):
    entries = "  - {variant: causal, head_dim: [64, 65]}\n"
    entries += "  - {variant: full, head_dim: 64, backend: triton, epilogue: staged}\n"
    result = run(write(tmp_path, f"schema: 1\narch: sm90a\nkernels:\n{entries}"))
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert ":4: head_dim: " in result.stderr
    assert ":5: epilogue: " in result.stderr
    assert "1 kernel, 2 errors" in result.stdout


WARNED = """\
schema: 1
arch: sm90a
variants:
  causal: {mask: "q_pos >= kv and kv < near", scalars: {near: {type: int32}, far: {type: int32}}}
  unused: {mask: true, let: {"f(x)": x, y: q}, tensors: {t: {dtype: int32, shape: [h]}}}
kernels:
  - {variant: causal, head_dim: [64, 128]}
  - {variant: causal, head_dim: 64}
  - {variant: causal, head_dim: 64, tile: {m: 64}, pipeline: {stages: 3}, warps: 4}
"""


def test_warnings(tmp_path):
    path = write(tmp_path, WARNED)
    result = run(path)
    assert result.exit_code == 0, result.output
    for says in (
        ":4: scalar 'far' of variant 'causal' is never used",
        ":4: variant 'causal' hides the preset of that name",
        ":5: let value 'f' of variant 'unused' is never used",
        ":5: let value 'y' of variant 'unused' is never used",
        ":5: tensor 't' of variant 'unused' is never used",
        ":5: variant 'unused' is used by no kernel",
        ":8: asks again for a causal kernel of line 7; it is built once",
    ):
        assert f"warning: {path}{says}" in result.stderr
    assert "near" not in result.stderr
    assert run(path, "--strict").exit_code == 2


def test_a_gradient_that_is_0_is_told(tmp_path):
    path = write(
        tmp_path,
        "schema: 1\narch: sm90a\nvariants:\n  gated:\n    mask: q_pos >= kv and gate[h] > 0\n    score: s + bias[h]\n"
        "    tensors:\n      gate: {dtype: float32, shape: [h], grad: true}\n"
        "      bias: {dtype: float32, shape: [h], grad: true}\nkernels:\n  - {variant: gated, head_dim: 64}\n",
    )
    says = ":8: tensor 'gate' of variant 'gated' has grad: true, but only the mask reads it: its gradient is 0"
    assert [line for line in run(path).stderr.splitlines() if "grad" in line] == [f"warning: {path}{says}"]


def test_floats_that_round_or_leave_float32_are_told(tmp_path):
    text = (
        "schema: 1\narch: sm90a\nvariants:\n  odd:\n    mask: floor(kv / 48) == q // 48 or kv / 2.5 < 1.0\n"
        "    score: s + exp(100.0) - 1e-46 + 1e-30 * 1e-30 + kv / 48 + int(log(1 + kv / 9))\n"
        "kernels:\n  - {variant: odd, head_dim: 64}\n"
    )
    path = write(tmp_path, text)
    assert run(path).stderr.splitlines() == [
        f"warning: {path}:5: mask of variant 'odd': kv / 48.0 is rounded to float32 before it is compared or "
        "rounded to an integer; '//' divides integers exactly",
        f"warning: {path}:6: score of variant 'odd': exp(100.0) is inf in float32",
        f"warning: {path}:6: score of variant 'odd': 1e-46 is 0.0 in float32",
        f"warning: {path}:6: score of variant 'odd': 1e-30 * 1e-30 is 0.0 in float32",
    ]


def test_a_tile_that_the_plan_would_choose_anyway(tmp_path):
    text = "schema: 1\narch: sm90a\nkernels:\n  - {variant: full, head_dim: 64}\n"
    tile = json.loads(run(write(tmp_path, text), "--json").stdout)["specs"][0]["kernels"][0]["tile"]
    m, n = tile.split("x")
    result = run(write(tmp_path, f"{text}  - {{variant: full, head_dim: 64, tile: {{m: {m}, n: {n}}}}}\n"))
    assert ":5: becomes the same kernel as one of line 4" in result.stderr


def test_no_kernels(tmp_path):
    path = write(tmp_path, 'schema: 1\nvariants:\n  near: {mask: "q_pos >= kv"}\n')
    result = run(path)
    assert result.exit_code == 2
    assert f"{path}: kernels: no kernels: the spec builds nothing; add an entry" in result.stderr
    assert "- {variant: near, head_dim: 128, dtype: bf16, arch: sm90a}" in result.stderr
    (added,) = [line.strip() for line in result.stderr.splitlines() if "- {variant" in line]
    assert run(write(tmp_path, (tmp_path / "mine.yaml").read_text() + f"kernels:\n  {added}\n")).exit_code == 0


DOUBTED = """\
schema: 1
arch: sm90a
variants:
  near:
    mask: "q_pos >= kv & q_pos - kv < 5"
    score: s + bias[h, kv]
    tensors: {bias: {dtype: float32, shape: [h, seq_k]}}
kernels:
  - {variant: near, head_dim: 64}
"""


def test_probable_mistakes_are_warnings(tmp_path):
    path = write(tmp_path, DOUBTED)
    result = run(path)
    assert result.exit_code == 0, result.output
    assert (
        f"warning: {path}:5: mask of variant 'near': '&' binds tighter than '>=', so this is one integer that is "
        "compared; join conditions with 'and'\n"
        "    q_pos >= kv & q_pos - kv < 5\n             ^^^^^^^^^^^^^^^\n"
    ) in result.stderr
    assert f"{path}:7: tensors.bias.shape of variant 'near': the extent 'seq_k' is new" in result.stderr
    assert "did you mean 'seqlen_k'?" in result.stderr
    assert run(path, "--strict").exit_code == 2
    (report,) = json.loads(run(path, "--json").stdout)["specs"]
    assert [warning["line"] for warning in report["warnings"]] == [5, 7]


WRONG = """\
schema: 1
arch: h100
variants:
  one:
    mask: "q_idx >= kv"
    score: "s + bia[h] + late"
    sink: "q"
    let: {x: "torch.abs(q)", late: "x + 1"}
    tensors: {bias: {dtype: float32, shape: [h]}}
  two: {mask: "q_pos >= kv and kv"}
  three: {mask: "q_pos >= kv", maskk: 3}
kernels:
  - {variant: oen, head_dim: 64}
  - {variant: three, head_dim: 64, layout: packed, dtype: bfloat}
  - {variant: two, head_dim: 64, backward: {backend: cuda}}
  - {variant: causal, head_dim: [64, 64]}
"""


def test_all_errors_of_a_spec_in_one_run(tmp_path):
    path = write(tmp_path, WRONG)
    (report,) = json.loads(run(path, "--json").stdout)["specs"]
    errors = [(error["line"], error["field"], error["message"].splitlines()[0]) for error in report["errors"]]
    expected = [
        (2, "arch", "did you mean 'sm90a'?"),
        (5, "mask", "unknown name 'q_idx'; write 'q'"),
        (7, "sink", "'q' is not allowed"),
        (8, "let.x", "'torch.abs' is not part of the language; write 'abs'"),
        (10, "mask", "'and' takes a condition, got an integer"),
        (11, "variants.three.maskk", "unknown field; did you mean 'mask'?"),
        (13, "variant", "unknown variant 'oen'; did you mean 'one'?"),
        (14, "kernels[1].dtype", "found 'bfloat'; did you mean 'bf16'?"),
        (14, "kernels[1].layout", "found 'packed'; did you mean 'varlen'?"),
        (15, "kernels[2].backward", "'passes' has no backward"),
        (16, "kernels[3].head_dim", "64 is given twice in one list"),
    ]
    assert [row[:2] for row in errors] == [row[:2] for row in expected]
    for (_, _, message), (_, _, says) in zip(errors, expected, strict=True):
        assert says in message
    told = run(path)
    assert told.exit_code == 2
    assert told.stderr.count(f"{path}:") == len(expected)
    assert "0 kernels, 11 errors" in told.stdout


#: Specs in which one error could hide others: each line with an error ends in a part of what is said of it.
HIDING = [
    """
  v:
    colour: 3              # unknown field; allowed
    mesk: q_pos >= kv      # unknown field; did you mean 'mask'?
    score: s * sclae       # unknown name 'sclae'
kernels:
  - {variant: v, head_dim: 65}  # head_dim 65 is not a multiple of 8
""",
    """
  v:
    colour:                # empty; give it a value
    mask: q_pos >= kvv     # did you mean 'kv'?
    scalars:
      w: {type: int31}     # did you mean 'int32'?
      narrow: {type: int32, min: 5, max: 1}  # min 5 exceeds max 1
      wide: {type: int32, max: rows}
    tensors: {t: {dtype: int32, shape: [rows, 0]}}  # found 0; allowed
    let:
      of_w: w + 1
      also: of_w + 1
      bad: q_pos +         # not an expression
    score: s + also + narrow
    sink: other            # unknown name 'other'
kernels:
  - {variant: v, head_dim: 65}  # head_dim 65 is not a multiple of 8
  - {variant: causal, head_dim: 64, colour: 1, epilogue: staged, backend: triton}  # unknown field; allowed
""",
    """
  v: {mask: q_pos >= kv, scalers: {window: {type: int32}}, score: s + window}  # did you mean 'scalars'?
  w:
    mask:                  # 'mask: true' lets every query see every key
  x: {mask: q_pos >= kv, softmax: 3}  # found 3
kernels:
  - {variant: causal, head_dim: 68}  # head_dim 68 is not a multiple of 8
  - {variant: causal, head_dim: [64, 64]}  # given twice in one list
  - {variant: causal, head_dim: 64, epilogue: staged, backend: triton}  # Triton kernels store from registers
  - {variant: v, head_dim: 64, epilogue: staged, backend: triton}
""",
    """
  v: {mask: "n[0] >= kv", keys: indx}  # found 'indx'
kernels:
  - {variant: v, head_dim: 64, vv: key, dtype: fp8_e4m3}  # unknown field; did you mean 'v'?
""",
]


@pytest.mark.parametrize("body", HIDING)
def test_no_error_hides_another_one_nor_makes_one(tmp_path, body):
    text = f"schema: 1\npackage: mine\narch: sm90a\nvariants:{body}"
    path = write(tmp_path, text)
    (report,) = json.loads(run(path, "--json").stdout)["specs"]
    told = {(error["line"], error["message"].splitlines()[0]) for error in report["errors"]}
    expected = {
        number: line.partition("#")[2].strip() for number, line in enumerate(text.splitlines(), 1) if "#" in line
    }
    for line, says in expected.items():
        assert any(line == place and says in message for place, message in told), (line, says, told)
    assert {line for line, _ in told} == set(expected)


def test_many_errors_are_counted(tmp_path):
    fields = "".join(f"  f{number}: {{colour: 3}}\n" for number in range(250))
    path = write(tmp_path, f"schema: 1\narch: sm90a\nvariants:\n{fields}")
    stderr = run(path).stderr
    assert stderr.count("unknown field") == 100
    assert f"{path}: 150 more errors" in stderr


def test_needs_a_spec():
    result = run()
    assert result.exit_code == 2
    assert "name at least one spec" in result.stderr


@pytest.mark.exhaustive
@few("name", ["hopper", "ampere", "ada", "blackwell", "blackwell_consumer", "portable", "ladder"], always=(1,))
def test_shipped_specs_can_be_planned(name):
    result = run(str(resources.specs_dir() / f"{name}.yaml"), "--strict")
    assert result.exit_code == 0, result.output
