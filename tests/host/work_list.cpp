// Lists of work, cut on the host by the functions of kernels. Cases come by stdin: which limits, tiles of a split, workers,
// and the tiles of items. Of each case it prints what the list holds, how it is cut, and whether all items stay whole.
#include <iostream>
#include <set>
#include <sstream>
#include <string>

#include "threads.h"

Thread* current;
int blocks_of_grid;
bool moved;
jmp_buf scheduler;

#include "quick_ranges.cuh"
#include "work_list.cuh"

struct Work {
  int item, tiles;
};
using Part = PartOf<Work>;

static std::string line;  // of the case
static void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("FAILED: %s: %s\n", what, line.c_str());
  std::exit(1);
}

template <typename Limits, typename Division, bool kListsEmpty>
static void cut_list(const std::vector<int>& tiles, int split_tiles, int most) {
  using Cutting = CutBy<Limits, Division>;
  const int items = tiles.size();
  const Chunks<kListsEmpty> chunks_of(split_tiles, reciprocal(split_tiles));
  const auto work_of = [&](const Place& place) { return Work{place.b, place.hk == 0 ? tiles[place.b] : -1}; };
  const auto advance = [&](Place& place) {
    if (++place.b < items) return;
    place.b = 0;
    ++place.hk;
  };
  const struct {
    int first, end;
  } all_items{0, items};
  const Count all = count_items(all_items, Place{}, chunks_of, work_of, advance);
  const Cut cut = Cutting::of(all, split_tiles, most);
  const EvenRanges ranges = Cutting::ranges(all, cut);

  std::vector<int> covered(items, 0), seen(items, 0), first_workers(items), parts_of(items);
  std::set<int> slots;
  int least = 1 << 30, largest = 0;
  bool whole = true;
  require(cut.workers <= most, "too many workers");
  for (int worker = 0; worker < cut.workers; ++worker) {
    const int begin = ranges.first(worker), end = ranges.first(worker + 1);
    least = min(least, end - begin);
    largest = max(largest, end - begin);
    if (begin == end) continue;
    Walk walk = {};
    require(find_begin(walk, begin, end, all_items, Place{}, Count{}, cut.splits, chunks_of, work_of, advance), "a range begins nowhere");
    Part part;
    while (take_part<Division>(walk, part, cut.splits, end, 1, chunks_of, work_of, advance)) {
      const int item = part.item;
      require(covered[item] == part.first && part.first <= part.end && part.end <= tiles[item], "tiles are missing, or come twice");
      covered[item] = part.end;
      if (part.end - part.first < tiles[item]) whole = false;
      if (split_tiles > 0) continue;
      const int first_worker = ranges.worker_of(part.list_begin), parts = ranges.worker_of(part.list_begin + part.chunks - 1) - first_worker + 1;
      if (seen[item]++ == 0) first_workers[item] = worker, parts_of[item] = parts;
      require(first_worker == first_workers[item] && parts == parts_of[item] && worker == first_worker + seen[item] - 1, "workers of an item");
      if (parts == 1) continue;
      const int slot = slot_of_worker(first_worker, worker - first_worker);
      require(slot / 2 == worker && slots.insert(slot).second, "a slot of two partial results");
    }
  }
  require(largest - least <= 1, "uneven ranges");
  for (int item = 0; item < items; ++item) {
    require(covered[item] == max(tiles[item], 0), "tiles are missing");
    require(split_tiles > 0 || seen[item] == (seen[item] ? parts_of[item] : 0), "parts of an item");
    require(split_tiles > 0 || seen[item] > 0 || !chunks_of.lists(tiles[item]), "an item without a part");
  }
  std::printf("%d %d %d %d %d %d\n", all.chunks, all.items, all.longest, cut.workers, cut.splits, whole);
}

#include "families.inc"

int main() {
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    int family, split_tiles, most;
    in >> family >> split_tiles >> most;
    std::vector<int> tiles;
    for (int each; in >> each;) tiles.push_back(each);
    cut_list_of(family, tiles, split_tiles, most);
  }
}
