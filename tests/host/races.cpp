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
};
struct Signal {
  int block, copies;  // its copies, as an actor
  uint32_t phases = 0;
  bool copied = false;  // in this phase
  Clock arriving, passed;
  std::map<int, uint32_t> waits;  // for the last phase that is complete
  std::map<int, uint32_t> others;  // arrivals of warps of other blocks
};
struct Event {
  int actor = -1;
  uint32_t number = 0;
  bool operator==(const Event&) const = default;
};
struct Cell { Event written; std::vector<Event> read; };

constexpr size_t kBlock = 256 << 10, kBlocks = 64, kCell = 4;
char* const arena = static_cast<char*>(mmap(nullptr, kBlock * kBlocks, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
std::vector<std::vector<Cell>> cells(kBlocks);
std::vector<Actor> actors;
std::vector<Signal> signals;
int warp = -1;  // whose turn it is
Event now;      // to whom accesses belong
races::Registers* held;  // by products of the lane
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

void check(size_t cell, bool writes) {
  Cell& it = cells[cell * kCell / kBlock][cell * kCell % kBlock / kCell];
  if (!writes && !it.read.empty() && it.read.back() == now) return;
  const auto ordered = [&](const Event& before, const char* did) {
    if (before.actor < 0 || at(known(), before.actor) >= before.number) return;
    if (before.actor == now.actor && before.number == now.number) return;
    const size_t place = cell * kCell % kBlock;
    std::string region = "shared memory";
    for (const auto& [name, start] : regions) {
      if (start <= place) region = name;
    }
    const std::string found = "race at " + region + " of block " + std::to_string(cell * kCell / kBlock) + ": " + name(now.actor) +
                              (writes ? " writes" : " reads") + " what " + name(before.actor) + did;
    for (const std::string& pattern : harmless) {
      if (fnmatch(pattern.c_str(), found.c_str(), 0) == 0) {
        excused.push_back({before, found});
        return;
      }
    }
    stop(found);
  };
  ordered(it.written, " writes");
  if (!writes) {
    size_t kept = 0;  // who knows of a read will be known of instead of it
    for (const Event& read : it.read) {
      if (read.actor != now.actor && at(known(), read.actor) < read.number) it.read[kept++] = read;
    }
    it.read.resize(kept);
    it.read.push_back(now);
    return;
  }
  for (const Event& read : it.read) ordered(read, " reads");
  it.read.clear();
  it.written = now;
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
int actor_of(int& place, const char* kind, int number, int block) {
  if (place < 0) place = new_actor(kind, number, block);
  return place;
}
void resume(int actor, Registers& of_lane) {
  warp = actor;
  held = &of_lane;
  now = {actor, actors[actor].known[actor]};
}

static void pass_on(Signal& signal) {
  join(signal.arriving, known());
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
    signal.passed = std::move(signal.arriving);
    signal.arriving = {};
  } else {
    join(signal.passed, signal.arriving);
  }
}
void acquire(int& place, int block, bool parity) {
  Signal& signal = signals[signal_of(place, block)];
  join(known(), signal.passed);
  if (parity) signal.waits[warp] = known()[warp];
}
void finish(int queue, uint32_t number) { raise(known(), queue, number); }

void end(int block) {
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
  const size_t first = static_cast<const char*>(place) - arena;
  if (first >= kBlock * kBlocks) {
    if (held == nullptr || now.actor != warp) return;  // before the first warp; or what a product itself does
    for (int i = 0; i < held->count; ++i) {
      const Registers::Held& one = held->all[i];
      if (place >= one.first && place < one.end && (one.written || writes)) {
        stop("race: " + name(warp) + (writes ? " writes" : " reads") + " registers of a product that nobody has waited for");
      }
    }
    return;
  }
  for (size_t cell = first / kCell; cell <= (first + bytes - 1) / kCell; ++cell) check(cell, writes);
}

}  // namespace races

// Regions as "name start", and patterns of races that are harmless, one a line.
extern "C" void describe(const char* of_regions, const char* patterns) {
  std::istringstream lines(of_regions), others(patterns);
  std::string line;
  regions.clear();
  harmless.clear();
  for (size_t start; lines >> line >> start;) regions.emplace_back(line, start);
  while (std::getline(others, line)) harmless.push_back(line);
}

// The run of a launch, which `fail` leaves.
extern "C" const char* run_checked(void (*launch)(void*), void* given) {
  actors.clear();
  signals.clear();
  excused.clear();
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
