// What races.h declares, compiled without the instrumentation whose calls it takes.
#define RACES 1
#include "races.h"

#include <fnmatch.h>
#include <setjmp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Clock = std::vector<uint32_t>;  // by actor: the number of its last event that is known

uint32_t at(const Clock& clock, int actor) { return actor < static_cast<int>(clock.size()) ? clock[actor] : 0; }
void raise(Clock& clock, int actor, uint32_t number) {
  if (actor >= static_cast<int>(clock.size())) clock.resize(actor + 1);
  clock[actor] = std::max(clock[actor], number);
}
void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Actor {
  std::string kind;
  int number, block;
  Clock known;
  uint32_t last = 0;  // event of a queue
  int writes = -1;    // of a queue of stores: the queue of what it writes to global memory, which ends later
  Clock fenced, seen;  // what it knew at its last fence, and what relaxed loads have seen since
};
struct Signal {
  int block, copies;  // its copies, as an actor
  uint32_t phases = 0;
  bool copied = false;  // in this phase
  Clock arriving, passed, seen;
  Clock before;  // of the phase before the last that is complete
  std::map<int, uint32_t> waits;  // for the last phase that is complete
  std::map<int, uint32_t> others;  // arrivals of warps of other blocks
};
struct Event {
  int actor = -1;
  uint32_t number = 0;
  bool operator==(const Event&) const = default;
};
struct Cell { Event written; std::vector<Event> read; };
struct GlobalCell : Cell { std::vector<Event> added; };
enum class Access { kRead, kWrite, kAdd, kAtomic, kLoad };  // the last ones: what others may do at the same time, too

constexpr size_t kBlock = 256 << 10, kBlocks = 64, kCell = 4, kPage = 4096;
constexpr uintptr_t kGuard = GUARD;  // bytes on both sides of memory that launches write
char* const arena = static_cast<char*>(mmap(nullptr, kBlock * kBlocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
std::vector<std::vector<Cell>> cells(kBlocks);
// Global memory that is looked at, its cells by page, and the words that pass on what is released.
std::vector<std::pair<uintptr_t, uintptr_t>> watched;
uintptr_t first_watched, end_watched;
std::unordered_map<uintptr_t, std::vector<GlobalCell>> pages;
std::unordered_map<uintptr_t, Clock> released;
bool in_order;  // no two additions may come in any order
std::vector<Actor> actors;
std::vector<Signal> signals;
int warp = -1;  // whose turn it is
Event now;      // to whom accesses belong
races::Registers* held;  // by products of the lane
struct Same { const uint32_t* place; uint32_t number; std::string found; };
std::vector<Same> same;  // words that two write in any order, and what they have to hold then, too
char message[1024];
jmp_buf failed;

// Of shared memory: names and where they begin. Patterns of races that are harmless, one a line.
std::vector<std::pair<std::string, size_t>> regions;
std::vector<std::string> harmless;
std::vector<std::pair<Event, std::string>> excused;

std::string name(int actor) {
  const Actor& one = actors[actor];
  return one.kind + " " + std::to_string(one.number) + " of block " + std::to_string(one.block);
}
[[noreturn]] void stop(const std::string& what) {
  std::snprintf(message, sizeof(message), "%s", what.c_str());
  _longjmp(failed, 1);
}
Clock& known() { return actors[warp].known; }

int signal_of(int& place, int block) {
  if (place < 0) {
    place = static_cast<int>(signals.size());
    signals.push_back({block, races::new_actor("copies to barrier", place, block)});
  }
  return place;
}

bool known_of(const Event& before) { return at(known(), before.actor) >= before.number; }
// Keeps those reads or additions that are not known of, since who knows of the own one knows of the others, too.
void keep(std::vector<Event>& events, const Event& own) {
  std::erase_if(events, [&](const Event& before) { return before.actor == own.actor || known_of(before); });
  events.push_back(own);
}

// `added`: to global memory, of which the word may be written twice with the same number.
template <typename Place>
void check(Cell& it, const Event& own, Access access, const Place& place, std::vector<Event>* added = nullptr, const uint32_t* word = nullptr) {
  if (access == Access::kRead && !it.read.empty() && it.read.back() == own) return;
  const bool adds = access >= Access::kAdd;
  const auto ordered = [&](const Event& before, const char* did, const uint32_t* word = nullptr) {
    if (before.actor < 0 || known_of(before)) return;
    if (before.actor == own.actor && before.number == own.number) return;
    const char* const does[] = {" reads", " writes", " adds to", " adds to", " reads"};
    const std::string found = "race at " + place() + ": " + name(own.actor) + does[static_cast<int>(access)] + " what " + name(before.actor) + did;
    if (word != nullptr) {
      same.push_back({word, *word, found});
      return;
    }
    for (const std::string& pattern : harmless) {
      if (fnmatch(pattern.c_str(), found.c_str(), 0) == 0) {
        excused.push_back({before, found});
        return;
      }
    }
    stop(found);
  };
  ordered(it.written, " writes", access == Access::kWrite ? word : nullptr);
  if (added != nullptr && (!adds || (access == Access::kAdd && in_order))) {
    for (const Event& addition : *added) ordered(addition, " adds to");
  }
  if (access == Access::kRead) return keep(it.read, own);
  if (access == Access::kLoad) return;  // comes before all that its warp does later
  for (const Event& read : it.read) ordered(read, " reads");
  it.read.clear();
  if (adds) return keep(*added, own);
  if (added != nullptr) added->clear();
  it.written = own;
}
void check_shared(size_t cell, Access access) {
  check(cells[cell * kCell / kBlock][cell * kCell % kBlock / kCell], now, access, [&] {
    std::string region = "shared memory";
    for (const auto& [name, start] : regions) {
      if (start <= cell * kCell % kBlock) region = name;
    }
    return region + " of block " + std::to_string(cell * kCell / kBlock);
  });
}
void check_same() {
  for (const Same& one : same) {
    if (*one.place != one.number) stop(one.found);
  }
  same.clear();
}
bool is_watched(uintptr_t place) {
  if (place < first_watched || place >= end_watched) return false;
  const auto next = std::upper_bound(watched.begin(), watched.end(), std::pair(place, UINTPTR_MAX));
  return next != watched.begin() && place < std::prev(next)->second;
}
// Whether a place lies just outside of memory that launches write, where nothing is.
bool is_guard(uintptr_t place) {
  const auto next = std::upper_bound(watched.begin(), watched.end(), std::pair(place, UINTPTR_MAX));
  return (next != watched.end() && next->first - place <= kGuard) || (next != watched.begin() && place - std::prev(next)->second < kGuard);
}
void check_global(uintptr_t first, size_t bytes, Access access) {
  if (warp < 0) return;
  if (!is_watched(first)) return is_guard(first) ? stop("memory beyond a result or a workspace") : void();
  const Event own = {actors[now.actor].writes >= 0 && access != Access::kRead ? actors[now.actor].writes : now.actor, now.number};
  for (uintptr_t place = first & -kCell; place < first + bytes; place += kCell) {
    auto& page = pages[place / kPage];
    page.resize(kPage / kCell);
    GlobalCell& cell = page[place % kPage / kCell];
    check(cell, own, access, [&] {
      const auto next = std::upper_bound(watched.begin(), watched.end(), std::pair(place, UINTPTR_MAX));
      return "byte " + std::to_string(place - std::prev(next)->first) + " of global memory " + std::to_string(next - watched.begin());
    }, &cell.added, reinterpret_cast<const uint32_t*>(place));
  }
}

}  // namespace

namespace races {

[[noreturn]] void fail(const char* what, long long number) { stop(std::string(what) + " (" + std::to_string(number) + ")"); }

char* memory_of(int block) {
  if (block >= static_cast<int>(kBlocks)) fail("too many blocks at once", block);
  cells[block].assign(kBlock / kCell, {});
  return arena + block * kBlock;
}
int new_actor(const char* kind, int number, int block) {
  actors.push_back({kind, number, block});
  raise(actors.back().known, static_cast<int>(actors.size()) - 1, 1);
  return static_cast<int>(actors.size()) - 1;
}
int actor_of(int& place, const char* kind, int number, int block, bool writes) {
  if (place < 0) {
    place = new_actor(kind, number, block);
    if (writes) {
      const int other = new_actor(kind, number, block);
      actors[place].writes = other;
    }
  }
  return place;
}
void resume(int actor, Registers& of_lane) {
  warp = actor;
  held = &of_lane;
  now = {actor, actors[actor].known[actor]};
}

static void pass_on(Signal& signal) {
  join(signal.arriving, known());
  join(signal.seen, actors[warp].seen);
  if (actors[warp].block != signal.block) signal.others[warp] = known()[warp];
  now.number = ++known()[warp];
}
void arrive(int& place, int block) { pass_on(signals[signal_of(place, block)]); }
void arrive_later(int& place, int block, int queue, uint32_t number) {
  Signal& signal = signals[signal_of(place, block)];
  raise(signal.arriving, queue, number);
}
void complete(int& place, bool parity) {
  Signal& signal = signals[place];
  ++signal.phases;
  if (signal.copied) raise(signal.arriving, signal.copies, signal.phases);
  signal.copied = false;
  for (const auto& [actor, number] : signal.waits) {
    if (at(signal.arriving, actor) < number) {
      stop("phase " + std::to_string(signal.phases) + " of barrier " + std::to_string(place) + " of block " + std::to_string(signal.block) +
           " may be complete before " + name(actor) + " has seen the one before");
    }
  }
  signal.waits.clear();
  if (parity) {
    signal.before = std::move(signal.passed);
    signal.passed = std::move(signal.arriving);
    signal.arriving = {};
  } else {
    join(signal.passed, signal.arriving);
  }
}
void acquire(int& place, int block, bool parity) {
  Signal& signal = signals[signal_of(place, block)];
  for (int actor = 0; parity && actor < static_cast<int>(signal.before.size()); ++actor) {
    if (signal.before[actor] <= at(known(), actor)) continue;
    stop(name(warp) + " may take phase " + std::to_string(signal.phases - 2) + " of barrier " + std::to_string(place) + " of block " +
         std::to_string(signal.block) + " for the one that it waits for: it has not seen phase " + std::to_string(signal.phases - 1));
  }
  join(known(), signal.passed);
  join(actors[warp].seen, signal.seen);
  if (parity) signal.waits[warp] = known()[warp];
}
void finish(int queue, uint32_t number) { raise(known(), queue, number); }
void finish_written(int queue, uint32_t number) {
  finish(queue, number);
  finish(actors[queue].writes, number);
}
void fence() {
  Actor& own = actors[warp];
  join(own.known, own.seen);
  own.fenced = own.known;
  now.number = ++own.known[warp];
}
void add(float* to, float number) {
  check_global(reinterpret_cast<uintptr_t>(to), sizeof(float), Access::kAdd);
  *to += number;
}

void end(int block) {
  check_same();
  Clock left;
  for (const Actor& one : actors) {
    if (one.block == block && one.kind == "warp") join(left, one.known);
  }
  // What is multiplied at the end is not used, nor what is multiplied beside it.
  for (const auto& [event, found] : excused) {
    if (actors[event.actor].block == block && event.number + 1 < actors[event.actor].last) stop(found);
  }
  for (const Signal& signal : signals) {
    if (signal.block != block) continue;
    for (const auto& [actor, number] : signal.others) {
      if (at(left, actor) < number) stop(name(actor) + " arrives at a block that may have left");
    }
  }
  for (const Cell& cell : cells[block]) {
    const auto& [actor, number] = cell.written;
    if (actor >= 0 && at(left, actor) < number) stop(name(actor) + " copies to a block that may have left");
    for (const auto& [actor, number] : cell.read) {
      if (at(left, actor) < number) stop(name(actor) + " reads of a block that may have left");
    }
  }
}

void hold(Registers& lane, const void* first, size_t bytes, bool written, uint32_t group) {
  const Registers::Held own = {static_cast<const char*>(first), static_cast<const char*>(first) + bytes, written, group};
  for (int i = 0; i < lane.count; ++i) {
    if (lane.all[i].first == own.first && lane.all[i].group == group) return;
  }
  if (lane.count == Registers::kMost) fail("too many registers of products", lane.count);
  lane.all[lane.count++] = own;
}
void let_go(Registers& lane, uint32_t group) {
  int kept = 0;
  for (int i = 0; i < lane.count; ++i) {
    if (lane.all[i].group > group) lane.all[kept++] = lane.all[i];
  }
  lane.count = kept;
}

As::As(int queue, uint32_t number) {
  now = {queue, number};
  actors[queue].last = std::max(actors[queue].last, number);
}
As As::copies(int& place, int block) {
  Signal& signal = signals[signal_of(place, block)];
  signal.copied = true;
  join(signal.arriving, known());
  return As(signal.copies, signal.phases + 1);
}
As::~As() { now = {warp, known()[warp]}; }

void touch(const void* place, size_t bytes, bool writes) {
  if (!same.empty()) check_same();
  const size_t first = static_cast<const char*>(place) - arena;
  if (first >= kBlock * kBlocks) {
    check_global(reinterpret_cast<uintptr_t>(place), bytes, writes ? Access::kWrite : Access::kRead);
    if (held == nullptr || now.actor != warp) return;  // before the first warp; or what a product itself does
    for (int i = 0; i < held->count; ++i) {
      const Registers::Held& one = held->all[i];
      if (place >= one.first && place < one.end && (one.written || writes)) {
        stop("race: " + name(warp) + (writes ? " writes" : " reads") + " registers of a product that nobody has waited for");
      }
    }
    return;
  }
  for (size_t cell = first / kCell; cell <= (first + bytes - 1) / kCell; ++cell) check_shared(cell, writes ? Access::kWrite : Access::kRead);
}

}  // namespace races

// Regions as "name start", and patterns of races that are harmless, one a line.
extern "C" void describe(const char* of_regions, const char* patterns, bool deterministic) {
  in_order = deterministic;
  std::istringstream lines(of_regions), others(patterns);
  std::string line;
  regions.clear();
  harmless.clear();
  for (size_t start; lines >> line >> start;) regions.emplace_back(line, start);
  while (std::getline(others, line)) harmless.push_back(line);
}

// Global memory that launches may write: ascending pairs of a first address and one behind the last.
extern "C" void watch(const uintptr_t* bounds, int count) {
  watched.clear();
  for (int i = 0; i < count; ++i) watched.emplace_back(bounds[2 * i], bounds[2 * i + 1]);
  first_watched = count ? watched.front().first : 0;
  end_watched = count ? watched.back().second : 0;
}

// The run of a launch, which `fail` leaves.
extern "C" const char* run_checked(void (*launch)(void*), void* given) {
  actors.clear();
  signals.clear();
  excused.clear();
  pages.clear();
  same.clear();
  released.clear();
  warp = -1;
  message[0] = '\0';
  if (_setjmp(failed) == 0) launch(given);
  held = nullptr;
  return message;
}

// What the compiler calls before each access (-fsanitize=thread); nothing of its own runtime is linked.
#define ACCESS(bytes)                                                                   \
  void __tsan_read##bytes(void* place) { races::touch(place, bytes, false); }           \
  void __tsan_write##bytes(void* place) { races::touch(place, bytes, true); }           \
  void __tsan_unaligned_read##bytes(void* place) { races::touch(place, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* place) { races::touch(place, bytes, true); }
extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* place, size_t bytes) { races::touch(place, bytes, false); }
void __tsan_write_range(void* place, size_t bytes) { races::touch(place, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}

// Atomic operations, which the compiler calls instead, too. What is released goes to who acquires it, and on through other
// atomic additions and exchanges; other stores end it.
namespace {
using Order = int;  // memory_order
bool acquires(Order order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
bool releases(Order order) { return order >= __ATOMIC_RELEASE; }
void load_as(uintptr_t place, Order order) {
  if (warp < 0) return;
  const auto it = released.find(place);
  if (it == released.end()) return;
  join(acquires(order) ? known() : actors[warp].seen, it->second);
}
void store_as(uintptr_t place, Order order, bool continues) {
  if (warp < 0) return;
  Clock& passed = released[place];
  if (!continues) passed.clear();
  if (releases(order)) actors[warp].fenced = known();  // a release is a fence, too, as the hardware does it
  join(passed, actors[warp].fenced);
  if (releases(order)) now.number = ++known()[warp];
}
uint32_t change(volatile uint32_t* word, uint32_t value, Order order, bool changes = true) {
  const auto place = reinterpret_cast<uintptr_t>(word);
  check_global(place, sizeof(*word), Access::kAtomic);
  load_as(place, order);
  if (is_watched(place)) pages[place / kPage][place % kPage / kCell].added = {now};  // it comes after all that it has read
  if (changes) store_as(place, order, true);
  const uint32_t before = *word;
  *word = value;
  return before;
}
}  // namespace
extern "C" {
uint32_t __tsan_atomic32_load(const volatile uint32_t* word, Order order) {
  check_global(reinterpret_cast<uintptr_t>(word), sizeof(*word), Access::kLoad);
  load_as(reinterpret_cast<uintptr_t>(word), order);
  return *word;
}
void __tsan_atomic32_store(volatile uint32_t* word, uint32_t value, Order order) {
  check_global(reinterpret_cast<uintptr_t>(word), sizeof(*word), Access::kAtomic);
  store_as(reinterpret_cast<uintptr_t>(word), order, false);
  *word = value;
}
uint32_t __tsan_atomic32_fetch_add(volatile uint32_t* word, uint32_t value, Order order) { return change(word, *word + value, order); }
uint32_t __tsan_atomic32_fetch_or(volatile uint32_t* word, uint32_t value, Order order) { return change(word, *word | value, order); }
uint32_t __tsan_atomic32_exchange(volatile uint32_t* word, uint32_t value, Order order) { return change(word, value, order); }
int __tsan_atomic32_compare_exchange_strong(volatile uint32_t* word, uint32_t* expected, uint32_t value, Order order, Order) {
  const bool same = *word == *expected;
  *expected = change(word, same ? value : *word, order, same);
  return same;
}
}
