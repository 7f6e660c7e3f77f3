// Rows of a cache of 656 bytes a token: 512 numbers of 8 bits, a scale for each 128 of them, and the other columns in 16 bits, which
// are those of OutElement.
#pragma once

constexpr int kRowOfCache = 656;
using CacheElement = unsigned char;
static float row_factor = 1.0f;  // of the scales of all rows
static void store_row(CacheElement* row, bool exists) {
  float scales[4];
  for (float& scale : scales) scale = exists ? row_factor * (0.02f * std::abs(random_number()) + 0.001f) : NAN;
  for (int i = 0; i < 512; ++i) row[i] = exists ? pack<e4m3>(20.0f * random_number(), 0.0f, 0.0f, 0.0f) & 255 : 0x7f;
  std::memcpy(row + 512, scales, 16);
  for (int i = 0; i < 64; ++i) {
    const OutElement number = exists ? OutElement{static_cast<uint16_t>(pack<OutElement>(random_number(), 0.0f))} : OutElement{0x7fff};
    std::memcpy(row + 528 + 2 * i, &number, 2);
  }
}
static float number_of(const CacheElement* row, int column) {
  if (column >= 512) {
    OutElement number;
    std::memcpy(&number, row + 528 + 2 * (column - 512), 2);
    return to_float(number);
  }
  float scale;
  std::memcpy(&scale, row + 512 + 4 * (column / 128), 4);
  return scale * to_float(e4m3{row[column]});
}
