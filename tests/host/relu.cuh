// The larger of a number and 0; NaN stays NaN.
#pragma once

inline float relu(float x) { return x < 0.0f ? 0.0f : x; }
