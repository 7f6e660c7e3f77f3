// A kernel on the host as a library, whose barriers are checked (races.h): `run` takes what the driver would be given.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "blocks.cuh"

int mutation = 0;  // the number of the statement that is left out; 0: none

#include "kernel.inc"
#include "launch.h"

extern "C" const char* run_checked(void (*launch)(void*), void* given);

struct Given {
  int grid, cluster, threads, at_once;
};
template <typename... Arguments, size_t... kIndices>
static void take(void (*function)(Arguments...), void** parameters, std::index_sequence<kIndices...>) {
  kernel = [=] { function(*static_cast<Arguments*>(parameters[kIndices])...); };
}
template <typename... Arguments>
static void take(void (*function)(Arguments...), void** parameters) {
  take(function, parameters, std::index_sequence_for<Arguments...>());
}

// What is wrong with a launch; empty: nothing. Its number in KERNELS, its blocks, those of a cluster, and their threads.
// In an order of turns other than 0, only some of the clusters may begin at once.
extern "C" const char* run(int number, int grid, int cluster, int threads, int order_of_turns, void** parameters) {
  int left = number;
#define KERNEL(symbol) \
  if (left-- == 0) take(symbol, parameters);
  KERNELS
#undef KERNEL
  order = order_of_turns;
  now = 0;
  const int clusters = std::min(grid, 64) / cluster;
  Given given = {grid, cluster, threads, order == 0 ? clusters : 1 + static_cast<int>(any_below(clusters))};
  return run_checked([](void* of) {
    const Given& given = *static_cast<Given*>(of);
    launch(given.grid, given.cluster, given.threads, given.at_once);
  }, &given);
}

// The same in a process of its own, without a statement; memory stays as it is.
extern "C" const char* run_without(int statement, int number, int grid, int cluster, int threads, int order_of_turns, void** parameters) {
  static std::string said;
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limit = {20, 20};
    setrlimit(RLIMIT_CPU, &limit);
    mutation = statement;
    const std::string found = run(number, grid, cluster, threads, order_of_turns, parameters);
    if (write(ends[1], found.data(), found.size()) < 0) _exit(1);
    _exit(0);
  }
  close(ends[1]);
  said.clear();
  char part[1024];
  for (ssize_t bytes; (bytes = read(ends[0], part, sizeof(part))) > 0;) said.append(part, bytes);
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (status != 0) said = "ended by signal " + std::to_string(WTERMSIG(status));
  return said.c_str();
}
