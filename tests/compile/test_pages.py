"""The loads of a tile of keys in pages, compiled for the host: each lane's copies, by a copy engine of a few lines.

The text is that of the kernels: the header, and the part of the template. Descriptors are as the runtime encodes them.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from attngen.render.environment import environment
from attngen.resources import templates_dir
from attngen.runtime.device.tensormap import TensorMap
from tests.sampling import few, some

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HEADER = templates_dir() / "cuda" / "include" / "pages.cuh"
COLUMNS = {"k": 192, "v": 72}  # of a head; V's second box is mostly padding
WIDTHS = {"k": 192, "v": 128}  # of a tile in shared memory
GARBAGE = 0x7FFFFFFF

PROGRAM = """
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define __device__
#define __forceinline__ inline
#include <cstdint>
inline std::uint32_t __umulhi(std::uint32_t x, std::uint32_t y) { return static_cast<std::uint64_t>(x) * y >> 32; }
#include "pages.cuh"
using std::min;

struct TensorMap {
  long long base, size;  // elements: where it begins, and how many there are
  std::vector<long long> extents, strides, box;
};
std::vector<int> shared_memory;
long long bytes = 0;

[[noreturn]] void fail(const char* what) {
  std::printf("%s", what);
  std::exit(1);
}

// An element is its place in memory, counted from 1; what lies outside the tensor arrives as 0.
template <typename... C>
void load_box(uint32_t to, const TensorMap& map, uint32_t, C... coordinates) {
  const std::vector<long long> at = {coordinates...};
  if (at.size() != map.extents.size()) fail("another number of coordinates than axes");
  if (to % 128) fail("shared memory is written in pieces of 128 bytes");
  long long count = 1, shown = 0;
  for (const long long n : map.box) count *= n;
  for (long long i = 0; i < count; ++i) {
    long long rest = i, place = map.base;
    bool inside = true;
    for (size_t axis = 0; axis < at.size(); ++axis) {
      const long long c = at[axis] + rest % map.box[axis];
      rest /= map.box[axis];
      inside = inside && c >= 0 && c < map.extents[axis];
      place += c * map.strides[axis];
    }
    if (inside && (place < 0 || place >= map.size)) fail("a copy outside the tensor");
    shared_memory.at(to / 2 + i) = inside ? static_cast<int>(place) + 1 : 0;
    shown += inside;
  }
  if (shown == 0 && map.base < 0) fail("a copy that shows nothing looks up where its map begins, outside the tensor");
  bytes += 2 * count;
}

struct Ring {
  static constexpr int stage = 0;
  uint32_t full() const { return 0; }
};

int read() {
  int number;
  if (std::scanf("%d", &number) != 1) fail("no number");
  return number;
}

TensorMap read_map() {
  TensorMap map;
  map.base = read();
  map.size = read();
  for (auto* numbers : {&map.extents, &map.strides, &map.box}) {
    numbers->resize(read());
    for (long long& number : *numbers) number = read();
  }
  return map;
}

int main() {
  constexpr int kBlockN = BLOCK_N, kBoxColumns = 64, kElementBytes = 2, kBoxBytes = kElementBytes * kBoxColumns;
  constexpr int kHeadDimQk = WIDTH_K, kHeadDimV = WIDTH_V;
  constexpr uint32_t kK = 0, kKBytes = 2 * kBlockN * kHeadDimQk, kV = kKBytes, kVBytes = 2 * kBlockN * kHeadDimV;
  const int page_size = read(), num_pages = read(), box_rows = read(), seqlen_k = read(), hk = read(), tile = read();
  const int entries = read();
  std::vector<int> page_table(entries);  // no more than there are, so that a sanitizer sees who reads more
  for (int& entry : page_table) entry = read();
  const TensorMap k_map = read_map(), v_map = read_map();
  shared_memory.assign((kKBytes + kVBytes) / 2, -1);
  const Ring k_ring, v_ring;
  const int start = tile * kBlockN;
  const uint32_t inverse = ~0u / page_size;
  const Pages pages = {page_table.data(), page_size, num_pages, seqlen_k, inverse};
  bytes -= kKBytes + kVBytes;
  for (int lane = 31; lane >= 0; --lane) {
    {
      constexpr int kColumns = kHeadDimQk / kBoxColumns;
      const int lane_key = lane / kColumns * box_rows;
      PageBox box = pages.at(start + lane_key);
      COPY_K
    }
    {
      constexpr int kColumns = kHeadDimV / kBoxColumns;
      const int lane_key = lane / kColumns * box_rows;
      PageBox box = pages.at(start + lane_key);
      COPY_V
    }
  }
  if (bytes != 0) fail("other bytes than expected");
  for (const int element : shared_memory) std::printf("%d ", element);
}
"""


@dataclass
class Encoder:
    """A driver that keeps what it is asked to encode."""

    maps: list[tuple[int, Sequence[int], Sequence[int], Sequence[int]]] = field(default_factory=list)

    def extent_at(self, rank: int, axis: int, device: int) -> int | None:
        return None

    def encode_tensor_map(
        self, dtype: str, address: int, extents: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzle: int, device: int,
    ) -> bytes:  # fmt: skip
        assert (dtype, swizzle, len(extents)) == ("bf16", 128, len(strides) + 1)
        self.maps.append((address, extents, (2, *strides), box))
        return b""


@dataclass(frozen=True)
class Cache:
    """Pages of K or V of one sequence: (pages, KV heads, rows, columns) in one order or the other."""

    columns: int
    page_size: int
    pages: int
    heads: int
    rows_first: bool

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Elements from a page, a row, a head and a column to the next."""
        row, head = (self.heads * self.columns, self.columns) if self.rows_first else (
            self.columns, self.page_size * self.columns,
        )  # fmt: skip
        return self.page_size * self.heads * self.columns, row, head, 1

    def place(self, page: int, row: int, head: int, column: int) -> int:
        """Number that the program gives an element, by the name that a copy has for it."""
        return 1 + sum(i * step for i, step in zip((page, row, head, column), self.strides, strict=True))

    def described(self, box: tuple[int, ...], window: int | None) -> str:
        """Return its descriptor in the program's numbers."""
        driver, shape = Encoder(), (self.pages, self.page_size, self.heads, self.columns)
        base = 1 << 30
        TensorMap(cast(Any, driver), 0, "bf16", shape, self.strides, box, 128, window, in_pages=True).at(base)
        ((address, extents, strides, rows),) = driver.maps
        size = self.pages * self.page_size * self.heads * self.columns
        lists = (extents, [step // 2 for step in strides], rows)
        return f"{(address - base) // 2} {size} " + " ".join(f"{len(one)} {' '.join(map(str, one))}" for one in lists)


def build(folder: Path) -> None:
    """Compile the program of a folder, so that it ends where it reads beyond what it was given."""
    subprocess.run(
        [str(COMPILER), "-std=c++17", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-I", str(folder),
         str(folder / "pages.cpp"), "-o", str(folder / "pages")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module", params=some([96, 128], [96]))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The loads of tiles of so many keys."""
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("pages")
    (folder / "pages.cuh").write_text(HEADER.read_text())
    (folder / "types.cuh").write_text("#include <cstdint>\nusing std::uint32_t;\n")
    view = SimpleNamespace(from_here="")  # of a block without a cluster
    plan = SimpleNamespace(pack_gqa=False, ragged_queries=False, split_kv=False)
    given = {"view": view, "plan": plan, "structure": SimpleNamespace(shares=False, end_aligned=False)}
    part: Any = environment("cuda").get_template("cuda/hopper_forward/keys/paged.cu.j2").make_module(given)
    text = PROGRAM
    for name, width in WIDTHS.items():
        copies = getattr(part, f"copy_{name}")()
        text = text.replace(f"COPY_{name.upper()}", copies).replace(f"WIDTH_{name.upper()}", str(width))
    (folder / "pages.cpp").write_text(text.replace("BLOCK_N", str(request.param)))
    build(folder)
    return SimpleNamespace(tile_n=request.param, path=folder / "pages")


def loaded(path: Path, caches: dict[str, Cache], numbers: Sequence[int], tile_n: int) -> list[int]:
    """Shared memory after a tile of K, then one of V, was loaded."""
    boxes = {"k": ((1, 1, tile_n, 64), None), "v": ((1, 1, 1, tile_n, 64), tile_n)}
    maps = [caches[name].described(*boxes[name]) for name in caches]
    given = "\n".join([" ".join(map(str, numbers)), *maps])
    done = subprocess.run([str(path)], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return [int(word) for word in done.stdout.split()]


@pytest.mark.exhaustive
@few("page_size", [1, 7, 16, 48, 64, 256], always=(1,), often=(1, 3))
def test_a_tile_holds_the_keys_of_its_pages_and_zeros(program: SimpleNamespace, page_size: int) -> None:
    """Every row of V after the end is 0, and whole boxes of K; nothing else of the cache, or of the table, is read."""
    tile_n, random = program.tile_n, Random(page_size)
    for length in (1, tile_n, random.randint(tile_n + 1, 3 * tile_n)):
        needed = -(-length // page_size)
        pages, heads, head = needed + 2, 2, random.randrange(2)
        table = random.sample(range(pages), needed)
        caches = {
            name: Cache(columns, page_size, pages, heads, random.random() < 0.5) for name, columns in COLUMNS.items()
        }
        rows = gcd(page_size, tile_n)
        for tile in {0, (length - 1) // tile_n}:
            numbers = (page_size, pages, rows, length, head, tile, needed, *table)
            elements = iter(loaded(program.path, caches, numbers, tile_n))
            for name, cache in caches.items():
                for first in range(0, WIDTHS[name], 64):
                    for key in range(tile * tile_n, (tile + 1) * tile_n):
                        for column in range(first, first + 64):
                            element = next(elements)
                            page = table[key // page_size] if key // page_size < needed else 0
                            held = cache.place(page, key % page_size, head, column)
                            if key >= length and (name == "v" or key // rows * rows >= length):
                                held = 0
                            assert element == (held if column < cache.columns else 0), (name, key, column, length)


@pytest.mark.exhaustive
def test_pages_outside_the_cache_are_zeros(program: SimpleNamespace) -> None:
    """Nothing outside the cache is read, whatever a table says of a sequence's keys."""
    tile_n = program.tile_n
    for entries in ([5, GARBAGE], [-1, 4], [-(2**31), 5]):
        caches = {name: Cache(columns, tile_n, 5, 2, True) for name, columns in COLUMNS.items()}
        elements = loaded(program.path, caches, (tile_n, 5, tile_n, tile_n + 3, 1, 0, 2, *entries), tile_n)
        assert set(elements) == {0}


@pytest.mark.exhaustive
@few(
    ("rule", "broken", "message"),
    [
        ("num_pages, seqlen_k, inverse};", "num_pages, seqlen_k + 2 * page_size, inverse};", "AddressSanitizer"),
        ("if (box.page < num_pages)", "if (true)", "a copy that shows nothing"),
        ("static_cast<uint32_t>(page) < num_pages", "true", "a copy that shows nothing"),
    ],
)
def test_a_rule_that_is_broken_is_found(program: SimpleNamespace, rule: str, broken: str, message: str) -> None:
    """The tests above fail when a rule of the copies is broken."""
    folder = program.path.parent / f"broken{abs(hash(rule))}"
    folder.mkdir(exist_ok=True)
    whole = ""
    for file in ("types.cuh", "pages.cuh", "pages.cpp"):
        text = (program.path.parent / file).read_text()
        whole += text
        (folder / file).write_text(text.replace(rule, broken))
    assert whole.count(rule) == 1
    build(folder)
    caches = {name: Cache(columns, 1, 9, 2, True) for name, columns in COLUMNS.items()}
    with pytest.raises(AssertionError, match=message):
        loaded(folder / "pages", caches, (1, 9, 1, 3, 1, 0, 3, 0, 1, -1), program.tile_n)
