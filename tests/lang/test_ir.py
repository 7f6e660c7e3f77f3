"""Nodes of expressions as keys of tables: equal values have equal hashes, in this process and after a pickle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from attngen.lang.ir import Const, Expr, Load, Op, Search, Type, Var, children, rewrite, walk


def _nodes() -> list[Expr]:
    q, one = Var("q", Type.INT), Const(1, Type.INT)
    load = Load("starts", (q,), Type.INT)
    return [one, q, load, Op("add", (q, one), Type.INT, wide=True), Search("starts", 0, (one,), q, True, load)]


@pytest.mark.parametrize("index", range(5), ids=lambda index: type(_nodes()[index]).__name__)
def test_equal_nodes_have_equal_hashes(index: int) -> None:
    one, two = _nodes()[index], _nodes()[index]
    assert one is not two
    assert hash(one) == hash(two) == hash(one)
    assert one == two
    assert {one: "found"}[two] == "found"


def test_a_pickled_node_is_found_in_a_process_with_other_hashes() -> None:
    nodes = _nodes()
    assert all(isinstance(hash(node), int) for node in nodes)  # remembered before they are pickled
    program = (
        "import pickle, sys\n"
        "nodes = pickle.loads(sys.stdin.buffer.read())\n"
        "for node in nodes:\n"
        "    fields = {name: getattr(node, name) for name in node.__dataclass_fields__}\n"
        "    assert {type(node)(**fields): 1}[node] == 1\n"
    )
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        run = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(nodes), env=env, check=False)
        assert run.returncode == 0


def test_rewrite_keeps_what_no_rule_changes() -> None:
    q, kv = Var("q", Type.INT), Var("kv", Type.INT)
    for node in _nodes():
        assert rewrite(node, lambda _: None) is node
        renamed = rewrite(node, lambda n: kv if n == q else None)
        assert (renamed is node) == (q not in walk(node))
        assert q not in walk(renamed)
        assert type(renamed) is type(node)
        assert len(children(renamed)) == len(children(node))
