// Programmatic dependent launch (PTX ISA, "griddepcontrol"): a kernel may be launched while the one ahead of it in the
// stream still runs, and then waits by itself before it touches memory.
#pragma once

// From here on the next kernel may be launched; its blocks start where there is room for them.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }

// Waits until everything ahead in the stream is done and what it wrote can be read.
__device__ __forceinline__ void wait_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
