// One kernel at a time: nothing to wait for.
#pragma once

inline void launch_dependents() {}
inline void wait_dependencies() {}
