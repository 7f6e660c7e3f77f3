// Programmatic dependent launch (PTX ISA, "griddepcontrol"): a kernel may be launched while the one ahead of it in the
// stream still runs, and then waits by itself before it touches memory.
#pragma once

// From here on the next kernel may be launched; its blocks start where there is room for them.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Roles of two launches that run side by side. Once the leader has waited, everything ahead of both is done, and the follower
// starts where the leader leaves room. It ends after the leader, so that what comes next waits for both.
constexpr int kLeads = 1, kFollows = 2;

// Waits until everything ahead in the stream is done and what it wrote can be read.
__device__ __forceinline__ void wait_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
